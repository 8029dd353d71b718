"""The gated delta rule: `delta_scan` over sequences, `delta_step` for one token.

For each head, with a = exp(log_decay) and a state of one row for each key channel,

    state[t] = a[t] state[t - 1] + beta[t] k[t] (v[t] - a[t] state[t - 1]^T k[t])^T
    y[t]     = state[t]^T q[t]

The state maps keys to values. A token replaces a share beta of the value stored at its key by its
own value.

Letters: B batch, T time, H heads, K key channels, D value channels, N sequences (B, or those packed
in a row).
"""

from __future__ import annotations

from torch import Tensor

from flash_frac.ops.backends import choose
from flash_frac.ops.scan.api import ScanOutput, check_cu_seqlens, check_log_decay, check_state


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> ScanOutput:
    """The gated delta rule over sequences, whole or in pieces.

    Per token and head, with a = exp(log_decay): S <- a S + beta k (v - a S^T k)^T and y = S^T q.
    Feeding the returned state back in continues exactly.

    Args:
        q: (B, T, H, K) queries, already scaled. B and T may be 0.
        k: (B, T, H, K) keys, of at most unit length: longer ones let the state grow.
        v: (B, T, H, D) values, float64, float32, bfloat16 or float16, like q and k.
        beta: (B, T, H) share of the stored value that is replaced, from 0 to 1. A token with
            beta 0 and log_decay 0 is an identity step: padding.
        log_decay: (B, T, H) log of the share of the state that is kept, from -inf to 0; float32.
            Positive values raise on the CPU. On a GPU they are not checked, which would sync with
            the device, and give wrong results.
        initial_state: (N, H, K, D) state before the first token, float32; zeros if None.
        cu_seqlens: (N + 1,) integers, 0 first and T last: sequence n of the packed row (B = 1) is
            tokens cu_seqlens[n] to cu_seqlens[n + 1]. Empty sequences keep their initial state.
            Values are checked when the tensor is on the CPU.
        backend: "auto" (Triton on CUDA, torch elsewhere), "triton" (K up to 128, D up to 256),
            "torch" (chunked, plain PyTorch) or "recurrent" (the slow reference). A backend that
            cannot run raises an error that says why.

    Returns:
        ScanOutput(y, state): y (B, T, H, D) like v; state (N, H, K, D) after the last token.
        Accumulation and state are float32, or float64 if v is. An inf or NaN affects only its own
        sequence, from that token on.

    Example:
        >>> k = torch.nn.functional.normalize(torch.randn(2, 1024, 4, 64), dim=-1)
        >>> y, state = delta_scan(q * 64**-0.5, k, v, beta, log_decay)
    """
    check_delta_inputs(q, k, v, beta, log_decay, ("B", "T", "H"))
    num_states = v.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, v)
    state = initial_state
    if state is not None:
        state = check_state(state, "initial_state", num_states, v, k)
    scan = choose("delta", backend, v, k)
    return ScanOutput(*scan(q, k, v, beta, log_decay, state, cu_seqlens))


def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    backend: str = "auto",
) -> ScanOutput:
    """One token of `delta_scan`, for decoding.

    Args:
        q, k: (B, H, K); v: (B, H, D); beta, log_decay: (B, H); state: (B, H, K, D), float32.
        backend: as in `delta_scan`.

    Returns:
        ScanOutput(y, state): y (B, H, D) like v; the new state, a new tensor.

    Example: `y, state = delta_step(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], log_decay[:, 0], state)`
    """
    check_delta_inputs(q, k, v, beta, log_decay, ("B", "H"))
    state = check_state(state, "state", v.shape[0], v, k)
    step = choose("delta_step", backend, v, k)
    return ScanOutput(*step(q, k, v, beta, log_decay, state))


def check_delta_inputs(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, axes: tuple[str, ...]
) -> None:
    """ValueError unless shapes, devices and dtypes match; `axes` names the axes of beta."""
    letters = ", ".join(axes)
    if v.ndim != len(axes) + 1 or not v.is_floating_point():
        raise ValueError(
            f"v must be a floating-point tensor of shape ({letters}, D), "
            f"got {tuple(v.shape)} of {v.dtype}"
        )
    if q.ndim != v.ndim:
        raise ValueError(f"q must have shape ({letters}, K) like v, got {tuple(q.shape)}")
    of_token, keys = tuple(v.shape[:-1]), (*v.shape[:-1], q.shape[-1])
    tensors = {"q": (q, keys), "k": (k, keys), "beta": (beta, of_token)}
    tensors["log_decay"] = (log_decay, of_token)
    for name, (x, expected) in tensors.items():
        if x.shape != expected:
            raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")
        if x.device != v.device:
            raise ValueError(f"{name} must be on {v.device} like v, got {x.device}")
    for name, x in (("q", q), ("k", k)):
        if x.dtype != v.dtype:
            raise ValueError(f"{name} must be {v.dtype} like v, got {x.dtype}")
    if not beta.is_floating_point():
        raise ValueError(f"beta must be a floating-point tensor, got {beta.dtype}")
    sizes = dict(zip(("H", "D", "K"), (*v.shape[-2:], q.shape[-1]), strict=True))
    if empty := [axis for axis, size in sizes.items() if size == 0]:
        raise ValueError(f"v and q must have at least one head and channel, got {empty[0]} = 0")
    check_log_decay(log_decay)
