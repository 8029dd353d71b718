"""Prefix cache: a prompt that starts like an earlier one is read from where they differ.

It is a tree over tokens: an edge is a run of consecutive tokens, and a node is a position where
prompts branch or a state was kept. A fixed-size state belongs to its node. Keys and values of
full-attention layers belong to the edges, so prompts share those of their common tokens.
Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from flash_frac.files import check_folder
from flash_frac.inference.prefixes.files import Entry, PrefixFolder
from flash_frac.inference.prefixes.levels import DEVICE, DISK, Levels, PrefixStats, check_budgets
from flash_frac.inference.prefixes.snapshots import (
    Found,
    Part,
    Shapes,
    Snapshot,
    all_finite,
    packed,
    row_columns,
    row_states,
    views,
)
from flash_frac.inference.prefixes.tree import Node, Tokens, as_tokens
from flash_frac.inference.slots import Sent
from flash_frac.inference.state import check_model, empty_cache
from flash_frac.inference.storage import difference_of, fingerprint
from flash_frac.models import FracForCausalLM
from flash_frac.models.slot_cache import SlotCache


class PrefixStates:
    """Prefix cache: states of prompts read before, from which other prompts start.

    Use it from one thread and on one CUDA stream, the one on which the model runs. Budgets count
    tensors. A result of `longest` stays in memory, outside the budgets, as long as it is held.

    Args:
        device_bytes: budget on the device of the model, for tensors as PyTorch rounds them there.
        host_bytes: budget in host memory, pinned if the device is a GPU. PyTorch rounds each
            pinned allocation up to a power of two; the difference is not counted.
        disk_bytes: budget of the files in `folder`.
        folder: for snapshots evicted from memory; None for no folder. `bind` reuses its files.
            Between `bind` and `close`, only one model of one process may use it.
        spacing: `wanted` includes every multiple of this; None for no multiples.

    Example:
        >>> prefixes = PrefixStates(device_bytes=2**30).bind(model)
        >>> found = prefixes.longest(ids)
        >>> if found is not None:
        ...     found.restore(cache, row)
        >>> prefixes.put(ids, cache, row, logits=logits)  # after reading the rest of ids
    """

    def __init__(
        self,
        *,
        device_bytes: int,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        folder: str | Path | None = None,
        spacing: int | None = 512,
    ) -> None:
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        check_budgets(sizes, folder)
        if spacing is not None and spacing < 1:
            raise ValueError(f"spacing must be None or at least 1, got {spacing}")
        self.spacing, self._budgets = spacing, tuple(sizes.values())
        self._path = None if folder is None else check_folder(Path(folder), "folder")
        self._root = Node()
        self._hits = self._misses = self._asked = self._reused = self._refused = 0
        self._fingerprint: dict[str, str] | None = None
        self._folder: PrefixFolder | None = None

    def bind(self, model: FracForCausalLM, *, renew: bool = False) -> PrefixStates:
        """Cache states of this model only. Call this before anything else.

        Call it again after a change of the weights: then it fails or, with `renew`, drops states.
        """
        check_model(model)
        here = fingerprint(model)
        if self._fingerprint is not None:
            if (difference := difference_of(self._fingerprint, here)) is None:
                return self
            if not renew:
                raise ValueError(
                    f"model must be the one whose states are cached, but {difference}; pass renew"
                )
            self.clear()
            self.close()
        cache = SlotCache(empty_cache(model, 1), 1, 0)
        self._shapes = Shapes.of(cache)
        device = next(x.device for x in (*cache.stacks, *cache.column_stacks))
        folder = None if self._path is None else PrefixFolder(self._path, here)
        self._levels = Levels(self._budgets, device, folder, self._forget)
        if folder is not None:
            self._adopt(folder)
        self._fingerprint, self._folder = here, folder
        return self

    def longest(self, ids: Sequence[int] | Tokens | Tensor) -> Found | None:
        """The state of the longest cached prefix of a prompt; None if there is none.

        At least one token is left to read, unless the logits after the whole prompt are cached.
        """
        tokens = self._tokens(ids)
        self._asked += len(tokens)
        path, _ = self._root.walk(tokens)
        for node in reversed(path):
            whole = node.num_tokens == len(tokens)
            if node.gone or node.state is None or (whole and not node.state.has_logits):
                continue
            size = sum(snapshot.nbytes for snapshot in node.needed())
            found = self._levels.attempt(DEVICE, size, partial(self._load, node))
            if found is not None:
                self._hits += 1
                self._reused += node.num_tokens
                return found
        self._misses += 1
        return None

    def put(
        self,
        ids: Sequence[int] | Tokens | Tensor,
        cache: SlotCache,
        row: int,
        *,
        logits: Tensor | None = None,
    ) -> bool:
        """Cache a copy of the state of a row that has read exactly these tokens.

        Keys and values of tokens that are already in the tree are not copied again. A state with
        NaN or infinite numbers is dropped before it is used or written to a file.

        Args:
            logits: (V,) of the next token, so that a prompt of exactly these tokens need not be
                read at all. They are kept in float32.

        Returns:
            Whether the state is kept. It is not if it is larger than the budgets, or if memory runs
            out.
        """
        tokens = self._tokens(ids)
        if not len(tokens) or cache.counts[row] != len(tokens):
            raise ValueError(
                f"ids must be the {cache.counts[row]} tokens that row {row} has read, "
                f"and at least one, got {len(tokens)}"
            )
        self._shapes.check(cache)
        path, matched = self._root.walk(tokens)
        held = [x for node in path for x in (node.segment, node.state) if x is not None]
        if not all(map(self._levels.verify, held)):
            # What was dropped is no longer part of the tree.
            return self.put(tokens, cache, row, logits=logits)
        known = path[-1].state if path and path[-1].num_tokens == len(tokens) else None
        if known is not None and (logits is None or known.has_logits):
            self._levels.touch(path[-1].needed())
            return True
        tensors = row_states(cache, row)
        parts = self._shapes.state(0 if logits is None else len(logits))
        if logits is not None:
            tensors["logits"] = logits
        # Before the tree changes, because there may be no memory for it.
        copy = self._copy(tensors, parts) if self._fits(tokens, path, parts) else None
        if copy is None:
            self._refused += 1
            return False
        node = self._node_at(tokens, path, matched)
        if node is None:
            # A damaged file is no longer part of the tree.
            return self.put(tokens, cache, row, logits=logits)
        if known is not None:
            self._levels.discard(known)
        node.state = Snapshot(node, parts, finite=copy[0])
        self._keep(node, copy[1], cache, row)
        return not node.gone and node.state is not None

    def wanted(
        self,
        ids: Sequence[int] | Tokens | Tensor,
        known: int = 0,
        boundaries: Iterable[int] = (),
    ) -> list[int]:
        """Positions in a prompt at which to `put` a state, in order.

        These are the boundaries, the end, the multiples of `spacing`, and the position where this
        prompt branches off earlier ones.

        Args:
            known: tokens that need not be read, because `longest` has found their state.
            boundaries: positions after which other prompts may differ, such as the ends of
                messages.
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
        """Drop all states."""
        for child in list(self._root.children.values()):
            self._remove(child)

    def save(self) -> None:
        """Move everything to the folder, within its budget, for a later process."""
        if self._path is None:
            raise ValueError("save needs a folder: pass folder and disk_bytes to PrefixStates")
        self._levels.save()

    def close(self) -> None:
        """Let another process use the folder; use these states no more."""
        if self._folder is not None:
            self._folder.close()

    def check_memory(self) -> None:
        """Raise a ValueError if the device has less free memory than the budget allows to use."""
        self._levels.check_memory()

    def stats(self) -> PrefixStats:
        """Totals so far, and current sizes."""
        device, host, disk = self._levels.table
        return PrefixStats(
            hits=self._hits,
            misses=self._misses,
            tokens_asked=self._asked,
            tokens_reused=self._reused,
            refused=self._refused,
            moved_to_host=host.arrived,
            moved_to_disk=disk.arrived,
            dropped=self._levels.dropped,
            damaged=self._levels.damaged,
            snapshots=sum(len(level.held) for level in self._levels.table),
            device_bytes=device.nbytes,
            host_bytes=host.nbytes,
            disk_bytes=disk.nbytes,
        )

    def _tokens(self, ids: Sequence[int] | Tokens | Tensor) -> Tokens:
        if self._fingerprint is None:
            raise ValueError("prefix states need their model first: call bind(model)")
        return as_tokens(ids)

    def _fits(self, tokens: Tokens, path: list[Node], parts: Sequence[Part]) -> bool:
        """Whether a state fits in the levels with the keys and values of all its tokens."""
        segments = [node.segment.nbytes for node in path if node.segment is not None]
        new = self._shapes.segment(len(tokens) - (path[-1].num_tokens if path else 0))
        sizes = [sum(part.nbytes for part in x) for x in (parts, new)] + segments
        return max(sizes) <= self._levels.largest and sum(sizes) <= self._levels.budget

    def _copy(
        self, tensors: Mapping[str, Tensor], parts: Sequence[Part]
    ) -> tuple[Sent, Tensor] | None:
        """Whether tensors are finite, and their copy on the device; None without memory for it."""

        def make() -> tuple[Sent, Tensor]:
            return Sent(all_finite(tensors.values())), packed(tensors, parts, self._levels.device)

        return self._levels.attempt(DEVICE, sum(part.nbytes for part in parts), make)

    def _node_at(self, tokens: Tokens, path: list[Node], matched: int) -> Node | None:
        """The node after all tokens, added if missing; None if a file was damaged."""
        node = path[-1] if path else self._root
        if matched > node.num_tokens:
            child = node.children[int(tokens[node.num_tokens])]
            node = self._split(child, matched - node.num_tokens)
            if node is None:
                return None
        if node.num_tokens < len(tokens):
            node = node.add(tokens[node.num_tokens :])
        return node

    def _split(self, lower: Node, num: int) -> Node | None:
        """Cut an edge after some of its tokens; the new node, or None if a file was damaged."""
        old = lower.segment
        if old is None:
            return lower.cut(num)
        memory = self._levels.load(old)
        if memory is None:
            return None
        upper = lower.cut(num)
        upper.segment = Snapshot(upper, self._shapes.segment(len(upper.tokens)))
        lower.segment = Snapshot(lower, self._shapes.segment(len(lower.tokens)))
        self._levels.split(old, memory, upper.segment, lower.segment)
        return None if upper.gone else upper

    def _keep(self, node: Node, state: Tensor, cache: SlotCache, row: int) -> None:
        """Store the state of a node, and the keys and values of its edge if it is new."""
        assert node.state is not None
        new = bool(self._shapes.growing) and node.segment is None
        # Keys and values of earlier tokens must not be evicted to make room for it.
        self._levels.touch(node.needed())
        if new:
            keys_values = row_columns(cache, row, node.begin, node.num_tokens)
            parts = self._shapes.segment(len(node.tokens))
            copy = self._copy(keys_values, parts)
            if copy is None:
                self._refused += 1
                # What made room may have removed the node already.
                if not node.gone:
                    self._remove(node)
                return
            node.segment = Snapshot(node, parts, finite=copy[0])
            self._levels.keep(node.segment, copy[1])
        if not node.gone:
            self._levels.demote(node.passed())
            self._levels.keep(node.state, state)
            self._levels.touch(node.needed())

    def _load(self, node: Node) -> Found | None:
        """A state with the keys and values of all its tokens; None if a file was damaged."""
        held, memories = node.needed(), []
        for snapshot in held:
            memory = self._levels.load(snapshot)
            if memory is None:
                return None
            memories.append(memory)
        self._levels.touch(held)
        self._levels.raise_up(held, memories)
        self._levels.touch(held)
        # A snapshot that was not moved to the device is copied there.
        state, *segments = (
            views(self._levels.on_device(x, memory), x.parts)
            for x, memory in zip(held, memories, strict=True)
        )
        logits = state.pop("logits", None)
        logits = None if logits is None else logits.clone()
        return Found(node.num_tokens, logits, self._shapes, state, segments[::-1])

    def _adopt(self, folder: PrefixFolder) -> None:
        """Add the files of an earlier process to the tree; delete useless ones."""
        entries, nodes = folder.entries(), {}
        for entry in sorted(entries, key=lambda entry: (len(entry.ids), entry.is_state)):
            nodes[entry.path] = self._place_for(entry)
        for entry in entries:
            node = nodes[entry.path]
            if node is None:
                folder.delete(entry.path)
            elif entry.is_state:
                node.state = Snapshot(node, self._shapes.state(entry.num_logits))
                self._levels.adopt(node.state, entry.path)
            else:
                node.segment = Snapshot(node, self._shapes.segment(len(node.tokens)))
                self._levels.adopt(node.segment, entry.path)
        for node in list(self._root.below()):
            self._prune(node)
        self._levels.make_room(DISK)

    def _place_for(self, entry: Entry) -> Node | None:
        """The node of a file; None if keys and values of earlier tokens are missing."""
        path, matched = self._root.walk(entry.ids)
        node = path[-1] if path else self._root
        if entry.is_state and not self._shapes.growing:
            return self._node_at(entry.ids, path, matched) if len(entry.ids) else None
        if entry.is_state:
            return node if 0 < node.num_tokens == len(entry.ids) else None
        if not matched == node.num_tokens == entry.begin < len(entry.ids):
            return None
        return node.add(entry.ids[entry.begin :])

    def _forget(self, snapshot: Snapshot) -> None:
        """Remove a dropped snapshot from the tree, with everything that needs it."""
        node: Node = snapshot.owner
        if node.gone:
            return
        if snapshot is node.segment:
            self._remove(node)
        elif snapshot is node.state:
            node.state = None
            self._prune(node)

    def _remove(self, node: Node) -> None:
        """Remove a node and everything below it from the tree."""
        assert node.parent is not None
        for lower in node.below():
            lower.gone = True
            for snapshot in (lower.state, lower.segment):
                if snapshot is not None:
                    self._levels.discard(snapshot)
        del node.parent.children[int(node.tokens[0])]
        self._prune(node.parent)

    def _prune(self, node: Node) -> None:
        """Remove a node from the tree if no state needs it."""
        if node.parent is not None and not node.gone and not node.children and node.state is None:
            self._remove(node)
