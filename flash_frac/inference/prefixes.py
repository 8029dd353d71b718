"""Prefix states: what the model has read before, it need not read again, from any token on.

A tree over tokens: an edge is some tokens that follow each other, and a node is a place where
prompts branch or a state was kept. A state of fixed size belongs to its node. Keys and values of
layers that see all tokens belong to the edges, so that prompts share those of their common tokens.
Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flash_frac.inference.levels import Levels
from flash_frac.inference.prefix_tree import Node, Tokens
from flash_frac.inference.snapshots import Found, Part, Shapes, Snapshot, in_order, packed, views
from flash_frac.inference.state import check_model, empty_cache
from flash_frac.inference.storage import (
    difference_of,
    fingerprint,
    fixed_tensors,
    growing_tensors,
)
from flash_frac.models import FracForCausalLM
from flash_frac.models.buffers import BufferedCache


@dataclass(frozen=True)
class PrefixStats:
    """Counts since the beginning, and what is held now.

    Attributes:
        hits, misses: prompts for which a state was found, or none.
        tokens_asked, tokens_reused: tokens of all prompts, and of those in states that were found.
        refused: states that were larger than the budgets, and so not kept.
        moved_to_host: snapshots (states, keys and values) that have left the device.
        dropped: snapshots that have left the last level to make room.
        snapshots: how many are held.
        device_bytes, host_bytes: held at each level.
    """

    hits: int
    misses: int
    tokens_asked: int
    tokens_reused: int
    refused: int
    moved_to_host: int
    dropped: int
    snapshots: int
    device_bytes: int
    host_bytes: int


class PrefixStates:
    """States of prompts that were read, to begin other prompts with.

    One thread may use it, on one CUDA stream: the one in which the model runs. Budgets are for
    tensors. What `longest` has found stays in memory, beyond them, for as long as it is held.

    Args:
        device_bytes: budget on the device of the model.
        host_bytes: budget in host memory, pinned if the device is a GPU. PyTorch rounds each
            pinned allocation up to a power of two, which is not counted.
        spacing: `wanted` names every multiple of this; None for none.

    Example:
        >>> prefixes = PrefixStates(device_bytes=2**30).bind(model)
        >>> found = prefixes.longest(ids)
        >>> if found is not None:
        ...     found.restore(cache, row)
        >>> # Read the rest of ids into the row, then
        >>> prefixes.put(ids, cache, row, logits=logits)
    """

    def __init__(
        self, *, device_bytes: int, host_bytes: int = 0, spacing: int | None = 512
    ) -> None:
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes}
        for name, size in sizes.items():
            if size < 0:
                raise ValueError(f"{name} must be 0 or more, got {size}")
        if spacing is not None and spacing < 1:
            raise ValueError(f"spacing must be None or at least 1, got {spacing}")
        self.spacing, self._budgets = spacing, tuple(sizes.values())
        self._root = Node()
        self._hits = self._misses = self._asked = self._reused = self._refused = 0
        self._fingerprint: dict[str, str] | None = None

    def bind(self, model: FracForCausalLM) -> PrefixStates:
        """Keep states of this model, and of no other. To be called before anything else.

        Call it again after a change of the weights: states of other weights are an error.
        """
        check_model(model)
        here = fingerprint(model)
        if self._fingerprint is not None:
            if difference := difference_of(self._fingerprint, here):
                raise ValueError(
                    f"model must be the one whose states are kept, but {difference}; make another "
                    "PrefixStates for it"
                )
            return self
        cache = empty_cache(model, 1)
        self._shapes = Shapes.of(cache)
        device = next(x.device for x in {**fixed_tensors(cache), **growing_tensors(cache)}.values())
        self._levels = Levels(self._budgets, device, self._forget)
        self._fingerprint = here
        return self

    def longest(self, ids: Sequence[int] | Tokens | Tensor) -> Found | None:
        """The deepest state whose tokens begin a prompt; None if there is none.

        At least one token is left to read, unless the logits after all of them are kept.
        """
        tokens = self._tokens(ids)
        self._asked += len(tokens)
        path, _ = self._root.walk(tokens)
        for node in reversed(path):
            whole = node.num_tokens == len(tokens)
            if node.gone or node.state is None or (whole and not _has_logits(node.state)):
                continue
            self._hits += 1
            self._reused += node.num_tokens
            return self._load(node)
        self._misses += 1
        return None

    def put(
        self,
        ids: Sequence[int] | Tokens | Tensor,
        cache: BufferedCache,
        row: int,
        *,
        logits: Tensor | None = None,
    ) -> bool:
        """Keep a copy of the state of a row, which has read exactly these tokens.

        Keys and values of tokens that are in the tree already are not copied again.

        Args:
            logits: (V,) of the next token, so that a prompt of exactly these tokens need not be
                read at all. They are kept in float32.

        Returns:
            Whether the state is kept. One that is larger than the budgets is not.
        """
        tokens = self._tokens(ids)
        if not len(tokens) or cache.counts[row] != len(tokens):
            raise ValueError(
                f"ids must be the tokens that row {row} has read, which are {cache.counts[row]}, "
                f"and at least one, got {len(tokens)}"
            )
        self._shapes.check(cache)
        path, matched = self._root.walk(tokens)
        known = path[-1].state if path and path[-1].num_tokens == len(tokens) else None
        if known is not None and (logits is None or _has_logits(known)):
            self._touch(path[-1])
            return True
        tensors = {name: x[row] for name, x in fixed_tensors(cache).items()}
        parts = self._shapes.fixed
        if logits is not None:
            tensors["logits"] = logits
            parts = in_order([*parts, Part("logits", tuple(logits.shape), torch.float32)])
        if not self._fits(tokens, path, parts):
            self._refused += 1
            return False
        node = self._node_at(tokens, path, matched)
        if known is not None:
            self._levels.discard(known)
        node.state = Snapshot(node, parts)
        self._keep(node, packed(tensors, parts, self._levels.device), cache, row)
        return not node.gone and node.state is not None

    def wanted(
        self,
        ids: Sequence[int] | Tokens | Tensor,
        known: int = 0,
        boundaries: Iterable[int] = (),
    ) -> list[int]:
        """After how many tokens of a prompt its reader should `put` a state, in order.

        These are the boundaries, the end, the multiples of `spacing`, and where prompts branch:
        those before and this one.

        Args:
            known: tokens that are not read, because `longest` has found their state.
            boundaries: numbers of tokens after which others may go on otherwise, such as the ends
                of messages.
        """
        tokens, boundaries = self._tokens(ids), set(boundaries)
        if any(not 0 <= n <= len(tokens) for n in boundaries):
            raise ValueError(
                f"boundaries must be between 0 and the {len(tokens)} tokens of ids, got "
                f"{sorted(boundaries)}"
            )
        path, matched = self._root.walk(tokens)
        branches = {node.num_tokens for node in path if len(node.children) > 1}
        found = {len(tokens), matched} | branches | boundaries
        if self.spacing is not None:
            found |= set(range(self.spacing, len(tokens), self.spacing))
        return sorted(n for n in found if n > known)

    def clear(self) -> None:
        """Hold no state."""
        for child in list(self._root.children.values()):
            self._remove(child)

    def stats(self) -> PrefixStats:
        """What has happened so far, and what is held."""
        device, host = self._levels.table
        return PrefixStats(
            hits=self._hits,
            misses=self._misses,
            tokens_asked=self._asked,
            tokens_reused=self._reused,
            refused=self._refused,
            moved_to_host=host.arrived,
            dropped=self._levels.dropped,
            snapshots=len(device.held) + len(host.held),
            device_bytes=device.nbytes,
            host_bytes=host.nbytes,
        )

    def _tokens(self, ids: Sequence[int] | Tokens | Tensor) -> Tokens:
        if self._fingerprint is None:
            raise ValueError("prefix states need their model first: call bind(model)")
        found = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise ValueError(
                f"ids must be the token ids of one sequence, got {found.dtype} of shape "
                f"{found.shape}"
            )
        # A copy, because it will be part of the tree.
        return found.astype(np.int64)

    def _fits(self, tokens: Tokens, path: list[Node], parts: Sequence[Part]) -> bool:
        """Whether the levels can hold a state with the keys and values of all its tokens."""
        segments = [node.segment.nbytes for node in path if node.segment is not None]
        num_new = len(tokens) - (path[-1].num_tokens if path else 0)
        new = self._shapes.segment(num_new)
        sizes = [sum(part.nbytes for part in x) for x in (parts, new)] + segments
        return max(sizes) <= self._levels.largest and sum(sizes) <= self._levels.budget

    def _node_at(self, tokens: Tokens, path: list[Node], matched: int) -> Node:
        """The node after all tokens, which is made if need be."""
        node = path[-1] if path else self._root
        if matched > node.num_tokens:
            child = node.children[int(tokens[node.num_tokens])]
            node = self._split(child, matched - node.num_tokens)
        if node.num_tokens < len(tokens):
            node = node.add(tokens[node.num_tokens :])
        return node

    def _split(self, lower: Node, num: int) -> Node:
        """Cut an edge after some of its tokens; the new node between both parts."""
        upper, old = lower.cut(num), lower.segment
        if old is not None:
            upper.segment = Snapshot(upper, self._shapes.segment(len(upper.tokens)))
            lower.segment = Snapshot(lower, self._shapes.segment(len(lower.tokens)))
            self._levels.split(old, upper.segment, lower.segment)
        return upper

    def _keep(self, node: Node, state: Tensor, cache: BufferedCache, row: int) -> None:
        """Hold the state of a node, and the keys and values of its edge if it is new."""
        assert node.state is not None
        new = bool(self._shapes.growing) and node.segment is None
        # Those of the tokens before must not make room for it.
        self._touch(node)
        if new:
            columns = slice(node.begin, node.num_tokens)
            growing = growing_tensors(cache).items()
            keys_values = {name: x[row][:, columns] for name, x in growing}
            node.segment = Snapshot(node, self._shapes.segment(len(node.tokens)))
            memory = packed(keys_values, node.segment.parts, self._levels.device)
            self._levels.keep(node.segment, memory)
        if not node.gone:
            self._levels.keep(node.state, state)
        if not node.gone:
            self._touch(node)

    def _load(self, node: Node) -> Found:
        """A state with the keys and values of all its tokens, on the device."""
        held = node.needed()
        memories = [self._levels.load(snapshot) for snapshot in held]
        self._touch(node)
        # More would push itself down again.
        if sum(snapshot.nbytes for snapshot in held) <= self._levels.table[0].budget:
            for snapshot, memory in zip(held, memories, strict=True):
                if snapshot.level is not None:
                    self._levels.raise_up(snapshot, memory)
            if not node.gone:
                self._touch(node)
        # Where it was not moved to the device, a copy is made there.
        state, *segments = (
            views(self._levels.on_device(x, memory), x.parts)
            for x, memory in zip(held, memories, strict=True)
        )
        logits = state.pop("logits", None)
        logits = None if logits is None else logits.clone()
        return Found(node.num_tokens, logits, self._shapes, state, segments[::-1])

    def _touch(self, node: Node) -> None:
        """Note that a state was used just now, and after it what it needs, which goes later."""
        for snapshot in node.needed():
            if snapshot.level is not None:
                self._levels.touch(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        """Take a snapshot that is gone out of the tree, with all that is of no use without it."""
        node: Node = snapshot.owner
        if snapshot is node.segment:
            self._remove(node)
        elif snapshot is node.state:
            node.state = None
            self._prune(node)

    def _remove(self, node: Node) -> None:
        """Take a node and all under it out of the tree."""
        assert node.parent is not None
        for lower in node.below():
            lower.gone = True
            for snapshot in (lower.state, lower.segment):
                if snapshot is not None:
                    self._levels.discard(snapshot)
        del node.parent.children[int(node.tokens[0])]
        self._prune(node.parent)

    def _prune(self, node: Node) -> None:
        """Take a node out of the tree which no state needs."""
        if node.parent is not None and not node.gone and not node.children and node.state is None:
            self._remove(node)


def _has_logits(state: Snapshot) -> bool:
    return any(part.name == "logits" for part in state.parts)
