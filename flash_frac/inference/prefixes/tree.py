"""A radix tree over tokens: an edge is a run of consecutive tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from flash_frac.inference.prefixes.snapshots import Snapshot

Tokens = np.ndarray


def as_tokens(ids: Sequence[int] | Tokens | Tensor) -> Tokens:
    """A copy of the token ids of one sequence; a ValueError for anything else."""
    found = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"ids must be the token ids of one sequence, got {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64)


@dataclass(eq=False)
class Node:
    """An edge of the tree and its lower end.

    Attributes:
        tokens: tokens of the edge; the root has none.
        num_tokens: number of tokens from the root to the end of the edge.
        segment: keys and values of the edge; None for a model without full-attention layers.
        state: state after all tokens; None if it is not cached.
        gone: whether the node was removed from the tree.
    """

    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    parent: Node | None = None
    num_tokens: int = 0
    segment: Snapshot | None = None
    state: Snapshot | None = None
    children: dict[int, Node] = field(default_factory=dict)
    gone: bool = False

    @property
    def begin(self) -> int:
        """Number of tokens before the edge."""
        return self.num_tokens - len(self.tokens)

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def ids(self) -> Tokens:
        """The tokens from the root to the end of the edge."""
        return np.concatenate([node.tokens for node in self.path()])

    def below(self) -> Iterator[Node]:
        """This node and all nodes below it."""
        nodes: list[Node] = [self]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            yield node

    def needed(self) -> list[Snapshot]:
        """The state, then the keys and values from this edge up to the root."""
        segments = [node.segment for node in reversed(self.path())]
        return [x for x in (self.state, *segments) if x is not None]

    def passed(self) -> list[Snapshot]:
        """States above this node from which no other prompt has branched, the nearest first."""
        found: list[Snapshot] = []
        node = self.parent
        while node is not None and len(node.children) == 1:
            found += [] if node.state is None else [node.state]
            node = node.parent
        return found

    def walk(self, tokens: Tokens) -> tuple[list[Node], int]:
        """From the root: nodes that a prompt passes fully, and how many of its tokens match."""
        path, node, matched = [], self, 0
        while matched < len(tokens):
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            num = _num_common(child.tokens, tokens[matched:])
            matched += num
            if num < len(child.tokens):
                break
            path.append(child)
            node = child
        return path, matched

    def add(self, tokens: Tokens) -> Node:
        """Add a child."""
        child = Node(tokens.copy(), self, self.num_tokens + len(tokens))
        self.children[int(tokens[0])] = child
        return child

    def cut(self, num: int) -> Node:
        """Cut the edge after `num` tokens; return the new upper node, still without a segment."""
        assert self.parent is not None
        first, last = self.tokens[:num].copy(), self.tokens[num:].copy()
        upper = self.parent.add(first)
        upper.children[int(last[0])] = self
        self.parent, self.tokens = upper, last
        return upper


def _num_common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix."""
    num = min(len(a), len(b))
    differ = np.flatnonzero(a[:num] != b[:num])
    return int(differ[0]) if len(differ) else num
