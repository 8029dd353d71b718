"""Operators to compare with, each only where it can be imported and run, at 16 heads.

Models to compare with are in `flash_frac.bench.peers`.
Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.bench.peers import mamba_version
from flash_frac.bench.timing import attempt
from flash_frac.ops.testing import ScanInputs


class Operation(NamedTuple):
    """A function of tensors that yields y. `shape`: its H, M, D; `is_scan`: whether y is ours."""

    name: str
    shape: Mapping[str, int | None]
    function: Callable[..., Tensor]
    arguments: tuple[Tensor, ...]
    is_scan: bool = False

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.arguments)

    def backward(self) -> list[Tensor]:
        """y and the gradients of its sum, forward included."""
        leaves = [x.detach().requires_grad_() for x in self.arguments]
        y = self.function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def op_peers(names: Iterable[str], inputs: ScanInputs, failures: list[str]) -> list[Operation]:
    """Those of `names` that can be imported, with inputs of the batch and time of these."""
    made = (attempt(name, partial(OP_PEERS[name], inputs), failures) for name in names)
    return [operation for found in made for operation in found]


def gated_linear_attention(inputs: ScanInputs) -> Operation:
    """The same scan of the same numbers; read and write are bfloat16, which its kernels want."""
    import fla
    from fla.ops.gla import chunk_gla

    def scan(u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor) -> Tensor:
        options: Any = {"scale": 1.0, "output_final_state": True}
        return chunk_gla(q=read, k=write, v=u, g=log_decay, **options)[0]

    inputs = inputs.to(torch.bfloat16)
    heads, channels = inputs.u.shape[2:]
    modes = inputs.read.shape[-1]
    name = f"fla {fla.__version__} chunk_gla K{modes} V{channels}"
    return Operation(name, {"H": heads, "M": modes, "D": channels}, scan, inputs, True)


def gated_delta_rule(inputs: ScanInputs) -> Operation:
    import fla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        options: Any = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **options)[0]

    heads, keys, values = 16, 96, 192
    q, k, v = (normal(inputs, heads, size) for size in (keys, keys, values))
    g = F.logsigmoid(normal(inputs, heads).float())
    arguments = (q, k, v, g, normal(inputs, heads).sigmoid())
    name = f"fla {fla.__version__} gated_delta_rule K{keys} V{values}"
    return Operation(name, {"H": heads, "M": keys, "D": values}, rule, arguments)


def state_space_dual(inputs: ScanInputs) -> Operation:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def scan(x: Tensor, dt: Tensor, rate: Tensor, write: Tensor, read: Tensor) -> Tensor:
        options: Any = {"chunk_size": 256, "return_final_states": True}
        return mamba_chunk_scan_combined(x, dt, rate, write, read, **options)[0]

    heads, channels, size = 16, 256, 128
    x, dt = normal(inputs, heads, channels), F.softplus(normal(inputs, heads) - 4)
    rate = -torch.linspace(1, 16, heads, device=x.device)
    arguments = (x, dt, rate, normal(inputs, 1, size), normal(inputs, 1, size))
    name = f"{mamba_version()} SSD D{channels} N{size}"
    return Operation(name, {"H": heads, "M": size, "D": channels}, scan, arguments)


def attention(inputs: ScanInputs) -> Operation:
    heads, channels = 16, 128

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (normal(inputs, heads, channels).transpose(1, 2).contiguous() for _ in range(3))
    name = f"torch {torch.__version__} causal SDPA D{channels}"
    return Operation(name, {"H": heads, "M": None, "D": channels}, attend, (q, k, v))


def normal(inputs: ScanInputs, *sizes: int) -> Tensor:
    """Random bfloat16 (B, T, *sizes), beside these inputs."""
    batch_time = inputs.u.shape[:2]
    return torch.randn(*batch_time, *sizes, device=inputs.u.device, dtype=torch.bfloat16)


OP_PEERS: dict[str, Callable[[ScanInputs], Operation]] = {
    "chunk_gla": gated_linear_attention,
    "gated_delta_rule": gated_delta_rule,
    "ssd": state_space_dual,
    "sdpa": attention,
}
