"""Draft caches hold what they should: rounds accept exactly what a drafter would propose that reads the text anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.models.layers import causal_attention
from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN, Tier


def naive_rounds(
    propose: Callable[[list[int], int], list[int]], prompt: list[int], output: Sequence[int], depth: int
) -> list[int]:
    """Accepted drafts of each round of a greedy chain, given the text that is going to be generated."""
    text, left, accepted = [*prompt, output[0]], list(output[1:]), []
    while left:
        count = 0
        for token in propose(text, depth):
            if count < len(left) and token == left[count]:
                count += 1
            else:
                break
        accepted.append(count)
        text, left = text + left[: count + 1], left[count + 1 :]
    return accepted


def histogram(counts: list[int]) -> list[int]:
    return np.bincount(counts).tolist()


def test_the_draft_models_cache_holds_the_text(bench: Any, tools: Any):
    """Rounds accept exactly what the draft model proposes when it reads the whole text anew."""
    graph, params = nnx.split(bench.modules["draft_model"])

    @jax.jit
    def forward(tokens: jax.Array) -> jax.Array:
        net = nnx.merge(graph, params)
        return net.logits(net(tokens, jnp.arange(tokens.shape[1])[None], causal_attention)[0])

    def propose(text: list[int], depth: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(depth):
            tokens = np.zeros((1, 80), np.int32)
            tokens[0, : len(text) + len(drafted)] = text + drafted
            drafted.append(int(np.asarray(forward(tokens))[0, len(text) + len(drafted) - 1].argmax()))
        return drafted

    check_acceptance(bench, tools, "draft_model", propose, 3)


def test_prompt_look_up_reads_the_text(bench: Any, tools: Any):
    def propose(text: list[int], depth: int) -> list[int]:
        for n in (4, 3, 2, 1):
            ends = [e for e in range(n - 1, len(text) - 1) if text[e - n + 1 : e + 1] == text[-n:] and len(text) >= n]
            if ends:
                tail = text[ends[-1] + 1 :]
                return [tail[i % len(tail)] for i in range(depth)]
        return []

    check_acceptance(bench, tools, "ngram", propose, 5)


def check_acceptance(bench: Any, tools: Any, kind: str, propose: Callable[..., list[int]], depth: int) -> None:
    """Acceptance of greedy rows, round by round, against a naive drafter; prompts below and above a chunk."""
    engine = bench.engine(kind)
    engine.use_policy(StaticPolicy(Tier(depth)))
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    work = [(rng.integers(0, tools.eos, n).tolist(), params) for n in (1, 2, 7, 16, 37)]
    total = 0
    for (prompt, _), output in zip(work, tools.drive(engine, work), strict=True):
        counts = naive_rounds(propose, prompt, output.token_ids, depth)
        got = output.metrics.acceptance_histogram
        # The last round may accept drafts behind the end of the request.
        assert sum(got) == len(counts), (prompt, got, counts)
        assert got == histogram(counts) or histogram(counts[:-1]) == minus_one(got, histogram(counts[:-1])), (
            got,
            counts,
        )
        total += sum(counts)
    assert total > 0


def minus_one(counts: list[int], like: list[int]) -> list[int]:
    """`counts` without the one entry that `like` lacks, if exactly one is lacking."""
    wide = [*like, *[0] * (len(counts) - len(like))]
    extra = [a - b for a, b in zip(counts, wide, strict=True)]
    return like if sorted(extra)[-1] == 1 and sum(map(abs, extra)) == 1 else counts


@pytest.mark.parametrize("second", [PLAIN, Tier(1), Tier(3)], ids=str)
def test_reused_pages_hold_draft_entries_too(bench: Any, tools: Any, second: Tier):
    """A next turn on cached pages accepts what it accepts without them, whatever tiers wrote them.

    One row, and the target as its own draft: without a gap in the draft's cache every draft is accepted.
    """
    engine, prompt = bench.engine("draft_model"), [1, 5, 2, 8]
    own, engine.runner.draft_params = engine.runner.draft_params, bench.target_as_draft(engine)
    try:
        params = SamplingParams(temperature=0, max_tokens=57, ignore_eos=True)
        engine.use_policy(tools.script(Tier(3), second))
        turn = [*prompt, *tools.drive(engine, [(prompt, params)])[0].token_ids, 3]
        engine.use_policy(StaticPolicy(Tier(3)))
        output = tools.drive(engine, [(turn, params)])[0]
    finally:
        engine.runner.draft_params = own
    histogram, cached = output.metrics.acceptance_histogram, output.metrics.cached_prompt_tokens
    assert cached >= 56 and sum(histogram[:-1]) <= 1, f"{cached} cached tokens, acceptance {histogram}"


@pytest.mark.parametrize("pause", [1, 6, 24])
def test_drafts_are_as_good_after_a_pause_as_before(bench: Any, tools: Any, pause: int):
    """A policy may decode token by token for a while; what was not drafted then must not be missing afterwards.

    Of TensorRT-LLM #16888 and vLLM #52873: with a draft cache that is not fed meanwhile acceptance stays low for good.
    """
    engine = bench.engine("draft_model")
    own, engine.runner.draft_params = engine.runner.draft_params, bench.target_as_draft(engine)
    script = tools.script(*[Tier(3)] * 3, *[PLAIN] * pause, *[Tier(3)] * 40)
    engine.use_policy(script)
    try:
        params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
        (output,) = tools.drive(engine, [([1, 5, 2, 8], params)])
    finally:
        engine.runner.draft_params = own
    tools.same([output], bench.expected([([1, 5, 2, 8], params)]))
    accepted = [count for stats in script.heard[3 + pause : -1] for count in stats.num_accepted]
    assert len(accepted) >= 5 and set(accepted) == {3}, accepted
