"""One server of several processes: what the first tells the others, and what the loss of one does to requests.

The drafter of two processes says one letter only, which lies in the part of its vocabulary that one process computes:
"a" in the first one's, "i" in the other's. So a draft shows whose weights were exchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxspec import LLM, SamplingParams
from jaxspec.adaptive import versions
from jaxspec.ringfiles import RingFile, ring_files
from jaxspec.runtime.hosts import HostLostError, Place
from serve import __main__ as command
from serve.app import Server, place_of
from serve.client import AsyncClient, ServerError
from serve.config import ServerConfig
from serve.openai import free_port

ROOT = Path(__file__).resolve().parents[2]
#: Of a server's start, and those in which clients hear of a loss.
START_SECONDS, LOSS_SECONDS = 240.0, 10.0
SIZES: dict[str, Any] = dict(
    max_batch_size=1, max_seq_len=240, page_size=8, prefill_chunk=16, variants=("sampled",), compile_cache=False
)
REQUESTS: list[dict[str, Any]] = [
    dict(prompt="abcabcabcabc", temperature=0.0),
    dict(prompt="hgfhgfhgf", temperature=1.0, seed=7),
    dict(prompt="abcdefghijklabcdefghijkl", temperature=0.7, seed=8, top_p=0.9, logit_bias={3: 1.0}),
]


#: What one process writes, without speculation; `test_one_process_writes_the_same` has it written again.
EXPECTED = [
    "iiiiiiiiiiiiiiicgklngbecfbecgbgkicgbecg",
    "jhgkehgafclaicejkdjkackfbljicceongoici",
    "ecljiclddaeiconocfemcecfbelfblgohfcicoh",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that two and four devices can share, written without JAX; 16 tokens, of which one ends a text."""
    directory = tmp_path_factory.mktemp("shared") / "target"
    directory.mkdir()
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate([*"abcdefghijklmno", "</s>"])}, []))
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens([AddedToken("</s>", special=True)])
    letters.save(str(directory / "tokenizer.json"))
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=16, hidden_size=32, intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8, hidden_act="silu",
        rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, max_position_embeddings=512, eos_token_id=15,
    )  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    attention = {f"self_attn.{name}_proj": (32, 32) for name in "qkvo"}
    layer = {**attention, "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (16, 32), "lm_head": (16, 32)}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    draw = np.random.default_rng(0)
    weights = {f"{name}.weight": draw.standard_normal(shape, np.float32) * 0.3 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": np.ones(32, np.float32) for name in norms}
    save_file(weights, directory / "model.safetensors")
    return directory


def save_heads(directory: Path, letter: str) -> Path:
    """Medusa heads that say one letter whatever comes."""
    directory.mkdir(parents=True)
    config = dict(medusa_num_heads=2, medusa_num_layers=1, hidden_size=32, vocab_size=16)
    (directory / "config.json").write_text(json.dumps(config))
    weights = {}
    for head in range(2):
        says = np.zeros((16, 32), np.float32)
        says["abcdefghijklmno".index(letter)] = 1
        block = {"weight": np.zeros((32, 32), np.float32), "bias": np.full(32, 1000, np.float32)}
        weights |= {f"{head}.0.linear.{name}": value for name, value in block.items()} | {f"{head}.1.weight": says}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.exhaustive("another engine, for what is written down")
def test_one_process_writes_the_same(checkpoint: Path, kept_executables: Path):
    alone = {**SIZES, "compile_cache": kept_executables}
    with LLM(checkpoint, "none", progress=False, warmup="eager", **alone) as llm:
        asked = [{name: value for name, value in r.items() if name != "prompt"} for r in REQUESTS]
        params = [SamplingParams(max_tokens=40, ignore_eos=True, **r) for r in asked]
        outputs = llm.generate([r["prompt"] for r in REQUESTS], params, use_tqdm=False)
    assert [output.text for output in outputs] == EXPECTED


class Follower:
    """A process that follows, with its ports for gRPC and HTTP."""

    def __init__(self, config: ServerConfig, process: int, log: Path):
        path = log.with_suffix(".yaml")
        path.write_text(config.to_yaml())
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serve", f"--config={path}", f"--process-id={process}"],
                cwd=log.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=errors,
                text=True,
            )  # fmt: skip
        self._number, self._log = process, log

    def wait_until_it_follows(self) -> None:
        """Where it does not, the test's own time-out ends it."""
        assert self.process.stdout is not None
        lines = (line for line in self.process.stdout if not line.startswith("[Gloo]"))
        words = next(lines, "").replace(",", "").split()
        assert words[:2] == ["listening", "on"], self._log.read_text()
        self.ports = [int(words[i].rpartition(":")[2]) for i in (2, -1)]
        found = re.fullmatch(r"following process 0 of \d as process (\d) after \d+\.\d s\n", next(lines, ""))
        assert found and int(found[1]) == self._number, self._log.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.asynccontextmanager
async def serving(
    checkpoint: Path, count: int, log: Path, drafter: str, speculation: dict[str, Any] = {}, **engine: Any  # noqa: B006
) -> AsyncIterator[tuple[Server, list[Follower]]]:  # fmt: skip
    """The first process is this one's engine; the others are on their own, and run where their logs are."""
    coordinator = f"127.0.0.1:{free_port()}"
    config = ServerConfig.of(
        dict(
            model=str(checkpoint), drafter=drafter, speculation={"policy": "static", "depth": 2, **speculation},
            port=0, metrics_port=0, withdrawal_seconds=0.0, coordinator=coordinator, num_processes=count, process_id=0,
            engine={
                **SIZES, "structured_output": False, "variants": list(SIZES["variants"]), "tensor_parallel": count,
                **engine,
            },
        )
    )  # fmt: skip
    followers = [Follower(config, process, log.with_suffix(f".{process}")) for process in range(1, count)]
    server = Server(config)
    try:
        await server.start()
        async with asyncio.timeout(START_SECONDS):
            await server.ready()
            await asyncio.gather(*(asyncio.to_thread(follower.wait_until_it_follows) for follower in followers))
        yield server, followers
    finally:
        for follower in followers:
            follower.end()
        await server.stop()


@pytest.fixture
def quickly(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """How the processes compile."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


async def writes_as_expected(client: AsyncClient) -> None:
    for options in ({}, {"max_depth": 0}):
        asked = [client.generate(max_tokens=40, ignore_eos=True, timeout=60, **r, **options) for r in REQUESTS]
        assert [result.text for result in await asyncio.gather(*asked)] == EXPECTED


async def accepted(client: AsyncClient) -> int:
    """Drafts of a text that begins with a row of "i"."""
    result = await client.generate(max_tokens=40, ignore_eos=True, timeout=60, **REQUESTS[0])
    assert result.text == EXPECTED[0]
    return result.completions[0].finished.speculation.num_accepted_draft_tokens


async def exchanges_heads(client: AsyncClient, here: Path, there: Path) -> None:
    """What a process cannot read, or reads otherwise, changes nothing; what all can drafts in all of them."""
    info = await client.server_info()
    assert (info.drafter_version, info.draft_tensor_parallel) == (1, 2) and await accepted(client) == 0
    save_heads(here / "missing", "i")
    save_heads(here / "other", "i")
    save_heads(there / "other", "h")
    for name, said in (
        ("missing", "process 1 says missing is not a directory"),
        ("other", r"by the SHA-256 of its files process 0 read \w{12}, process 1 read \w{12}"),
        ("neither", "neither is not a directory"),
    ):
        with pytest.raises(ServerError, match=said) as caught:
            await client.update_drafter(name)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert await accepted(client) == 0
    heads = str(save_heads(here / "heads", "i"))
    texts = asyncio.ensure_future(writes_as_expected(client))
    assert await client.update_drafter(heads, trial=False) == 2
    await texts
    assert (alone := await accepted(client)) > 6
    # On trial: those before come back, and have every other turn.
    assert await client.update_drafter(str(here.parent / "heads")) == 3
    counts = [await accepted(client) for _ in range(3)]
    assert min(counts) < max(counts), counts
    info = await client.server_info()
    assert (info.drafter_version, info.drafter_trial, info.drafter_updates) == (2, True, 2)
    # The first process decides for all: those that draft worse are rolled back, and in the other one, too.
    for _ in range(40):
        if not (info := await client.server_info()).drafter_trial:
            break
        await accepted(client)
    assert (info.drafter_version, info.drafter_trial, info.drafter_rollbacks) == (2, False, 1)
    assert [await accepted(client) for _ in range(2)] == [alone] * 2


async def gathers(server: Server, client: AsyncClient, ring: Path) -> None:
    """The first process writes what the target computes: the same of a text that comes twice, in a file each."""
    flush = operator.methodcaller("flush_ring")
    await server.engine.call(flush)
    before = set(ring_files(ring))
    states = []
    for _ in range(2):
        await client.flush_cache()
        await accepted(client)
        await server.engine.call(flush)
        (new,) = set(ring_files(ring)) - before
        before.add(new)
        file = RingFile.read(new)
        order = np.argsort(file.about[:, 1])
        text = REQUESTS[0]["prompt"] + EXPECTED[0]
        assert file.about[order, 1].tolist() == [*range(len(order))] and len(text) - 3 <= len(order)
        assert "".join([*"abcdefghijklmno", ""][token] for token in file.about[order, 2]).startswith(text[:-3])
        states.append(np.asarray(file.features[order], np.float32)[: len(text) - 3])
    assert np.isfinite(states[0]).all() and (np.abs(states[0]).max(axis=0) > 0.1).all()
    np.testing.assert_allclose(*states, rtol=2**-7, atol=1e-3)


async def loses(client: AsyncClient, victim: Follower, heads: Path) -> float:
    """Kills a process in the middle of a stream and of an update; seconds until both have ended UNAVAILABLE."""
    stream = client.stream("abc", temperature=0.0, max_tokens=220, ignore_eos=True, timeout=60)
    for _ in range(3):
        await anext(stream)
    victim.process.send_signal(signal.SIGSTOP)
    update = asyncio.ensure_future(client.update_drafter(str(heads)))
    await asyncio.sleep(0.2)
    assert not update.done()
    victim.process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    for ends in (read(stream), update):
        with pytest.raises(ServerError) as caught:
            await ends
        assert caught.value.code.name == "UNAVAILABLE", caught.value
    return time.monotonic() - began


async def read(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


async def health(client: Any, service: str) -> int:
    return (await client.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


@pytest.mark.covers("hosts", "devices", "updates", "ring", "directory", kind="medusa", elsewhere=True)
@pytest.mark.slow
def test_two_processes(kit: Any, checkpoint: Path, quickly: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The texts of one process, drafted and plain, while heads are exchanged and states gathered; probes of the other;
    its end is the end of all requests."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
    monkeypatch.chdir(here)
    heads = save_heads(tmp_path / "heads", "a")
    monkeypatch.setattr(versions, "MOST", 60)

    async def story() -> None:
        ring = dict(feature_ring=str(here / "ring"), feature_ring_mib=1)
        async with serving(checkpoint, 2, there / "log", str(heads), **ring) as (server, (follower,)):
            async with AsyncClient(f"127.0.0.1:{server.port}") as client:
                await writes_as_expected(client)
                await exchanges_heads(client, here, there)
                await gathers(server, client, here / "ring")
                port, metrics_port = follower.ports
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    assert await health(stub, "") == await health(stub, "liveness") == 1
                answer = await asyncio.to_thread(
                    lambda: urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/ready", timeout=10).read()
                )
                assert answer == b"following\n"
                assert await loses(client, follower, heads) < LOSS_SECONDS
            async with asyncio.timeout(LOSS_SECONDS):
                await server.wait()
            assert isinstance(server.error, HostLostError)
            assert str(server.error).startswith("process 1 of 2, which share this engine, was lost: ")

    kit.run(story(), seconds=START_SECONDS + 60)


@pytest.mark.covers("hosts", "devices", "corpus", kind="suffix", elsewhere=True)
@pytest.mark.slow
@pytest.mark.exhaustive("four processes, on two cores")
def test_a_hundred_requests_over_four_processes(kit: Any, checkpoint: Path, quickly: None, tmp_path: Path):
    """They come and go, some cut off, and leave nothing; who drains ends all, and the same commands start again."""

    async def story(log: Path, rounds: int) -> None:
        corpus = dict(suffix_corpus_tokens=256, suffix_corpus_responses=True)
        async with serving(checkpoint, 4, log, "suffix", corpus) as (server, followers):
            async with AsyncClient(f"127.0.0.1:{server.port}") as client:
                await writes_as_expected(client)
                all_pages = server.engine.known().sizes.num_pages
                for _ in range(rounds):
                    stream = client.stream("abc", temperature=1.0, max_tokens=200, ignore_eos=True, timeout=60)
                    await anext(stream)
                    await anext(stream)
                    await stream.aclose()
                await writes_as_expected(client)
                await client.flush_cache()
                await kit.eventually(lambda: server.engine.snapshot.free_pages == all_pages)
            await server.drain()
            assert server.error is None
            codes = [await asyncio.to_thread(f.process.wait, LOSS_SECONDS) for f in followers]
            assert codes == [0, 0, 0], [f._log.read_text() for f in followers]

    for start, rounds in enumerate((100, 1)):
        kit.run(story(tmp_path / f"log{start}", rounds), seconds=START_SECONDS + 300)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"coordinator": "a:1"}, "coordinator needs num_processes and a process_id below that"),
    "one too many": ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id 2"),
    "no coordinator": ({"num_processes": 2, "process_id": 0}, "need a coordinator 'host:port', got coordinator None"),
    "no port": ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "must be 'host:port' or 'auto', got 'a'"),
    "an odd one": (
        {"coordinator": "a:1", "num_processes": 2, "process_id": 0, "engine": {"tensor_parallel": 3}},
        "num_processes must divide tensor_parallel 3, got 2",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_several_processes_need(case: str):
    fields, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        ServerConfig.of(fields)


def test_the_place_of_a_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """As it is given, or as SLURM says, whose environment JAX reads; an error where there is none."""
    given: dict[str, Any] = {"coordinator": "[::1]:9", "num_processes": 4, "process_id": 3}
    assert place_of(ServerConfig.of({**given, "engine": {"tensor_parallel": 4}})) == Place("[::1]:9", 4, 3)
    assert place_of(ServerConfig()) is None
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
             "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2"}  # fmt: skip
    for name in slurm:
        monkeypatch.delenv(name, raising=False)
    assert command.main(["--coordinator", "auto"]) == 2
    assert "coordinator 'auto' needs an environment that JAX knows" in capsys.readouterr().err
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    place = place_of(ServerConfig(coordinator="auto"))
    assert place is not None and (place.num_processes, place.process_id, place.detected) == (2, 1, True)
    assert place.coordinator.startswith("n1:")
