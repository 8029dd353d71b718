"""Default sizes of layers, shared with FracConfig.

They are the paper's, except READ_INIT: configurations of its models, such as `frac-1.3b`, set -1.

Letters: E hidden_size, H heads, D channels of a head, M modes.
"""

from __future__ import annotations

from numbers import Integral

# The bank of every model of the paper: M geometric timescales from one token to 2^17.
NUM_MODES = 16
TAU_MIN, TAU_MAX = 1.0, 131072.0
# Initial p_read and sigmoid(p_write).
READ_INIT, WRITE_INIT = -2.0, 0.25
# Channels of all heads together, as a multiple of E: H D of a Frac layer, H K of a delta layer.
FRAC_EXPAND, DELTA_EXPAND = 2.0, 0.75


def default_num_heads(hidden_size: int) -> int:
    """E / 64 heads for widths up to 1024, 16 up to 2048, and E / 128 beyond.

    That is 12 at 768 and 16 at 2048, as in the paper. If this does not divide the width, the next
    smaller number that does is used.

    Example:
        >>> default_num_heads(256)
        4
    """
    most = max(min(hidden_size // 64, 16), hidden_size // 128, 1)
    return next(heads for heads in range(most, 0, -1) if hidden_size % heads == 0)


def head_sizes(
    hidden_size: int, num_heads: int | None, head_dim: int | None, expand: float
) -> tuple[int, int]:
    """num_heads H and head_dim D; None values are chosen so that H D = expand E.

    Example:
        >>> head_sizes(256, None, None, FRAC_EXPAND)
        (4, 128)
    """
    check_sizes(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    channels = expand * hidden_size
    if num_heads is None and head_dim is not None:
        return _divide(channels, "head_dim", head_dim, missing="num_heads"), head_dim
    if num_heads is None:
        num_heads = default_num_heads(hidden_size)
    if head_dim is None:
        head_dim = _divide(channels, "num_heads", num_heads, missing="head_dim")
    return num_heads, head_dim


def check_sizes(**sizes: int | None) -> None:
    """Raise a ValueError unless each size is None or a positive integer."""
    for name, size in sizes.items():
        if size is not None and not isinstance(size, Integral):
            raise ValueError(f"{name} must be an integer, got {size!r}")
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _divide(channels: float, name: str, size: int, *, missing: str) -> int:
    """channels / size; a ValueError asks for the missing size if that is not an integer."""
    if channels % size:
        raise ValueError(
            f"{missing} must be given, because the default of {channels:g} channels is not a "
            f"multiple of {name} ({size})"
        )
    return int(channels // size)
