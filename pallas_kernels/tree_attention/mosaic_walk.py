"""The steps of a program of wide attention: which blocks of keys its rows meet, and in which order.

First come blocks that every row sees whole, of the prefix and then of the new tokens, then those that are masked
somewhere: at the window's edge, the prefix's last, and the new tokens from the diagonal on or under a tree's bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp

from pallas_kernels.tree_attention.mosaic_rows import ROWS, div


class Rows(Protocol):
    """What a walk depends on; see mosaic_wide.Kernel."""

    @property
    def keys(self) -> int: ...
    @property
    def teams(self) -> int: ...
    @property
    def members(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def splits(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Walk:
    """The steps of a cluster's programs, each a block of keys: [begin, end) of those of its rows, of which the first
    `whole` are seen whole by all its rows.

    Attributes:
      length: of the prefix. lowest: its first token that some row sees.
      first, inner, outer, blocks: of the prefix, the first block that is read, [inner, outer) those seen whole, and
        the end; others are masked. new: blocks of new tokens seen whole.
    """

    kernel: Rows
    length: Any
    lowest: Any
    first: Any
    inner: Any
    outer: Any
    blocks: Any
    new: Any
    begin: Any
    end: Any

    @classmethod
    def of(cls, kernel: Rows, length: Any, lowest: Any, highest: Any, block: Any, split: Any) -> Walk:
        """Of a block of query rows, of whose windows the first begins at `lowest` and the last at `highest`, and a
        stretch; both are 0 without a window."""
        keys, height = kernel.keys, ROWS * kernel.teams * kernel.members
        first_node = div(block * height, kernel.group)
        last_node = jnp.minimum(div(block * height + height - 1, kernel.group), kernel.nodes - 1)
        zero, blocks = jnp.int32(0), div(length + keys - 1, keys)
        first = jnp.minimum(div(lowest, keys), blocks)
        inner = jnp.clip(div(highest + keys - 1, keys), first, blocks)
        outer = jnp.maximum(inner, div(length, keys))
        if kernel.causal:
            new = div(first_node + 1, keys)
            masked = div(last_node, keys) + 1 - new
        else:
            new, masked = zero, -(-kernel.entries // keys)
        total = (blocks - first) + new + masked
        per = div(total + kernel.splits - 1, kernel.splits)
        begin = jnp.minimum(split * per, total)
        return cls(kernel, length, lowest, first, inner, outer, blocks, new, begin, jnp.minimum(begin + per, total))

    @property
    def whole(self) -> Any:
        """The steps before the first that is masked."""
        return self.outer - self.inner + self.new

    def place(self, step: Any) -> tuple[Any, Any]:
        """Whether a step's keys are the prefix's, and which block of it or of the new tokens."""
        inside, i, before = self.outer - self.inner, step - self.whole, self.inner - self.first
        edges = before + self.blocks - self.outer
        edge = jnp.where(i < before, self.first + i, self.outer + i - before)
        masked = jnp.where(i < edges, edge, self.new + i - edges)
        block = jnp.where(i >= 0, masked, jnp.where(step < inside, self.inner + step, step - inside))
        return (step < inside) | ((i >= 0) & (i < edges)), block
