"""Heads whose channels fill no whole tiles of 64, as heads that do: what wgmma and the copy engine take.

A page's row holds a head's keys and its values side by side. Keys are multiplied with the first values behind them,
which queries of zeros leave out of the scores, and values with the last keys before them, whose sums are dropped. The
kernel for few rows brings a row once and leaves out what is not a head's; that for many brings both by themselves, and
queries, new tokens and results are padded and cut around it (`widened`, `narrowed`). A value that is not finite in a
token's first channels reaches all channels of those who see it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.sizes import round_up
from pallas_kernels.tree_attention.reference import TreeAttentionArgs

_TILE = 64


def whole(channels: int) -> int:
    """Channels that are computed: whole tiles."""
    return round_up(channels, _TILE)


def refusal(channels: int, *served: int) -> str | None:
    """Why heads of so many channels cannot be computed as one of those that a kernel serves, or None.

    The copy engine begins at whole tiles only, so that values must end at one.
    """
    if channels % (_TILE // 2) == 0 and whole(channels) in served:
        return None
    fit = sorted({*served, *(w - _TILE // 2 for w in served)})
    return f"head dimension must be {', '.join(map(str, fit[:-1]))} or {fit[-1]}, got {channels}"


def fills(channels: int) -> bool:
    """Whether heads of so many channels are whole tiles."""
    return channels == whole(channels)


def widened(args: TreeAttentionArgs) -> TreeAttentionArgs:
    """The same call in whole tiles, pages as they are: zeros behind queries and new keys, and before new values."""
    channels = args.q_BNHC.shape[3]
    more = whole(channels) - channels
    if not more:
        return args
    behind = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more)))
    before = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (more, 0)))
    return dataclasses.replace(
        args, q_BNHC=behind(args.q_BNHC), tree_k_BTGC=behind(args.tree_k_BTGC), tree_v_BTGC=before(args.tree_v_BTGC),
        scale=args.factor,
    )  # fmt: skip


def narrowed(out_BNHC: jax.Array, channels: int) -> jax.Array:
    """A result of the channels that were asked for."""
    return out_BNHC[..., out_BNHC.shape[3] - channels :]
