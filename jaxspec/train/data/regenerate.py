"""`python -m jaxspec.train regenerate`: the target answers prompts, and its drafters learn from its answers.

Answers come from the engine's own batch generation. Every row has a seed of its own and the engine runs one batch size
without a prefix cache, so a row does not depend on the rows beside it and a killed run continues as if nothing had
happened. (On accelerators two processes may round differently; then rows may part where two tokens tie.) Must not know
trainees; the engine is imported where it is built, since training works without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxspec.adaptive.registry import OFF
from jaxspec.checkpointing import hf
from jaxspec.checkpointing.tensors import read_json
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.drafters.registry import NONE
from jaxspec.events import Finished
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data.dataset import Prompt, read_prompts
from jaxspec.train.data.jsonl import read_rows

_BATCH, _CPU_BATCH = 128, 16
#: Seconds between two progress lines.
_PROGRESS = 10.0


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    p.add_argument("--target", type=Path, required=True, help='"demo" or a Hugging Face directory with a tokenizer')
    p.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files of prompts, chats or texts")
    p.add_argument("--out", type=Path, required=True, help="the .jsonl to write, or to go on with")
    p.add_argument(
        "--prompt-tokens", type=token_range, default=(16, 64), metavar="MIN:MAX", help="of a text row (default: 16:64)"
    )
    p.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer")
    p.add_argument("--context", type=int, default=2048, help="longest prompt and answer together")
    p.add_argument(
        "--temperatures",
        type=temperatures,
        default=(0.0, 0.7, 1.0),
        metavar="T,T",
        help="a row is given one of them (default: 0,0.7,1)",
    )
    p.add_argument("--drafter", default=NONE, help="a drafter that speeds the target up")
    p.add_argument("--batch", type=int, help=f"rows decoded together (default: {_BATCH}, on a CPU {_CPU_BATCH})")
    p.add_argument("--limit", type=int, help="the first so many rows only (default: all)")
    p.add_argument("--seed", type=int, default=0, help="same seed, same answers")


def token_range(text: str) -> tuple[int, int]:
    """MIN:MAX."""
    low, colon, high = text.partition(":")
    if not colon or not low.isdecimal() or not high.isdecimal() or not 1 <= int(low) <= int(high):
        raise argparse.ArgumentTypeError(f"must be MIN:MAX with 1 <= MIN <= MAX, got {text!r}")
    return int(low), int(high)


def temperatures(text: str) -> tuple[float, ...]:
    """Numbers, separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}") from None


@dataclasses.dataclass(frozen=True)
class Answers:
    """How prompts are answered.

    Attributes:
      prompt_tokens: how much of a text row is its prompt (see read_prompts).
      max_tokens: of an answer.
      context: the longest prompt and answer together, in tokens; at most the target's own context.
      temperatures: the seed picks one for each row; 0 is greedy.
      drafter: as LLM's; answers stay the target's own.
      batch: rows decoded together, None: 16 on a CPU and 128 elsewhere; may differ between the runs that make one file.
      limit: rows; None: all.

    Raises:
      ValueError: a value out of range.
    """

    prompt_tokens: tuple[int, int] = (16, 64)
    max_tokens: int = 256
    context: int = 2048
    temperatures: Sequence[float] = (0.0, 0.7, 1.0)
    drafter: str = NONE
    batch: int | None = None
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 <= t <= 10 for t in self.temperatures):
            raise ValueError(f"temperatures must lie between 0 and 10, got {tuple(self.temperatures)}")
        for name, low in (("max_tokens", 1), ("batch", 1), ("seed", 0), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")

    def params(self, index: int) -> SamplingParams:
        """How a row is sampled."""
        rng = np.random.default_rng((self.seed, index, 1))
        temperature = float(self.temperatures[int(rng.integers(len(self.temperatures)))])
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=int(rng.integers(2**32)))


def main(args: argparse.Namespace) -> Path:
    """Runs the command and returns the file."""
    how = Answers(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Answers)})
    return regenerate(args.target, args.data, args.out, how)


def regenerate(target: Path, data: Sequence[Path], out: Path, how: Answers = Answers()) -> Path:
    """Writes the target's answer to every prompt of `data`, a row of token ids each, in the order of the prompts.

    A row is {"prompt_token_ids", "output_token_ids", "temperature", "dataset"}; read_examples reads it. Beside `out`
    lies a file with what it was made of. A run that was interrupted goes on when it is called again; a finished one
    returns at once. Prompts that leave no room for max_tokens in the context are left out and counted.

    Returns:
      `out`.

    Raises:
      ValueError: bad data; an `out` made of something else, with both values.
      OSError: the disk is full or fails, naming the file; what was written stays and can be gone on with.
    """
    tokenizer = Tokenizer.from_directory(target) if Tokenizer.is_in(target) else None
    config = hf.load_config(target)
    prompts = read_prompts(
        data, tokenizer, prompt_tokens=how.prompt_tokens, seed=how.seed, vocab_size=config.vocab_size
    )
    how = dataclasses.replace(how, context=min(config.max_position_embeddings, how.context))
    room = f"context {how.context} - max_tokens {how.max_tokens}"
    prompts = _fitting(prompts, how.context - how.max_tokens, room)[: how.limit]
    record = {
        "target": _fingerprint(target), "data": [[path.name, _digest(path)] for path in map(Path, data)],
        "prompt_tokens": list(how.prompt_tokens), "max_tokens": how.max_tokens, "context": how.context,
        "temperatures": [float(t) for t in how.temperatures], "drafter": how.drafter, "limit": how.limit,
        "seed": how.seed,
    }  # fmt: skip
    done = _resume(out, record, prompts)
    if done == len(prompts):
        print(f"{out}: all {done:,} rows are there", flush=True)
        return out
    longest = max(len(prompt.tokens) for prompt in prompts) + how.max_tokens
    generate = _engine(target, how, longest, tokenizer is not None)
    params = [how.params(i) for i in range(len(prompts))]
    progress = _Progress(done, len(prompts))
    with out.open("ab", buffering=0) as f:
        waiting: dict[int, bytes] = {}
        for index, output in generate(prompts, params, done):
            row = {
                "prompt_token_ids": prompts[index].tokens, "output_token_ids": output,
                "temperature": params[index].temperature, "dataset": prompts[index].dataset,
            }  # fmt: skip
            waiting[index] = json.dumps(row).encode() + b"\n"
            while done in waiting:
                _append(f, waiting.pop(done), out)
                done += 1
            progress(done, len(output))
    print(f"{out}: {done:,} rows, {progress.rate:,.0f} tokens/s", flush=True)
    return out


def answer(target: Path, data: Sequence[Path], out: Path, *, length: int, seed: int = 0) -> list[Path]:
    """What trainers do with --regenerate: answers that fit rows of `length` tokens with their prompts.

    Returns:
      the files to learn from, in place of `data`.

    Raises:
      ValueError, OSError: as regenerate.
    """
    if length < 4:
        raise ValueError(f"length must be at least 4 for a prompt and its answer, got {length}")
    longest = min(64, length // 4)
    return [
        regenerate(
            target, data, out,
            Answers((min(16, longest), longest), max_tokens=min(512, length // 2), context=length, seed=seed),
        )
    ]  # fmt: skip


def _fitting(prompts: list[Prompt], room: int, what: str) -> list[Prompt]:
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= room]
    if len(kept) < len(prompts):
        first = next(prompt for prompt in prompts if len(prompt.tokens) > room)
        about = (
            f"{len(prompts) - len(kept):,} of {len(prompts):,} prompts are longer than {room} tokens ({what}); "
            f"the first is {first.source} with {len(first.tokens)}"
        )
        if not kept:
            raise ValueError(about)
        print(f"left out: {about}", flush=True)
    return kept


#: (prompts, parameters, number of the first row that is missing) -> (row, output ids) as they finish.
Generate = Callable[[Sequence[Prompt], Sequence[SamplingParams], int], Iterator[tuple[int, list[int]]]]


def _engine(target: Path, how: Answers, longest: int, tokenizer: bool) -> Generate:
    from jaxspec.assemble import build_engine

    batch = how.batch or (_CPU_BATCH if jax.default_backend() == "cpu" else _BATCH)
    config = EngineConfig(
        max_batch_size=batch, batch_buckets=(batch,), max_seq_len=longest, enable_prefix_caching=False,
        variants=("sampled",) if any(how.temperatures) else ("greedy",), skip_tokenizer_init=not tokenizer,
    )  # fmt: skip
    policy = SpeculationConfig(policy=OFF) if how.drafter == NONE else SpeculationConfig()
    engine = build_engine(target, how.drafter, policy, config)

    def generate(
        prompts: Sequence[Prompt], params: Sequence[SamplingParams], start: int
    ) -> Iterator[tuple[int, list[int]]]:
        rows: dict[str, int] = {}
        coming = iter(range(start, len(prompts)))
        while True:
            while len(rows) < 2 * batch and (index := next(coming, None)) is not None:
                rows[engine.add(prompts[index].tokens, params[index])] = index
            if not rows:
                return
            for event in engine.step():
                if not isinstance(event, Finished):
                    continue
                index = rows.pop(event.request_id)
                if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    error = event.output.outputs[0].error
                    raise ValueError(f"{prompts[index].source}: the target could not answer: {error}")
                yield index, event.output.token_ids

    return generate


class _Progress:
    """Prints where the run is, now and then."""

    def __init__(self, done: int, total: int):
        self._total, self._tokens = total, 0
        self._began = self._said = time.monotonic()
        if done:
            print(f"going on after {done:,} of {total:,} rows", flush=True)

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return self._tokens / max(1e-9, time.monotonic() - self._began)

    def __call__(self, done: int, tokens: int) -> None:
        self._tokens += tokens
        if time.monotonic() - self._said >= _PROGRESS:
            self._said = time.monotonic()
            print(f"row {done:,} of {self._total:,}: {self.rate:,.0f} tokens/s", flush=True)


def _append(f: Any, line: bytes, path: Path) -> None:
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[f.write(rest) :]
    except OSError as e:
        raise OSError(e.errno, f"{e.strerror}; run the command again to go on", str(path)) from e


def _resume(out: Path, record: dict[str, Any], prompts: Sequence[Prompt]) -> int:
    """How many rows `out` holds; a row that was cut off is removed. Writes the record of a new file.

    Raises:
      ValueError: `out` was made of something else.
    """
    beside = out.with_name(out.name + ".made_of.json")
    if not beside.exists():
        if out.exists():
            raise ValueError(f"{out} exists, but {beside.name}, which says what it was made of, does not")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = beside.with_name(beside.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(beside)
    before = read_json(beside)
    for key in record:
        if before.get(key) != record[key]:
            raise ValueError(f"{out} was made with {key} {before.get(key)!r}, got {record[key]!r}")
    if not out.exists():
        return 0
    with out.open("rb+") as f:
        _cut_off(f)
    rows = 0
    for line in read_rows([out]) if out.stat().st_size else ():
        if rows == len(prompts) or line.row.get("prompt_token_ids") != prompts[rows].tokens:
            raise ValueError(f"{line.source}: this row does not answer prompt {rows + 1} of the data")
        rows += 1
    return rows


def _cut_off(f: BinaryIO) -> None:
    """Removes what follows the last line's end."""
    end = f.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        f.seek(start)
        newline = f.read(end - start).rfind(b"\n")
        if newline >= 0:
            f.truncate(start + newline + 1)
            return
        end = start
    f.truncate(0)


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fingerprint(target: Path) -> str:
    """Tells targets apart by their configuration and by the beginnings, ends and sizes of their weights."""
    found = hashlib.sha256((target / "config.json").read_bytes())
    for path in sorted(target.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as f:
            found.update(f.read(2**20))
            f.seek(max(0, size - 2**20))
            found.update(f.read())
    return found.hexdigest()
