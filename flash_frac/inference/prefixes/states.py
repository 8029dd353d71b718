"""Prefix states: what the model has read before, it need not read again, from any token on.

A tree over tokens: an edge is some tokens that follow each other, and a node is a place where
prompts branch or a state was kept. A state of fixed size belongs to its node. Keys and values of
layers that see all tokens belong to the edges, so that prompts share those of their common tokens.
Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flash_frac.files import check_folder
from flash_frac.inference.prefixes.files import Entry, PrefixFolder
from flash_frac.inference.prefixes.levels import DISK, Levels
from flash_frac.inference.prefixes.snapshots import (
    Found,
    Part,
    Shapes,
    Snapshot,
    packed,
    row_columns,
    row_states,
    views,
)
from flash_frac.inference.prefixes.tree import Node, Tokens, as_tokens
from flash_frac.inference.state import check_model, empty_cache
from flash_frac.inference.storage import difference_of, fingerprint
from flash_frac.models import FracForCausalLM
from flash_frac.models.slot_cache import SlotCache


@dataclass(frozen=True)
class PrefixStats:
    """Counts since the beginning, and what is held now.

    Attributes:
        hits, misses: prompts for which a state was found, or none.
        tokens_asked, tokens_reused: tokens of all prompts, and of those in states that were found.
        refused: states that were larger than the budgets, and so not kept.
        moved_to_host, moved_to_disk: snapshots (of states, of keys and values) that came there.
        dropped: snapshots that have left the last level to make room.
        damaged: snapshots whose file was damaged or gone when it was needed.
        snapshots: how many are held.
        device_bytes, host_bytes, disk_bytes: held at each level.
    """

    hits: int
    misses: int
    tokens_asked: int
    tokens_reused: int
    refused: int
    moved_to_host: int
    moved_to_disk: int
    dropped: int
    damaged: int
    snapshots: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


class PrefixStates:
    """States of prompts that were read, to begin other prompts with.

    One thread may use it, on one CUDA stream: the one in which the model runs. Budgets are for
    tensors. What `longest` has found stays in memory, beyond them, for as long as it is held.

    Args:
        device_bytes: budget on the device of the model.
        host_bytes: budget in host memory, pinned if the device is a GPU. PyTorch rounds each
            pinned allocation up to a power of two, which is not counted.
        disk_bytes: budget of the files in `folder`.
        folder: for what leaves the memory; None for none. It belongs to one model and one process
            at a time. What is in it when `bind` is called is used again.
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
        self,
        *,
        device_bytes: int,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        folder: str | Path | None = None,
        spacing: int | None = 512,
    ) -> None:
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        for name, size in sizes.items():
            if size < 0:
                raise ValueError(f"{name} must be 0 or more, got {size}")
        if (folder is None) != (disk_bytes == 0):
            raise ValueError(
                f"disk_bytes and folder belong together, got {disk_bytes} and {folder}; give both "
                "or none"
            )
        if spacing is not None and spacing < 1:
            raise ValueError(f"spacing must be None or at least 1, got {spacing}")
        self.spacing, self._budgets = spacing, tuple(sizes.values())
        self._path = None if folder is None else check_folder(Path(folder), "folder")
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
        cache = SlotCache(empty_cache(model, 1), 1, 0)
        self._shapes = Shapes.of(cache)
        device = next(x.device for x in (*cache.stacks, *cache.column_stacks))
        folder = None if self._path is None else PrefixFolder(self._path, here)
        self._levels = Levels(self._budgets, device, folder, self._forget)
        if folder is not None:
            self._adopt(folder)
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
            if node.gone or node.state is None or (whole and not node.state.has_logits):
                continue
            found = self._load(node)
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
        if known is not None and (logits is None or known.has_logits):
            self._levels.touch(path[-1].needed())
            return True
        tensors = row_states(cache, row)
        parts = self._shapes.state(0 if logits is None else len(logits))
        if logits is not None:
            tensors["logits"] = logits
        if not self._fits(tokens, path, parts):
            self._refused += 1
            return False
        node = self._node_at(tokens, path, matched)
        if node is None:
            # A damaged file is no longer part of the tree.
            return self.put(tokens, cache, row, logits=logits)
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

    def save(self) -> None:
        """Move all to the folder, as far as its budget allows, for a later process."""
        if self._path is None:
            raise ValueError("save needs a folder: give folder and disk_bytes to PrefixStates")
        self._levels.save()

    def stats(self) -> PrefixStats:
        """What has happened so far, and what is held."""
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
        """Whether the levels can hold a state with the keys and values of all its tokens."""
        segments = [node.segment.nbytes for node in path if node.segment is not None]
        new = self._shapes.segment(len(tokens) - (path[-1].num_tokens if path else 0))
        sizes = [sum(part.nbytes for part in x) for x in (parts, new)] + segments
        return max(sizes) <= self._levels.largest and sum(sizes) <= self._levels.budget

    def _node_at(self, tokens: Tokens, path: list[Node], matched: int) -> Node | None:
        """The node after all tokens, which is made if need be; None if that failed on a file."""
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
        """Hold the state of a node, and the keys and values of its edge if it is new."""
        assert node.state is not None
        new = bool(self._shapes.growing) and node.segment is None
        # Those of the tokens before must not make room for it.
        self._levels.touch(node.needed())
        if new:
            keys_values = row_columns(cache, row, node.begin, node.num_tokens)
            node.segment = Snapshot(node, self._shapes.segment(len(node.tokens)))
            memory = packed(keys_values, node.segment.parts, self._levels.device)
            self._levels.keep(node.segment, memory)
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
        # Where it was not moved to the device, a copy is made there.
        state, *segments = (
            views(self._levels.on_device(x, memory), x.parts)
            for x, memory in zip(held, memories, strict=True)
        )
        logits = state.pop("logits", None)
        logits = None if logits is None else logits.clone()
        return Found(node.num_tokens, logits, self._shapes, state, segments[::-1])

    def _adopt(self, folder: PrefixFolder) -> None:
        """Take the files of an earlier process into the tree; those of no use are deleted."""
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
        """The node of a file; None if keys and values of tokens before are not there."""
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
        """Take a snapshot that is gone out of the tree, with all that is of no use without it."""
        node: Node = snapshot.owner
        if node.gone:
            return
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
