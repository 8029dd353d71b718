"""Find where packed sequences begin, from any argument that says so.

Ours is `cu_seqlens`. transformers and TRL pass `cu_seq_lens_q`, `seq_idx`, or `position_ids` that
restart. Letters: B batch, T time, N packed sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_REMEDY = "pass the sequences as one row (a batch of 1) with cu_seqlens, or as a padded batch"


def find_boundaries(
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    *,
    mask: Tensor | None,
    continues: bool,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | None:
    """Boundaries (N + 1,) of the sequences packed in one row; None if rows are whole sequences.

    Args:
        mask: (B, T), 0 at padding; None without padding.
        continues: whether a cache holds earlier tokens.
        The rest as in `FracModel.forward`, in order of precedence.
    """
    if cu_seqlens is not None:
        return cu_seqlens
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        return _same_boundaries(cu_seq_lens_q, cu_seq_lens_k)
    if seq_idx is not None:
        return _from_changes(seq_idx, "seq_idx", seq_idx[:, 1:] != seq_idx[:, :-1])
    if position_ids is None or position_ids.shape[-1] == 1:
        return None
    if torch.compiler.is_compiling():
        if continues:
            return None
        raise ValueError(
            "position_ids cannot be read while compiling, and may mark the starts of packed "
            "sequences; pass cu_seqlens instead, or omit them"
        )
    return _from_positions(position_ids, mask, continues)


def _same_boundaries(queries: Tensor | None, keys: Tensor | None) -> Tensor:
    if queries is None or keys is None:
        return queries if keys is None else keys  # pyright: ignore[reportReturnType]
    same = queries is keys or queries.shape == keys.shape
    if same and queries.device.type == "cpu":
        same = torch.equal(queries, keys)
    if not same:
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be equal: a Frac layer has no keys of its own, "
            f"got shapes {tuple(queries.shape)} and {tuple(keys.shape)}"
        )
    return queries


def _from_positions(position_ids: Tensor, mask: Tensor | None, continues: bool) -> Tensor | None:
    """Boundaries from positions (B or 1, T): each increases by one or starts a new sequence."""
    begins = position_ids.diff(dim=-1) != 1
    if not bool(begins.any()) or (mask is not None and _count_real(position_ids, mask)):
        return None
    if mask is not None or continues:
        where = "with padding" if mask is not None else "with a cache"
        raise ValueError(
            f"position_ids must increase by one per token {where}, where packed sequences "
            f"cannot be told apart; {_REMEDY}"
        )
    boundaries = _from_changes(position_ids, "position_ids", begins)
    firsts = position_ids[0, boundaries[:-1]]
    if not bool((firsts == firsts[0]).all()):
        raise ValueError(
            "position_ids must increase by one per token, or restart where a packed "
            f"sequence begins, got a sequence that begins at {int(firsts.max())} and one at "
            f"{int(firsts.min())}; {_REMEDY}"
        )
    return boundaries


def _count_real(position_ids: Tensor, mask: Tensor) -> bool:
    """Whether positions count the real tokens of each row, ignoring padding."""
    offsets = position_ids - mask.ne(0).cumsum(-1)
    lowest = torch.where(mask != 0, offsets, offsets.max()).amin(-1, keepdim=True)
    return bool(((offsets == lowest) | (mask == 0)).all())


def _from_changes(values: Tensor, name: str, begins: Tensor) -> Tensor:
    """Boundaries of one row, given the tokens after the first at which a sequence begins."""
    if values.shape[0] != 1:
        raise ValueError(f"{name} packs sequences in a batch of {values.shape[0]} rows; {_REMEDY}")
    starts = begins[0].nonzero().flatten() + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=values.shape[1])
