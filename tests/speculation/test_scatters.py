"""What XLA is told of scatters is true: no two numbers go to the same place, so that GPUs need no atomic operations.

Of 8 and 16 bits, that is, as pools in bfloat16 and flags are. A CPU would write the same numbers in any case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

from jaxspec.cache import commit, distinct
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation import round as rounds
from jaxspec.speculation.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.speculation.drafters.cores import HeadCore
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from jaxspec.speculation.drafters.medusa import MedusaDrafter
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.speculation.layouts import Admission, Batch, Chunks
from jaxspec.speculation.mixed import mixed_fn
from jaxspec.speculation.state import DecodeState, Geometry
from jaxspec.tier import PLAIN, Tier

BF16 = jnp.dtype(jnp.bfloat16)


def scatters(fn: Callable[..., Any], *args: Any) -> Iterator[tuple[jnp.dtype, bool, np.ndarray]]:
    """Each scatter's dtype, whether it is told to have places of its own, and its places."""
    closed, told = jax.make_jaxpr(fn)(*args), []

    def places(*leaves: jax.Array) -> list[jax.Array]:
        _, found = _within(closed.jaxpr, closed.consts, leaves)
        told[:] = [(dtype, apart) for dtype, apart, _ in found]
        return [at for *_, at in found]

    found = jax.jit(places)(*jax.tree.leaves(args))
    yield from ((*about, np.asarray(at)) for about, at in zip(told, found, strict=True))


def _within(jaxpr: Any, consts: Any, args: Any) -> tuple[list[Any], list[tuple[jnp.dtype, bool, jax.Array]]]:
    held = dict(zip(map(id, (*jaxpr.constvars, *jaxpr.invars)), (*consts, *args), strict=True))
    of = lambda x: x.val if hasattr(x, "val") else held[id(x)]
    found = []
    for eqn in jaxpr.eqns:
        given, name = [of(x) for x in eqn.invars], eqn.primitive.name
        if name in ("pjit", "jit", "closed_call"):
            inner = eqn.params["jaxpr"]
            out, more = _within(inner.jaxpr, inner.consts, given)
            found += more
        else:
            if name.startswith("scatter"):
                found.append((eqn.invars[0].aval.dtype, eqn.params["unique_indices"], given[1]))
            named = list({id(x): x for x in eqn.invars if not hasattr(x, "val")}.values())
            names = dict(arg_names=("x",) * len(named), result_paths=("",) * len(eqn.outvars))
            alone = jaxpr.replace(
                constvars=[], invars=named, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects,
                debug_info=jaxpr.debug_info._replace(**names),
            )  # fmt: skip
            out = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*map(of, named))
        held |= dict(zip(map(id, eqn.outvars), out, strict=True))
    return [of(x) for x in jaxpr.outvars], found


def check(fn: Callable[..., Any], *args: Any) -> set[jnp.dtype]:
    """Checks every scatter; the dtypes of those that are told so."""
    seen = set()
    for dtype, told, places in scatters(fn, *args):
        assert told or dtype.itemsize > 2, f"{dtype} is written by atomic operations"
        if told:
            seen.add(dtype)
            rows = places.reshape(-1, places.shape[-1])
            assert len(np.unique(rows, axis=0)) == len(rows), f"{dtype}: {rows.tolist()}"
    return seen


def test_slots_of_padding_are_all_different():
    assert distinct(jnp.asarray([4, 1, 4, 5, 0, 4]), 4).tolist() == [4, 1, 6, 7, 0, 9]


def test_tokens_that_are_not_written_have_places_of_their_own():
    rng = np.random.default_rng(0)
    kv = jnp.asarray(rng.normal(size=(3, 2, 4, 2, 6)), BF16)
    pages, table = jnp.zeros((3 * 6, 2, 4, 6), BF16), jnp.asarray([[4], [6]])
    position = jnp.asarray([[0, 1, 2, 3], [-1, 3, 4, 9]])
    write = jnp.asarray([[True, False, True, False], [True, True, True, False]])
    for each in (None, 1, 2):
        fn = lambda *given, each=each: commit(*given, 6, ready_B=jnp.asarray([True, False]), each=each)
        assert check(fn, pages, kv, table, position, write) == {BF16}


def eagle3(geo: Geometry) -> Any:
    config = Eagle3Config(
        hidden_size=16, target_hidden_size=32, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8,
        vocab_size=13, draft_vocab_size=9, aux_layer_ids=(0, 1, 1),
    )  # fmt: skip
    core = HeadCore(Eagle3Head(config, dtype=BF16, rngs=nnx.Rngs(0)))
    return AutoregressiveDrafter(core, geo), core.params


def medusa(geo: Geometry) -> Any:
    drafter = MedusaDrafter(MedusaHeads(MedusaConfig(2, 32, 13, 2), dtype=BF16, rngs=nnx.Rngs(0)), geo)
    return drafter, drafter.params


@pytest.mark.parametrize("bind", [eagle3, medusa])
def test_rounds_prompts_and_slots(bind: Callable[[Geometry], Any]):
    """Two rows and two of padding; chunks of which one is longer than a head's ring, and two of padding."""
    geo = Geometry(slots=4, num_pages=64, page_size=8, pages_per_seq=16, max_depth=2)
    target = tiny_target(0, num_layers=2, dtype=BF16)
    drafter, draft_params = bind(geo)
    graph, params = nnx.split(target)
    spec = rounds.RoundSpec(graph, target.config, geo, drafter, rejection=False)
    state = DecodeState.empty(target.config, geo, BF16, drafter.init_state(geo))
    table = jnp.arange(4 * 16, dtype=jnp.int32).reshape(4, 16)
    state = dataclasses.replace(state, table_SM=table, length_S=jnp.asarray([5, 0, 0, 9]))
    batch = Batch.of(geo, 4, [0, 3], 2).array
    chunks = Chunks.of(geo, 4, [(1, 90, True), (2, 6, False)]).array
    nobody, flag = Admission.packed(geo, 4), jnp.dtype(bool)
    assert check(rounds.round_fn(spec, Tier(2), True), params, draft_params, state, batch) >= {BF16, flag}
    if bind is eagle3:
        mixed = mixed_fn(spec, PLAIN, True, size=128, width=96)
        assert check(mixed, params, draft_params, state, batch, chunks, nobody) >= {BF16, flag}
