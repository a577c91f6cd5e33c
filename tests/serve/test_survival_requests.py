"""What a generation server must survive of what it is asked, over a real socket.

After each: the engine lives, pages and tables are back at their baseline, and what ran beside it is unchanged.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2
from wires import EXHAUSTED, IA, Code, Others, Wire, ask, served, survives

from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN
from serve.core import grammar_child
from serve.proto import admin_pb2, generation_pb2
from serve.proto import generation_pb2 as pb

TOKENS = lambda *ids: pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), sampling=pb.Sampling(max_tokens=4))
GRAMMAR = lambda **form: pb.GenerateRequest(text="abc", grammar=pb.Grammar(**form))
REFUSED: dict[str, tuple[pb.GenerateRequest, str]] = {
    "no input": (pb.GenerateRequest(), "input must be exactly one of"),
    "empty text": (ask(""), "at least 1 token"),
    "no tokens": (TOKENS(), "at least 1 token"),
    "a token beyond the vocabulary": (TOKENS(1, 13), "13"),
    "the largest token": (TOKENS(2**32 - 1), "4294967295"),
    "no room for a token": (ask("a" * 120, max_tokens=1), "120"),
    "a prompt longer than the context": (ask("a" * 5000, max_tokens=None), "120"),
    "max_tokens 0": (ask(max_tokens=0), "max_tokens"),
    "max_tokens beyond int32": (ask(max_tokens=2**32 - 1), "max_tokens"),
    "a million completions": (ask(n=1_000_000), "n must be an integer from 1 to 64"),
    "no completion": (ask(n=0), "n must be"),
    "temperature NaN": (ask(temperature=math.nan), "temperature must be a finite number"),
    "temperature infinite": (ask(temperature=math.inf), "temperature"),
    "temperature negative": (ask(temperature=-0.5), "temperature"),
    "top_p NaN": (ask(top_p=math.nan), "top_p"),
    "top_p infinite": (ask(top_p=math.inf), "top_p"),
    "top_p negative": (ask(top_p=-1.0), "top_p"),
    "top_p 0": (ask(top_p=0.0), "top_p"),
    "an empty stop string": (ask(stop=[""]), "stop must hold non-empty strings"),
    "many stop strings": (ask(stop=["a"] * 65), "stop may have at most 64"),
    "a huge stop string": (ask(stop=["a" * 1_000_000]), "stop"),
    "many stop tokens": (ask(stop_token_ids=[1] * 33), "stop_token_ids"),
    "a stop token beyond the vocabulary": (ask(stop_token_ids=[13]), "13"),
    "a bias beyond the vocabulary": (ask(logit_bias={13: 1.0}), "13"),
    "an infinite bias": (ask(logit_bias={1: math.inf}), "logit_bias"),
    "many alternatives": (ask(logprobs=21), "logprobs must be an integer from 0 to 20"),
    "alternatives beyond int32": (ask(logprobs=2**32 - 1), "logprobs"),
    "min_tokens over max_tokens": (ask(min_tokens=61), "min_tokens"),
    "repetition_penalty 0": (ask(repetition_penalty=0.0), "repetition_penalty"),
    "a penalty NaN": (ask(presence_penalty=math.nan), "presence_penalty"),
    "an invalid regex": (GRAMMAR(regex="a(b"), "regex"),
    "an invalid schema": (GRAMMAR(json_schema='{"type": "nothing"}'), "schema"),
    "a schema that is no JSON": (GRAMMAR(json_schema="{"), "schema"),
    "a grammar that fails at its first mask": (GRAMMAR(json_schema='{"$ref": "#"}'), "schema"),
    "an invalid Lark grammar": (GRAMMAR(lark="start: nothing"), "lark"),
    "a regex without end": (GRAMMAR(regex="(" * 10_000), "regex"),
    "a grammar without form": (pb.GenerateRequest(text="abc", grammar=pb.Grammar()), "grammar"),
    "no choices": (GRAMMAR(choice=pb.Choice()), "choice"),
    "a route with spaces": (pb.GenerateRequest(text="abc", route="my route"), "route"),
    "an SLO of NaN": (pb.GenerateRequest(text="abc", slo=pb.Slo(tpot_ms=math.nan)), "tpot_ms"),
    "a priority out of range": (pb.GenerateRequest(text="abc", priority=101), "priority"),
    "a chat without messages": (pb.GenerateRequest(chat=pb.Chat()), "messages"),
}


def test_what_can_never_be_honoured_is_an_invalid_argument(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        for name, (request, words) in REFUSED.items():
            error = await wire.status(request)
            assert error.code() is IA and words in str(error.details()), (name, error.code(), error.details())
        info = await wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert info.state == "serving"

    survives(kit, expected, harm)


def test_grammars_beyond_the_limits_are_invalid_arguments(kit: Any, expected: Any):
    choices = lambda *options: GRAMMAR(choice=pb.Choice(options=options))
    wrong = {
        "4097 choices": (choices(*(str(i) for i in range(4097))), "4096"),
        "a choice of 1025 bytes": (choices("a" * 1025), "1024"),
        "choices of more than 256 KiB": (choices(*(f"{i:01000}" for i in range(263))), "262144"),
        "a schema of more than 256 KiB": (GRAMMAR(json_schema='{"enum": ["' + "a" * 2**18 + '"]}'), "262144"),
        "an expression of more than 256 KiB": (GRAMMAR(regex="a" * (2**18 + 1)), "262144"),
    }

    async def harm(wire: Wire) -> None:
        for name, (request, words) in wrong.items():
            error = await wire.status(request)
            assert error.code() is IA and words in str(error.details()), (name, error.code(), error.details())

    survives(kit, expected, harm)


#: Seconds in which any grammar is served or refused, and which others may have to wait for a token meanwhile.
GRAMMAR_SECONDS, GAP_SECONDS = 120.0, 20.0


def test_hostile_grammars_end_soon_and_harm_nobody(writing_kit: Any, monkeypatch: pytest.MonkeyPatch):
    """Within the limits of size, and dear all the same: a result or INVALID_ARGUMENT, while others go on."""
    monkeypatch.setattr(grammar_child, "PATIENCE_SECONDS", GRAMMAR_SECONDS)

    async def attack(wire: Wire, kind: str, value: Any) -> None:
        request = ask("abc", max_tokens=60, ignore_eos=False)
        grammar = pb.Grammar(**{kind: pb.Choice(options=value) if kind == "choice" else value})
        request.grammar.CopyFrom(grammar)
        try:
            answer = await wire.generation.Generate(request, timeout=GRAMMAR_SECONDS)
            assert answer.completions[0].token_ids
            assert kind != "choice" or answer.completions[0].text in value
        except grpc.aio.AioRpcError as e:
            assert e.code() is IA and e.details(), (e.code(), e.details())

    async def story() -> None:
        async with served(writing_kit) as wire:
            others = Others(wire)
            before = writing_kit.resident_bytes()
            for name, grammar in writing_kit.hostile_grammars().items():
                began = time.monotonic()
                await attack(wire, *next(iter(grammar.items())))
                seconds[name] = time.monotonic() - began, others.take_longest_gap()
            await others.stop(offline)
            assert all(gap < GAP_SECONDS for _, gap in seconds.values()), seconds
            assert writing_kit.resident_bytes() - before < 512 * 2**20
            # Grammars are still served.
            request = ask("abc", ignore_eos=False)
            request.grammar.CopyFrom(pb.Grammar(regex="[a-f]{4}"))
            assert re.fullmatch("[a-f]{4}", (await wire.generation.Generate(request)).completions[0].text)
            assert await wire.serving()
            await wire.idle()

    seconds: dict[str, tuple[float, float]] = {}
    prompt = [writing_kit.written.index(letter) for letter in Others.PROMPT]
    offline = writing_kit.offline([(prompt, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))])
    offline = offline[0][0].token_ids
    writing_kit.run(story(), 800)


def test_another_model_is_not_found(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        error = await wire.status(pb.GenerateRequest(text="abc", model="another"))
        assert error.code() is Code.NOT_FOUND and "'demo'" in str(error.details())

    survives(kit, expected, harm)


def test_a_prompt_larger_than_the_whole_pool_is_an_invalid_argument(kit: Any):
    """And not an invitation to try again."""

    async def story() -> None:
        few = dict(tiers=(PLAIN,), num_pages=8, batch_buckets=(4,), compile_cache=False)
        facade = kit.facade(kit.build_tiny_engine(**few))
        async with served(kit, facade) as wire:
            error = await wire.status(ask("a" * 70, max_tokens=20))
            assert error.code() is IA and "pages" in str(error.details())
            assert len(await wire.read(ask("a" * 30, max_tokens=20))) == 20
            await wire.idle()

    kit.run(story())


def test_an_id_in_use_already_exists(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        request = ask(max_tokens=100)
        request.request_id = "mine"
        wire.facade.hold()
        first = asyncio.create_task(wire.read(request))
        await wire.live(2)
        error = await wire.status(request)
        assert error.code() is Code.ALREADY_EXISTS and "mine" in str(error.details())
        wire.facade.release()
        tokens = await first
        assert await wire.read(request) == tokens, "the id is free again"

    survives(kit, expected, harm)


def test_oversize_messages_are_resource_exhausted(kit: Any, expected: Any):
    async def harm(wire: Wire) -> None:
        error = await wire.status(ask("a" * (2 << 20)))
        assert error.code() is EXHAUSTED

    survives(kit, expected, harm, max_message_mib=1)


def test_bytes_that_are_no_message_are_unknown_and_counted(kit: Any, expected: Any):
    """gRPC answers them itself, before any handler: the one use of UNKNOWN."""

    async def harm(wire: Wire) -> None:
        sent = 0
        for services in (generation_pb2, admin_pb2, vllm_engine_pb2):
            for service in services.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    make = wire.channel.unary_stream if method.server_streaming else wire.channel.unary_unary
                    for garbage in (b"\xff\xfe garbage \x01", b"\x00", b"\x0a\xff"):
                        call = make(f"/{service.full_name}/{method.name}")(garbage)
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await (call.read() if method.server_streaming else call)
                        assert caught.value.code() is Code.UNKNOWN, (method.full_name, garbage, caught.value)
                        sent += 1
        assert refused == [("UNKNOWN", "undecodable")] * sent and sent > 40

    refused: list[tuple[str, str]] = []

    async def counted(wire: Wire) -> None:
        count = wire.server.metrics.on_refused
        wire.server.metrics.on_refused = lambda code, reason: (refused.append((code, reason)), count(code, reason))[1]
        await harm(wire)

    survives(kit, expected, counted)
