"""Which rows a round ends: by a token that ends their text, by its length, or by logits that are not finite.

The host says why, and cuts what lies behind; the device only has to know that a row goes no further, so that rounds
which were dispatched before the host had seen it neither write for the row nor say anything. Must not know text: what a
stop string or a grammar ends, the host alone does.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.speculation.layouts import End
from jaxspec.speculation.sampling import SamplingState


def ends(
    sampling: SamplingState, slot_B: jax.Array, tokens_BD: jax.Array, position_BD: jax.Array, said_BD: jax.Array,
    finite_B: jax.Array, eos: Sequence[int],
) -> jax.Array:  # fmt: skip
    """What became of rows that have said tokens, `End` by row, int32 [B].

    Args:
      sampling: of all slots. slot_B: the rows', S for padding, of which anything is said.
      position_BD: absolute ones of the tokens. said_BD: which of them are theirs.
      finite_B: whether their logits were.
      eos: token ids that end a text, unless the row ignores them.
    """
    of = lambda x_S: jnp.take(x_S, slot_B, axis=0, mode="clip")
    stop_BK, count_B1 = of(sampling.stop_ids_SK), of(sampling.num_stops_S)[:, None]
    own_BK = jnp.arange(stop_BK.shape[1])[None, :] < count_B1
    stop_BD = ((tokens_BD[:, :, None] == stop_BK[:, None, :]) & own_BK[:, None, :]).any(axis=2)
    if eos:
        end_BD = (tokens_BD[:, :, None] == jnp.asarray(eos, jnp.int32)[None, None, :]).any(axis=2)
        stop_BD |= end_BD & (of(sampling.eos_ends_S) > 0)[:, None]
    stop_BD &= position_BD >= of(sampling.ban_until_S)[:, None]
    over_B = ((stop_BD | (position_BD + 1 >= of(sampling.ends_at_S)[:, None])) & said_BD).any(axis=1)
    return jnp.where(finite_B, jnp.where(over_B, End.OVER, End.NOT_YET), End.NOT_FINITE)
