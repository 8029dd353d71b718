"""GatedMLP, the MLP that may follow the mixer of a block (SwiGLU).

    y = down_proj(silu(gate_proj(x)) up_proj(x))

Letters: B batch, T time, E width, I intermediate width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.layers.norm import RMSNorm
from flash_frac.layers.plain import (
    has_plain_weight,
    is_watched,
    linear,
    linears,
    steps_directly,
    stored,
)
from flash_frac.layers.sizes import check_sizes
from flash_frac.ops import swiglu, uses_triton
from flash_frac.ops.backends import refuse_second_derivative


class GatedMLP(nn.Module):
    """y = down_proj(silu(gate_proj(x)) up_proj(x)), without biases.

    In training on Triton, gate and up are kept for the gradient and their product is recomputed,
    which saves a third of the activations between the projections.

    Args:
        hidden_size: width E of input and output.
        intermediate_size: width I of gate and up.
        initializer_range: initial standard deviation of the weights.
        backend: as in `swiglu`.

    Example:
        >>> mlp = GatedMLP(256, 768)
        >>> y = mlp(torch.randn(2, 100, 256))
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        initializer_range: float = 0.02,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.initializer_range, self.backend = initializer_range, backend
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialise all parameters."""
        for module in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(module.weight, std=self.initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., E) of x (..., E)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self._recomputes_product(gate):
            return _Down.apply(gate, up, self.down_proj.weight, self.backend)
        return self.down_proj(swiglu(gate, up, self.backend))

    def _recomputes_product(self, gate: Tensor) -> bool:
        """Whether to use `_Down`: in training on Triton, with a plain down_proj."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            # A compiler chooses by itself what to keep.
            return False
        down, device = self.down_proj, gate.device.type
        return (
            has_plain_weight(down)
            and down.bias is None
            and not is_watched(down)
            and uses_triton(self.backend, gate)
            # `swiglu` raises an error that says what to do.
            and not torch._C._are_functorch_transforms_active()
            and gate.dtype == _linear_dtype(down.weight, device)
        )

    def steps_in_place(self, x: Tensor, norm: RMSNorm) -> bool:
        """Whether `step_in_place` supports x (B, T, E): one token, no gradients, plain layers."""
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        return steps_directly(self, x, norm, parts, self.backend) and (
            self.gate_proj.bias is None and self.up_proj.bias is None
        )

    def step_in_place(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + mlp(norm(x)) for one token (B, 1, E); reads each weight once."""
        from flash_frac.ops.decode.linear import fused_norm_swiglu
        from flash_frac.ops.decode.plan import MOST_VECTORS

        hidden, gate, up = x[:, 0], self.gate_proj, self.up_proj
        if hidden.shape[0] > MOST_VECTORS:
            product = swiglu(*linears(hidden, (gate, up), norm), backend=self.backend)
        else:
            of_gate, of_up = stored(gate.weight), stored(up.weight)
            assert of_gate is not None and of_up is not None, "steps_in_place"
            product = fused_norm_swiglu(
                hidden,
                of_gate.values,
                of_up.values,
                norm.weight,
                norm.eps,
                gate_scale=of_gate.scale,
                up_scale=of_up.scale,
            )
        return linear(product, self.down_proj, residual=hidden)[:, None]


def add_mlp(x: Tensor, norm: nn.Module, mlp: nn.Module) -> Tensor:
    """x + mlp(norm(x)) of (B, T, E); decoding one token uses its own kernels."""
    # An adapter may replace the MLP; then it must be called.
    if isinstance(mlp, GatedMLP) and isinstance(norm, RMSNorm) and mlp.steps_in_place(x, norm):
        return mlp.step_in_place(x, norm)
    return x + mlp(norm(x))


def _linear_dtype(weight: Tensor, device: str) -> torch.dtype:
    """The dtype of a linear layer's result: autocast's, or that of its weight."""
    autocast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


class _Down(torch.autograd.Function):
    """weight (silu(gate) up); keeps gate and up for the gradient, but not their product.

    gate, up (..., I); weight (E, I), rounded to their dtype as autocast does.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.backend = backend
        # Autocast would cache the weight cast here, without gradients, and reuse it elsewhere.
        with torch.autocast(gate.device.type, enabled=False):
            return F.linear(swiglu(gate, up, backend), weight.to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        refuse_second_derivative("GatedMLP on Triton")
        (dy,), (gate, up, weight) = dys, ctx.saved_tensors
        dgate = dup = dweight = None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (gate, up)]
            product = swiglu(*leaves, backend=ctx.backend)
        if ctx.needs_input_grad[2]:
            rows, inputs = (x.detach().reshape(-1, x.shape[-1]) for x in (dy, product))
            dweight = (rows.t() @ inputs).to(weight.dtype)
        if any(ctx.needs_input_grad[:2]):
            dgate, dup = torch.autograd.grad(product, leaves, dy @ weight.to(dy.dtype))
        return dgate, dup, dweight, None
