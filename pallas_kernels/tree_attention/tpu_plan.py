"""The sizes of tree attention's kernel for TPUs: what a grid step takes, so that it fits VMEM, and a call, SMEM."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

LANES = 128
_BLOCK_BYTES = 1 << 20  # of all heads' part of a prefix block, within these tokens:
_BLOCK_TOKENS = (128, 512)
_MAX_TILE = 512
_MAX_ROWS = 1024  # of a KV head in a grid step
_UNIT_ROWS = 256
_UNROLLED_ROWS = 256
_MAX_HEADS = 8
SCALARS = 224 * 1024  # int32 of the 1 MiB of SMEM
VMEM_BYTES = 14 << 20  # of the 16 MiB that v4, v5e and v5p grant a kernel by default


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static numbers of one call.

    Attributes:
      channels, width: C and W.
      page, per_block: tokens a page, pages a block of the prefix.
      columns: page table entries a request.
      groups, heads: head groups (the outermost grid axis) and KV heads of each.
      parts: units of rows a KV head.
      repeats: how often the facts' rows repeat in a unit.
      queries: rows of the facts in a grid step.
      joint: the rows of all R heads are padded together and the facts hold every one of them.
      blocks: query blocks a request.
      tile: tree entries of a grid step.
      steps: requests times query blocks: how many walks over a prefix follow each other.
      windowed: whether rows see the prefix from a position of their own on.
      sinks: whether heads have them.
    """

    channels: int
    width: int
    page: int
    per_block: int
    columns: int
    groups: int
    heads: int
    parts: int
    repeats: int
    queries: int
    joint: bool
    blocks: int
    tile: int
    itemsize: int
    windowed: bool
    sinks: bool = False
    steps: int = 0

    @property
    def span(self) -> int:
        """Tokens of a prefix block."""
        return self.page * self.per_block

    @property
    def rows(self) -> int:
        """Rows of a unit."""
        return self.queries * self.repeats

    @property
    def units(self) -> int:
        """Units of a grid step."""
        return self.heads * self.parts

    @property
    def query_lanes(self) -> int:
        """Lanes of a query: 2C where K and V share one tile of lanes (zeros meet V), so that no lane needs a mask."""
        c = self.channels
        return 2 * c if c % LANES and 2 * c % LANES == 0 else c

    @property
    def value_lanes(self) -> int:
        """Lanes of a weighted sum: where V does not start at a tile of lanes, all are summed, and V's are cut out."""
        return self.width if self.channels % LANES else self.channels

    @property
    def scalars(self) -> int:
        """int32 in SMEM for each request: its page table, its length, the facts of its steps."""
        return self.columns + 1 + self.blocks * (3 if self.windowed else 1)

    @property
    def unrolled(self) -> int:
        """Units that one iteration works on side by side: small ones hide each other's latency."""
        return max(
            i for i in range(1, self.units + 1) if self.units % i == 0 and (i * self.rows <= _UNROLLED_ROWS or i == 1)
        )

    @property
    def vmem(self) -> int:
        """Bytes of a grid step: windows and the page buffer twice, scratch, and the scores in flight."""
        lanes = lambda x: round_up(x, LANES)
        rows, values = self.units * self.rows, lanes(self.value_lanes)
        windows = rows * (lanes(self.query_lanes) + values) + self.heads * self.tile * lanes(self.width)
        windows = windows * self.itemsize + 4 * self.queries * LANES * (2 if self.windowed else 1)
        windows += 4 * rows * LANES if self.sinks else 0
        scratch = 4 * rows * (values + 2 * LANES) + 2 * self.heads * self.span * lanes(self.width) * self.itemsize
        tokens = max(self.span, self.tile)
        scores = 16 * self.rows * tokens + 4 * self.rows * values
        split = 8 * tokens * lanes(self.width) if self.itemsize == 4 else 0  # exact products are sums of bfloat16 ones
        return 2 * windows + scratch + scores * self.unrolled + split


def plan_for(args: TreeAttentionArgs, cores: int) -> Plan:
    """The largest steps that VMEM holds, or the smallest steps if it holds none.

    A tree's rows stay in one block wherever they fit: every block of rows reads the prefix again.
    """
    _, n, h, c = args.q_BNHC.shape
    _, g, page, width = args.pages.shape
    r, tree, itemsize = h // g, args.tree_k_BTGC.shape[1], jnp.dtype(args.pages.dtype).itemsize
    least, most = _BLOCK_TOKENS
    tokens = max(least, min(most, _BLOCK_BYTES // (min(g, _MAX_HEADS) * 2 * c * itemsize)))
    tiles = -(-tree // _MAX_TILE)
    common = Plan(
        channels=c, width=width, page=page, per_block=max(1, tokens // page), columns=args.table_BM.shape[1],
        groups=g, heads=1, parts=1, repeats=1, queries=round_up(n * r, 8), joint=True, blocks=1,
        tile=round_up(-(-tree // tiles), 16 if tiles == 1 else LANES), itemsize=itemsize,
        windowed=args.window is not None, sinks=args.sinks_H is not None,
    )  # fmt: skip

    def by_head(queries: int) -> Plan:
        repeats = max(i for i in range(1, r + 1) if r % i == 0 and (i * queries <= _UNIT_ROWS or i == 1))
        return dataclasses.replace(
            common, joint=False, queries=queries, repeats=repeats, parts=r // repeats, blocks=-(-n // queries)
        )

    queries = round_up(n, 8)
    choices = [common] if n % 8 and n * r <= _UNIT_ROWS else []
    choices += [by_head(queries)] if queries <= 64 or queries * r <= _MAX_ROWS else []
    choices += [by_head(x) for x in (512, 256, 128, 64, 32, 16, 8) if x < queries and (x == 8 or x * r <= _MAX_ROWS)]
    heads = [x for x in range(min(_MAX_HEADS, g // cores), 0, -1) if g % x == 0]
    plans = [dataclasses.replace(choice, heads=x, groups=g // x) for choice in choices for x in heads]
    return next((plan for plan in plans if plan.vmem <= VMEM_BYTES), plans[-1])
