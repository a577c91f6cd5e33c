"""jaxspec.v1.GenerationService over a real socket: what the offline engine says, and what is refused."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import grpc
import pytest
from sockets import FITS, GREEDY, collected, failure, scraped, served

from jaxspec.request import SamplingParams
from serve.client import Options, build_request
from serve.proto import generation_pb2 as pb
from serve.proto.services import GENERATION, Stub

CASES: dict[str, tuple[Any, Options]] = {
    "greedy": ("abcab", GREEDY),
    "tokens": ([3, 1, 4, 1, 5], GREEDY),
    "seeded": ("hgf", {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 8, "seed": 11, "max_tokens": 20}),
    "choices": ("lk", {"temperature": 1.1, "seed": 2**32 - 1, "n": 3, "max_tokens": 9}),
    "logprobs": ("cab", {"temperature": 0.0, "logprobs": 3, "max_tokens": 6}),
    "stop string": ("abcab", {"temperature": 0.9, "seed": 3, "stop": ["b", "le"], "max_tokens": 60}),
    "kept stop": ("a", {"temperature": 0.9, "seed": 3, "stop": "b", "include_stop_str_in_output": True}),
    "stop token": ("abc", {"temperature": 1.0, "seed": 5, "stop_token_ids": [1, 7], "max_tokens": 60}),
    "penalties": ("aaaa", {"temperature": 0.3, "seed": 1, "presence_penalty": 0.4, "repetition_penalty": 1.3}),
    "bias": ("aaaa", {"temperature": 0.0, "logit_bias": {2: 1.7}, "min_tokens": 4, "max_tokens": 8}),
    "allowed": ("abc", {"temperature": 1.0, "seed": 6, "allowed_token_ids": [0, 2, 4], "max_tokens": 9}),
    "plain": ("abcab", {**GREEDY, "speculation": False}),
    "shallow": ("abcab", {**GREEDY, "max_depth": 1}),
}


_NOT_SAMPLING = ("speculation", "max_depth")


def test_what_comes_over_the_wire_is_what_the_engine_makes_offline(kit: Any):
    def with_room(prompt: Any, options: Options) -> SamplingParams:
        kept = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
        return SamplingParams(**{"max_tokens": 120 - len(prompt), **kept})  # type: ignore[arg-type]

    encode = kit.engine.facts.tokenizer.encode
    prompts = {name: encode(p) if isinstance(p, str) else p for name, (p, _) in CASES.items()}
    wanted = kit.offline([(prompts[name], with_room(prompts[name], options)) for name, (_, options) in CASES.items()])

    async def story() -> None:
        async with served(kit) as (_, client):
            for (name, (prompt, options)), outputs in zip(CASES.items(), wanted, strict=True):
                result = await client.generate(prompt, **options)
                info, deltas, ends = await collected(client.stream(prompt, **options))
                assert result.prompt.prompt_tokens == info.prompt_tokens == len(prompts[name])
                assert len(result.completions) == len(ends) == len(outputs)
                for index, output in enumerate(outputs):
                    want, got, end = output.outputs[0], result.completions[index], ends[index]
                    parts = deltas.get(index, [])
                    assert got.index == index and list(got.token_ids) == want.token_ids, name
                    assert got.text == want.text == "".join(part.text for part in parts), name
                    assert [t for part in parts for t in part.token_ids] == want.token_ids, name
                    for finished in (got.finished, end):
                        assert finished.reason == got.finish_reason == str(want.finish_reason), name
                        assert finished.stop_reason == want.stop_reason, name
                        assert finished.usage.completion_tokens == len(want.token_ids)
                    streamed = tuple(entries for part in parts for entries in part.logprobs)
                    assert same_logprobs(got.logprobs, want.logprobs) and same_logprobs(streamed, want.logprobs), name

    kit.run(story())


def same_logprobs(got: Any, want: Any) -> bool:
    """The same tokens and ranks; the last bits of a logarithm depend on the tiers that ran."""
    pairs = [(a, list(b.values())) for a, b in zip(got, want or (), strict=True)]
    return all(
        len(a) == len(b)
        and all(
            (x.token_id, x.rank) == (y.token_id, y.rank) and x.logprob == pytest.approx(y.logprob, abs=1e-5)
            for x, y in zip(a, b, strict=True)
        )
        for a, b in pairs
    )


def test_a_conversation_goes_through_the_template(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            messages = [{"role": "user", "content": "bcd"}]
            ids = await client.tokenize(messages)
            assert ids == [1, 2, 3, 0]  # the template opens the answer with "a"
            assert await client.tokenize(messages, add_generation_prompt=False) == [1, 2, 3]
            chat = await client.generate(messages, **GREEDY)
            assert chat.token_ids == (await client.generate(ids, **GREEDY)).token_ids
            assert chat.prompt.prompt_tokens == 4

    kit.run(story())


def test_a_grammar_shapes_the_output(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            for options, pattern in (({"regex": "[ab]{3}c"}, "[ab]{3}c"), ({"choice": ["fed", "cab"]}, "fed|cab")):
                result = await client.generate("abc", **GREEDY, **options)
                assert re.fullmatch(pattern, result.text) and result.completions[0].finish_reason == "stop"

    kit.run(story())


def test_the_seed_that_is_told_reproduces_the_output(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            first = await client.generate("abc", n=2, max_tokens=15)
            again = await client.generate("abc", n=2, max_tokens=15, seed=first.prompt.seed)
            assert [c.token_ids for c in again.completions] == [c.token_ids for c in first.completions]
            assert again.prompt.seed == first.prompt.seed
            other = await client.generate("abc", max_tokens=15)
            assert other.prompt.seed != first.prompt.seed

    kit.run(story())


def test_ids_are_echoed_or_chosen_and_usage_is_told(kit: Any):
    async def story() -> None:
        async with served(kit, served_model_name="tiny") as (_, client):
            result = await client.generate("abc" * 8, request_id="mine", model="tiny", **FITS)
            assert (result.prompt.request_id, result.prompt.model) == ("mine", "tiny")
            ids = {(await client.generate("abc", **GREEDY)).prompt.request_id for _ in range(5)}
            assert len(ids) == 5 and all(ids)
            usage, stats = result.completions[0].finished.usage, result.completions[0].finished.speculation
            assert (usage.prompt_tokens, usage.completion_tokens) == (24, 60)
            assert 0 <= usage.queue_seconds <= usage.ttft_seconds and usage.decode_seconds > 0
            assert sum(stats.acceptance_histogram) == stats.num_spec_steps == sum(stats.tier_rounds.values())
            assert stats.num_accepted_draft_tokens + stats.num_spec_steps == pytest.approx(
                stats.mean_acceptance_length * stats.num_spec_steps
            )
            again = await client.generate("abc" * 8, **FITS)
            assert again.completions[0].finished.usage.cached_prompt_tokens > 0

    kit.run(story())


def test_max_tokens_is_what_is_left_or_what_the_server_says(kit: Any):
    async def story() -> None:
        async with served(kit) as (_, client):
            filled = await client.generate("abc", temperature=0.0, ignore_eos=True)
            assert len(filled.token_ids) == kit.engine.facts.sizes.max_seq_len - 3
            assert filled.completions[0].finish_reason == "length"
            more = await client.generate("abc", temperature=0.0, ignore_eos=True, max_tokens=200)
            assert more.token_ids == filled.token_ids and more.completions[0].finish_reason == "length"
        async with served(kit, max_output_tokens=5) as (_, client):
            assert len((await client.generate("abc", temperature=0.0, ignore_eos=True)).token_ids) == 5
            asked = await client.generate("abc", temperature=0.0, ignore_eos=True, max_tokens=7)
            assert len(asked.token_ids) == 7

    kit.run(story())


def test_what_can_never_be_honoured_is_invalid(kit: Any):
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([1] * 120, {}, "tokens.ids must be shorter than 120 tokens, got 120"),
        ([99], {}, r"token ids must lie in \[0, 13\), got 99"),
        ("abc", {"stop_token_ids": [13]}, "stop_token_ids must be below the vocabulary size 13, got 13"),
        ("abc", {"logit_bias": {13: 1.0}}, "logit_bias must be below the vocabulary size 13, got 13"),
        ("abc", {"allowed_token_ids": [13]}, "allowed_token_ids must be below the vocabulary size 13, got 13"),
        ("abc", {"allowed_token_ids": [2], "regex": "a+"}, "allowed_token_ids must be left out with a grammar"),
        ("abc", {"allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1}, "min_tokens = 1 does not forbid"),
        ("abc", {"n": 10**6}, "n must be an integer from 1 to 64, got 1000000"),
        ("abc", {"temperature": float("nan")}, "sampling.temperature must be"),
        ("abc", {"regex": "("}, ""),
        ("abc", {"json_schema": '{"type": 5}'}, ""),
        ("", {}, "text must hold at least 1 token"),
    ]

    async def story() -> None:
        async with served(kit) as (server, client):
            for prompt, options, message in cases:
                for call in (client.generate(prompt, **options), collected(client.stream(prompt, **options))):
                    error = await failure(call)
                    assert error.code is grpc.StatusCode.INVALID_ARGUMENT, (options, error)
                    assert re.search(message, error.message), error
                    assert error.retry_after is None
            error = await failure(client.generate("abc", model="gpt"))
            assert error.code is grpc.StatusCode.NOT_FOUND
            assert scraped(server, "jaxspec:refused_requests_total", code="NOT_FOUND", reason="not_found") == 1
            assert scraped(
                server, "jaxspec:refused_requests_total", code="INVALID_ARGUMENT", reason="invalid"
            ) == 2 * len(cases)

    kit.run(story())


def test_tokenize_and_detokenize(kit: Any):
    async def story() -> None:
        async with served(kit) as (server, client):
            assert await client.tokenize("abl") == [0, 1, 11]
            assert await client.detokenize([0, 1, 11, 12]) == "abl"
            assert await client.detokenize([0, 12], skip_special_tokens=False) == "a<eos>"
            assert await client.detokenize([]) == ""
            for call in (
                client.detokenize([13]),
                client.tokenize([{"role": "user", "content": "a"}], add_special_tokens=True),
            ):
                assert (await failure(call)).code is grpc.StatusCode.INVALID_ARGUMENT
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub = Stub(GENERATION, channel)
                answer = await stub.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False))
                assert answer.max_tokens == kit.engine.facts.sizes.max_seq_len
                with pytest.raises(grpc.RpcError, match="input must be exactly one of text and chat"):
                    await stub.Tokenize(pb.TokenizeRequest())

    kit.run(story())


def test_deltas_that_say_nothing_are_not_sent(kit: Any):
    """Neither by jaxspec.v1 nor by vLLM's protocol; a token whose text has not settled is something to say."""
    kit.clean()
    facade = kit.chatty_facade(kit.engine)

    async def story() -> None:
        async with served(kit, facade, stream_interval_ms=0) as (_, client):
            stub = Stub(GENERATION, client._channel)
            call = stub.GenerateStream(build_request("abc", FITS))
            kinds = [(m.WhichOneof("event"), len(m.delta.token_ids), bool(m.delta.text)) async for m in call]
            assert facade.said > 5 and ("delta", 0, False) not in kinds
            assert sum(count for _, count, _ in kinds) == 60
            if importlib.util.find_spec("smg_grpc_proto") is None:
                return
            from smg_grpc_proto import vllm_engine_pb2 as vllm
            from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

            said = facade.said
            sampling = vllm.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            tokens = vllm.TokenizedInput(input_ids=[1, 2, 3])
            message = vllm.GenerateRequest(tokenized=tokens, sampling_params=sampling, stream=True)
            answers = [answer async for answer in rpc.VllmEngineStub(client._channel).Generate(message)]
            chunks = [len(answer.chunk.token_ids) for answer in answers if answer.HasField("chunk")]
            assert facade.said > said + 5 and all(chunks) and sum(chunks) == 60

    kit.run(story())
