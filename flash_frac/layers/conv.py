"""The causal convolution as a module, so that its hooks run: offloading uses them."""

from __future__ import annotations

from torch import Tensor, nn

from flash_frac.ops import ConvOutput, causal_conv


class CausalConv1d(nn.Conv1d):
    """silu(conv(x)) of each channel of x (B, T, I); arguments and result as in `causal_conv`."""

    def __init__(self, channels: int, taps: int, *, bias: bool = True) -> None:
        super().__init__(channels, channels, taps, groups=channels, bias=bias)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        *,
        window: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> ConvOutput:
        return causal_conv(
            x,
            self.weight,
            self.bias,
            window=window,
            mask=mask,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )
