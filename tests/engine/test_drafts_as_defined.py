"""Every kind of draft, token for token, against its definition computed over the whole text without any cache.

The engine's own state is read while it serves, so that prefill chunks, tier changes, plain rounds, catching up and
reused prefixes all lie between the text and its draft. A head that is off by one still gives exact outputs; not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.layers import causal_attention
from jaxspec.request import SamplingParams
from jaxspec.speculation.state import Rows
from jaxspec.tier import PLAIN, Tier
from jaxspec.train.data.dataset import Example
from jaxspec.train.run import evaluate, simulation

WIDTH, DEPTH = 96, 3
#: draft(text) -> the greedy chain of DEPTH tokens after it.
Definition = Callable[[list[int]], list[int]]


def padded(tokens: list[int], fill: int = 0) -> np.ndarray:
    return np.asarray([[*tokens, *[fill] * (WIDTH - len(tokens))]], np.int32)


def jitted(module: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn(module, *arrays), compiled once."""
    graph, params = nnx.split(module)
    call = jax.jit(lambda params, *args: fn(nnx.merge(graph, params), *args))
    return lambda *args: jax.tree.map(np.asarray, call(params, *args))


def positions() -> jax.Array:
    return jnp.arange(WIDTH)[None]


def streams(target: Any, layers: tuple[int, ...]) -> Callable[[list[int]], np.ndarray]:
    """The target's streams [1, WIDTH, A] at every position of a text."""
    run = jitted(target, lambda net, tokens: net(tokens, positions(), causal_attention, layers)[1])
    return lambda text: run(padded(text))


def draft_model(target: Any, model: Any) -> Definition:
    """Reads the text and its own drafts."""
    run = jitted(model, lambda net, tokens: net.logits(net(tokens, positions(), causal_attention)[0]))

    def draft(text: list[int]) -> list[int]:
        drafted: list[int] = []
        for _ in range(DEPTH):
            drafted.append(int(run(padded(text + drafted))[0, len(text) + len(drafted) - 1].argmax()))
        return drafted

    return draft


def head_step(head: Any) -> Callable[..., Any]:
    """(tokens, features) -> (logits, hidden) of the pairs at every position."""

    def step(net: Any, tokens: jax.Array, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = net(tokens, feature, positions(), causal_attention)
        return net.logits(hidden), hidden

    return jitted(head, step)


def target_id(head: Any, logits: np.ndarray) -> int:
    best = int(logits.argmax())
    return int(head.target_ids[...][best]) if hasattr(head, "target_ids") else best


def token_by_token(target: Any, head: Any) -> Definition:
    """Pair p joins the feature of p with the token at p + 1 and predicts p + 2; then hidden states are features."""
    read, step = streams(target, head.config.aux_layer_ids), head_step(head)
    fuse = jitted(head, lambda net, aux: net.fuse(aux))

    def draft(text: list[int]) -> list[int]:
        feature, drafted = fuse(read(text)).copy(), []
        for _ in range(DEPTH):
            pair = len(text) + len(drafted) - 2
            logits, hidden = step(padded((text + drafted)[1:]), feature)
            drafted.append(target_id(head, logits[0, pair]))
            feature[0, pair + 1] = hidden[0, pair]
        return drafted

    return draft


def one_pass(target: Any, head: Any) -> Definition:
    """P-EAGLE: after the last pair come pairs of the mask token and the mask's feature."""
    read, step, mask = streams(target, head.config.aux_layer_ids), head_step(head), head.config.mask_token_id
    fuse = jitted(head, lambda net, aux: net.fuse(aux))

    def draft(text: list[int]) -> list[int]:
        pairs, aux = len(text) - 1, read(text).copy()
        aux[0, pairs:] = np.asarray(head.mask_hidden[...])
        logits, _ = step(padded(text[1:], fill=mask), fuse(aux))
        return [target_id(head, logits[0, pairs - 1 + i]) for i in range(DEPTH)]

    return draft


def medusa(target: Any, heads: Any) -> Definition:
    """Head i reads the position before the last token, and predicts i + 1 tokens after that one."""
    read = streams(target, (target.config.num_layers + 1,))
    run = jitted(heads, lambda net, hidden: [net.logits(hidden, i) for i in range(DEPTH)])
    return lambda text: [int(logits[0, len(text) - 2].argmax()) for logits in run(read(text))]


def one_block(target: Any, head: Any) -> Definition:
    """DFlash: a block of the last token and placeholders, over the context of all positions before it."""
    read, cfg = streams(target, head.config.aux_layer_ids), head.config
    assert cfg.window_from_anchor and not cfg.sliding_non_causal and not cfg.sample_from_anchor

    def block(net: Any, aux: jax.Array, length: jax.Array, anchor: jax.Array) -> jax.Array:
        offset, column = jnp.arange(cfg.block_size), jnp.arange(WIDTH)
        context = net.entries(aux, positions())

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: Any) -> jax.Array:
            text = jnp.broadcast_to(column[None] < length, (cfg.block_size, WIDTH))
            own = jnp.ones((cfg.block_size, cfg.block_size), bool)
            if options.window is not None:
                text = text & (column[None] >= length - options.window)
                own = jnp.tril(own)
            keys, values = jnp.split(context[layer], 2, axis=-1)
            keys, values = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
            mask = jnp.concatenate([text, own], axis=1)
            return jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None])

        return net.logits(net(net.block(anchor[None]), (length + offset)[None], attend))

    run = jitted(head, block)

    def draft(text: list[int]) -> list[int]:
        logits = run(read(text), np.int32(len(text) - 1), np.int32(text[-1]))
        return [target_id(head, row) for row in logits[0, 1 : 1 + DEPTH]]

    return draft


def block_and_walk(target: Any, head: Any) -> Definition:
    """DSpark and DFlash 2: a block as DFlash's, which sees itself and all of the text, then token by token."""
    read, cfg = streams(target, head.config.aux_layer_ids), head.config
    assert not cfg.sliding_layers

    def block(net: Any, aux: jax.Array, length: jax.Array, anchor: jax.Array) -> jax.Array:
        context = net.entries(aux, positions())

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, options: Any) -> jax.Array:
            keys, values = jnp.split(context[layer], 2, axis=-1)
            keys, values = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
            seen = jnp.concatenate([jnp.arange(WIDTH) < length, jnp.ones((cfg.block_size,), bool)])
            return jax.nn.dot_product_attention(q, keys, values, mask=seen[None, None, None])

        return net.predicting(net(net.block(anchor[None]), (length + jnp.arange(cfg.block_size))[None], attend))

    run = jitted(head, block)
    said = jitted(head, lambda net, hidden, before: net.joined_logits(net.joined(hidden, before)))

    def draft(text: list[int]) -> list[int]:
        hidden, drafted = run(read(text), np.int32(len(text) - 1), np.int32(text[-1])), [text[-1]]
        for depth in range(DEPTH):
            before = np.asarray([drafted + [0] * (cfg.drafts - len(drafted))], np.int32)
            drafted.append(target_id(head, said(hidden, before)[0, depth]))
        return drafted[1:]

    return draft


DEFINITIONS = {
    "draft_model": draft_model, "eagle3": token_by_token, "eagle1": token_by_token, "mtp": token_by_token,
    "peagle": one_pass, "medusa": medusa, "dflash": one_block,
    "dspark": block_and_walk,
    "dflash2": block_and_walk,
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_drafts_are_their_definition(bench: Any, tools: Any, kind: str):
    engine = bench.engine(kind)
    geo, drafter, params = engine.runner.geo, engine.runner.drafter, engine.runner.draft_params
    definition = DEFINITIONS[kind](bench.target, bench.modules[kind])

    @jax.jit
    def peek(state: Any, slot_B: jax.Array) -> Any:
        rows = Rows.gather(state, slot_B, geo)
        draft = drafter.catch_up(params, state.draft, rows, state.tokens_SL) if drafter.lags else state.draft
        tree, _ = drafter.draft(params, draft, rows, state.tokens_SL, Tier(DEPTH), None, None, False)
        return tree.tokens_BN, rows.length_B

    checked: dict[int, set[int]] = {}

    def check(step: int, ids: list[str]) -> None:
        live = [s.request for i in ids if (s := engine._live.get(i)) and s.request.slot is not None]
        # Rows of finished requests are padding: their pages may be others' by now.
        slots = [request.slot for request in live]
        state = engine.runner.state
        drafts, lengths = map(np.asarray, peek(state, np.asarray(slots + [geo.slots] * (geo.slots - len(slots)))))
        texts = np.array(state.tokens_SL)
        for request, draft, length in zip(live, drafts, lengths, strict=False):
            prompt = request.prompt_token_ids
            # Every third text: the definition is dear. Nothing is drafted before the prompt's end.
            if length < len(prompt) or (length + step) % 3:
                continue
            text = texts[request.slot, : length + 1].tolist()
            assert text[: len(prompt)] == prompt
            assert draft.tolist() == [text[-1], *definition(text)], f"after {length} tokens"
            checked.setdefault(len(prompt), set()).add(int(length))

    chain, tree = Tier(DEPTH), tools.tiers[kind][-1]
    engine.use_policy(tools.script(chain, PLAIN, tree, PLAIN, PLAIN, PLAIN, chain, tree))
    rng = np.random.default_rng(2)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    work = [(rng.integers(0, tools.eos, n).tolist(), greedy) for n in (1, 2, 16, 37)]
    outputs = tools.drive(engine, work, on_step=check)
    # On reused pages: the first turn's prompts, and one that goes on from its output.
    turns = [*work[2:], (work[3][0] + outputs[3].token_ids[:11], greedy)]
    again = tools.drive(engine, turns, on_step=check)
    assert [o.metrics.cached_prompt_tokens for o in again] == [8, 32, 40]
    assert all(len(checked[n]) >= 3 for n in (1, 2, 16, 37, 48)), checked


@pytest.mark.parametrize(
    "kind",
    [
        "dspark",
        pytest.param("dflash", marks=pytest.mark.exhaustive("its part is in DSpark's")),
        pytest.param("dflash2", marks=pytest.mark.exhaustive("walks as DSpark does")),
    ],
)
def test_trees_accept_what_simulation_says(bench: Any, tools: Any, kind: str):
    """`train evaluate` beside the engine, greedy and sampled, and both beside chains of the same depth."""
    engine, rng, tree = bench.engine(kind), np.random.default_rng(1), tools.tree
    texts = []
    for heat, count in ((0.0, 12), (0.7, 24)):
        params = [SamplingParams(temperature=heat, seed=n, max_tokens=90, ignore_eos=True) for n in range(count)]
        work = [(rng.integers(0, tools.eos, 6).tolist(), p) for p in params]
        for (prompt, _), output in zip(work, bench.expected(work), strict=True):
            learn = [False] * len(prompt) + [True] * len(output.token_ids)
            texts.append(Example(prompt + output.token_ids, learn, "some", len(prompt), heat))
    groups = simulation.simulate(bench.modules[kind], bench.target, texts, DEPTH, trees=[tree])
    found = {tier: evaluate.measure(engine, texts, tier) for tier in (Tier(DEPTH), tree)}
    for group, tolerance in zip(groups, (0.02, 0.05), strict=True):
        name = f"some T={group.temperature:g}" if group.temperature else "some greedy"
        assert found[tree][name] >= found[Tier(DEPTH)][name] + 0.05, found
        for tier, lengths in found.items():
            # Rounds that reach beyond a text's end are run, but not simulated.
            assert group.length(tier) == pytest.approx(lengths[name], rel=tolerance), (tier, name)
