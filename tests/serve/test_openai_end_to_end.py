"""The openai client, the smg gateway and the server, all unmodified and each in its own process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

from serve.openai import Pair, free_port, main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: Few executables; test_command.py starts a server with the same ones.
SIZES = dict(max_batch_size=2, max_seq_len=512, batch_buckets=(2,), variants=("sampled",), prefill_chunk=16)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the king and his sons."}]
CHAT_TEXT = "<|bos|>user: Tell me of the king and his sons.\nassistant:"
PROMPT = "And the king said unto his sons,"
START_SECONDS, GUARD_SECONDS = 300.0, 200.0


@dataclasses.dataclass
class Running:
    """The pair, ready, and the ways into it."""

    process: subprocess.Popen[str]
    client: openai.OpenAI
    engine: Any
    metrics_url: str

    def held_tokens(self) -> int:
        """Tokens of the pool that live requests hold, by the server's own account."""
        (load,) = self.engine.GetLoads(pb.GetLoadsRequest()).loads
        return load.num_used_tokens + load.num_total_reqs

    def metric(self, pattern: str) -> float:
        """The sum of the samples whose lines match."""
        with urllib.request.urlopen(self.metrics_url, timeout=GUARD_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))


def eventually(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.05)


def read_until_ready(process: subprocess.Popen[str]) -> str:
    """The gateway's URL."""
    assert process.stdout is not None
    ends = time.monotonic() + START_SECONDS
    seen = []
    while time.monotonic() < ends:
        if not select.select([process.stdout], [], [], 1.0)[0]:
            continue
        line = process.stdout.readline()
        seen.append(line)
        if line.startswith("ready: "):
            return line.split()[1]
        if not line:
            break
    raise AssertionError(f"it did not come up: {''.join(seen)}")


def flags(kept: Path) -> list[str]:
    """SIZES, and where executables are kept, as the server's command takes them."""
    sizes = {name: ",".join(map(str, value)) if isinstance(value, tuple) else value for name, value in SIZES.items()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in {**sizes, "compile_cache": kept}.items()]


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, kept_executables: Path, environment: dict[str, str]
) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("openai") / "chat.jinja"
    template.write_text(TEMPLATE)
    port, metrics_port = free_port(), free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "serve.openai", "--http-port", "0", "--port", str(port), "--chat-template", template,
         "--policy", "static", "--depth", "2", "--metrics-port", str(metrics_port), "--log-level", "error",
         *flags(kept_executables)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = read_until_ready(process)
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=GUARD_SECONDS) as client,
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield Running(process, client, rpc.VllmEngineStub(channel), f"http://127.0.0.1:{metrics_port}/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_SECONDS) == 0
    finally:
        process.terminate()
        try:
            process.wait(GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # the second signal kills what it started
            process.wait(GUARD_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


#: In a process of its own: with the options of this one the executables would not be the server's.
OFFLINE = """
import json, sys
from jaxspec import LLM, SamplingParams
sizes, prompts = json.loads(sys.argv[1])
llm = LLM("demo", speculation={"policy": "static", "depth": 2}, progress=False, structured_output=True, **sizes)
ids = [llm.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
print(json.dumps({prompt: output.text for prompt, output in zip(prompts, outputs, strict=True)}))
"""


@pytest.fixture(scope="module")
def offline(running: Running, kept_executables: Path, environment: dict[str, str]) -> dict[str, str]:
    """The engine's own greedy text of 40 tokens for each prompt, as `LLM` gives it."""
    prompts = [PROMPT, "<|bos|>" + PROMPT, CHAT_TEXT]
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, json.dumps([{**SIZES, "compile_cache": str(kept_executables)}, prompts])],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_the_model_is_listed(running: Running) -> None:
    assert [model.id for model in running.client.models.list()] == ["demo"]


@pytest.mark.parametrize("bos", ["", "<|bos|>"])
def test_greedy_completions_are_the_offline_engine_s(running: Running, offline: dict[str, str], bos: str) -> None:
    answer = running.client.completions.create(model="demo", prompt=bos + PROMPT, max_tokens=40, temperature=0)
    assert answer.choices[0].text == offline[bos + PROMPT]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 40
    details = answer.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens and details.rejected_prediction_tokens is not None


def test_chats_streamed_and_whole_are_the_offline_engine_s(running: Running, offline: dict[str, str]) -> None:
    expected = offline[CHAT_TEXT]
    common: Any = dict(model="demo", messages=MESSAGES, max_tokens=40, temperature=0)
    whole = running.client.chat.completions.create(**common)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "length"
    chunks = list(running.client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 10
    for part in (usage, whole.usage):
        details = part.completion_tokens_details
        assert details is not None and (details.accepted_prediction_tokens or 0) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_are_not_in_it(running: Running, offline: dict[str, str], stream: bool) -> None:
    text = offline[CHAT_TEXT]
    stop = text[15:19]
    common: Any = dict(model="demo", messages=MESSAGES, max_tokens=40, temperature=0, stop=[stop])
    if stream:
        chunks = [c.choices[0] for c in running.client.chat.completions.create(**common, stream=True) if c.choices]
        got, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        choice = running.client.chat.completions.create(**common).choices[0]
        got, reason = choice.message.content, choice.finish_reason
    assert (got, reason) == (text[: text.index(stop)], "stop")


def test_seeds_reproduce_and_choices_differ(running: Running) -> None:
    def sample(seed: int) -> list[str]:
        answer = running.client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=20, temperature=1.0, n=2, seed=seed
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = sample(7)
    assert first == sample(7) and first[0] != first[1]
    assert first != sample(8)


def test_logprobs_belong_to_the_text(running: Running) -> None:
    answer = running.client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 12
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_json_schema_is_kept(running: Running, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["David", "Saul"]},
            "sons": {"type": "integer", "minimum": 0, "maximum": 99},
            "old": {"type": "boolean"},
        },
        "required": ["name", "sons", "old"],
        "additionalProperties": False,
    }
    answer = running.client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=200,
        temperature=temperature,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "king", "schema": schema, "strict": True}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"name", "sons", "old"} and value["name"] in ("David", "Saul")
    assert type(value["sons"]) is int and 0 <= value["sons"] <= 99 and type(value["old"]) is bool
    assert answer.choices[0].finish_reason == "stop"


async def _goes_once_it_is_served(running: Running, request: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=running.client.base_url, api_key="none", max_retries=0) as client:
        call = asyncio.create_task(client.completions.create(**request))
        while not (call.done() or running.held_tokens()):
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_pages(running: Running, stream: bool) -> None:
    aborted = 'vllm:request_success_total{.*finished_reason="abort"'
    before = running.metric(aborted)
    common: Any = dict(model="demo", prompt=PROMPT, max_tokens=480, temperature=0, extra_body={"ignore_eos": True})
    if stream:
        answer = running.client.completions.create(**common, stream=True)
        next(iter(answer))
        answer.close()
    else:
        asyncio.run(_goes_once_it_is_served(running, common))
    # An end by itself would count as another reason.
    eventually(lambda: running.metric(aborted) == before + 1)
    eventually(lambda: running.held_tokens() == 0)


def test_what_cannot_be_honoured_is_a_bad_request_at_once(running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="512 tokens.*4000"):
        running.client.completions.create(model="demo", prompt="def main():\n" * 1000, max_tokens=5)
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.stop"):
        running.client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, stop=["x" * 5000])
    with pytest.raises(openai.NotFoundError):
        running.client.completions.create(model="another", prompt=PROMPT, max_tokens=5)


# The command.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--http-port", "70000"], "--http-port"),
        (["--tls-cert", "c.pem", "--tls-key", "k.pem"], "tls_cert"),
        (["--auth-token-file", "tokens"], "auth_token_file"),
        (["--host", "192.0.2.1"], "host"),
        (["--max-waiting", "0"], "max_waiting"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and word in capsys.readouterr().err


def test_a_place_that_cannot_be_listened_on_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "run", lambda self: pytest.fail("it starts"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # the gateway need not be there
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, words in (
            (["--http-port", str(port)], f"--http-port: cannot listen on 127.0.0.1:{port}, which is in use"),
            (["--http-host", "nohost.invalid"], "--http-host: the name 'nohost.invalid' cannot be resolved"),
        ):
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            err = capsys.readouterr().err
            assert ended.value.code == 1 and words in err and err.count("\n") == 1


def test_the_server_s_configuration_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--policy", "static", "--depth", "2"]) == 0
    printed = capsys.readouterr().out
    assert "kv_events: true" in printed and "withdrawal_seconds: 0.0" in printed and "depth: 2" in printed


def test_ports_are_none_that_the_kernel_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picked = tmp_path / "ip_local_port_range"
    monkeypatch.setattr("serve.openai._PICKED", picked)
    assert free_port() > 0  # nobody says which ones those are
    picked.write_text("1024\t60999\n")
    assert free_port() > 0  # they are nearly all
    picked.write_text("12000\t60999\n")
    assert 10_000 <= free_port() < 12_000
    picked.write_text("1024\t60999\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free := free_port()))
        monkeypatch.setattr("serve.openai._LEAST_PORT", free)
        picked.write_text(f"{free + 1}\t60999\n")
        assert free_port() != free  # somebody has the only one


def test_a_server_that_cannot_start_ends_the_command() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert Pair("127.0.0.1", 0, 0, ["--model", "/nowhere"], []).run() == 1
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
