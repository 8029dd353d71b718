"""The scan of a bank of exponential modes: `frac_scan` over sequences, `frac_step` for one token.

For each head, with rho = exp(log_decay),

    state[t, m] = rho[t, m] state[t - 1, m] + write[t, m] u[t]
    y[t]        = sum_m read[t, m] state[t, m]

Letters: B batch, T time, H heads, D head channels, M modes, N sequences (B, or those packed in a
row).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_frac.ops.backends import choose


class ScanOutput(NamedTuple):
    """y: like u; state: (N, H, M, D), float32 (float64 for float64 inputs)."""

    y: Tensor
    state: Tensor


def frac_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> ScanOutput:
    """The scan of a Frac layer over sequences, whole or in pieces.

    Per token, head and mode: state <- exp(log_decay) state + write u, and y = sum of read state
    over the modes. Feeding the returned state back in continues exactly.

    Args:
        u: (B, T, H, D) input, float64, float32, bfloat16 or float16. B and T may be 0.
        read: (B, T, H, M) weights of the modes in the output.
        write: (B, T, H, M) weights of the input in the modes.
        log_decay: (B, T, H, M) log of the share of a mode that is kept, from -inf to 0; float32.
            Positive values raise on the CPU. On a GPU they are not checked, which would sync with
            the device, and give wrong results.
        initial_state: (N, H, M, D) state before the first token, float32; zeros if None.
        cu_seqlens: (N + 1,) integers, 0 first and T last: sequence n of the packed row (B = 1) is
            tokens cu_seqlens[n] to cu_seqlens[n + 1]. Empty sequences keep their initial state.
            Values are checked when the tensor is on the CPU.
        backend: "auto" (Triton on CUDA, torch elsewhere), "triton", "torch" (chunked, plain
            PyTorch) or "recurrent" (the slow reference). A backend that cannot run raises an error
            that says why.

    Returns:
        ScanOutput(y, state): y (B, T, H, D) like u; state (N, H, M, D) after the last token.
        Accumulation and state are float32, or float64 if u is. An inf or NaN affects only its own
        sequence, from that token on.

    Example:
        >>> y, state = frac_scan(u[:, :512], read[:, :512], write[:, :512], log_decay[:, :512])
        >>> y, state = frac_scan(u[:, 512:], read[:, 512:], write[:, 512:], log_decay[:, 512:],
        ...                      initial_state=state)
    """
    check_scan_inputs(u, read, write, log_decay, ("B", "T", "H", "D"))
    num_states = u.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, u)
    state = initial_state
    if state is not None:
        state = check_state(state, "initial_state", num_states, u, read)
    scan = choose("scan", backend, u)
    return ScanOutput(*scan(u, read, write, log_decay, state, cu_seqlens))


def frac_step(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    backend: str = "auto",
) -> ScanOutput:
    """One token of `frac_scan`, for decoding.

    Args:
        u: (B, H, D); read, write, log_decay: (B, H, M); state: (B, H, M, D), float32.
        backend: as in `frac_scan`.

    Returns:
        ScanOutput(y, state): y (B, H, D) like u; the new state, a new tensor.

    Example: `y, state = frac_step(u[:, 0], read[:, 0], write[:, 0], log_decay[:, 0], state)`
    """
    check_scan_inputs(u, read, write, log_decay, ("B", "H", "D"))
    state = check_state(state, "state", u.shape[0], u, read)
    step = choose("step", backend, u)
    return ScanOutput(*step(u, read, write, log_decay, state))


def check_scan_inputs(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, axes: tuple[str, ...]
) -> None:
    """ValueError unless shapes, devices and dtypes match; `axes` names the axes of u."""
    if u.ndim != len(axes) or not u.is_floating_point():
        raise ValueError(
            f"u must be a floating-point tensor of shape ({', '.join(axes)}), "
            f"got {tuple(u.shape)} of {u.dtype}"
        )
    if read.ndim != u.ndim:
        raise ValueError(
            f"read must have shape ({', '.join(axes[:-1])}, M) to match u, got {tuple(read.shape)}"
        )
    expected = (*u.shape[:-1], read.shape[-1])
    for name, x in (("read", read), ("write", write), ("log_decay", log_decay)):
        if x.shape != expected:
            raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")
        if x.device != u.device:
            raise ValueError(f"{name} must be on {u.device} like u, got {x.device}")
    sizes = dict(zip(("H", "D", "M"), (*u.shape[-2:], read.shape[-1]), strict=True))
    if empty := [axis for axis, size in sizes.items() if size == 0]:
        raise ValueError(
            f"u and read must have at least one head, channel and mode, got {empty[0]} = 0"
        )
    check_log_decay(log_decay)


def check_log_decay(log_decay: Tensor) -> None:
    """ValueError unless log_decay is float32 or wider and, where values can be read, at most 0."""
    if log_decay.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_decay must be float32, which slow decays need, got {log_decay.dtype}; "
            "compute it in float32 (flash_frac.ops.controls does)"
        )
    if can_look_at(log_decay) and (log_decay > 0).any():
        raise ValueError(
            f"log_decay must be at most 0, a state cannot grow, got {log_decay.max().item():.3g}"
        )


def can_look_at(x: Tensor) -> bool:
    """Whether values can be read cheaply: not on a GPU, while tracing, or in torch.func."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def check_state(state: Tensor, name: str, num: int, u: Tensor, read: Tensor) -> Tensor:
    """The initial state; ValueError if its shape, dtype or device is wrong."""
    expected = (num, u.shape[-2], read.shape[-1], u.shape[-1])
    dtype = torch.promote_types(u.dtype, torch.float32)
    if state.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(state.shape)}")
    if state.dtype != dtype or state.device != u.device:
        raise ValueError(
            f"{name} must be {dtype} on {u.device}, got {state.dtype} on {state.device}"
        )
    return state


def check_cu_seqlens(cu_seqlens: Tensor, x: Tensor) -> int:
    """The number of sequences packed in x (1, T, ...); ValueError unless cu_seqlens delimits them.

    Values are checked only on the CPU: on a GPU that would sync with the device in every layer.
    """
    if x.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens needs one packed row, a batch of 1, got a batch of {x.shape[0]}"
        )
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or not integers:
        raise ValueError(
            "cu_seqlens must be a 1-d int32 or int64 tensor of at least two boundaries, "
            f"got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"cu_seqlens must be on {x.device} like its tokens, got {cu_seqlens.device}"
        )
    if can_look_at(cu_seqlens):
        values = cu_seqlens.tolist()
        if values[0] != 0 or values[-1] != x.shape[1] or values != sorted(values):
            shown = values if len(values) < 9 else [*values[:4], "...", *values[-4:]]
            raise ValueError(f"cu_seqlens must rise from 0 to T = {x.shape[1]}, got {shown}")
    return cu_seqlens.shape[0] - 1
