"""`python -m jaxspec.train regenerate`: the target answers prompts, and its drafters learn from its answers.

Answers are those of `writer`: a row does not depend on the rows beside it, and a killed run continues as if nothing had
happened. With --ray the workers of a cluster answer. Must not know trainees; the engine is imported where it is built,
since training works without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import clusters
from jaxspec.checkpointing import hf
from jaxspec.clusters import Cluster
from jaxspec.drafters.registry import NONE
from jaxspec.request import FinishReason, SamplingParams
from jaxspec.rowfile import RowFile, digest, fingerprint
from jaxspec.text import modes
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data.dataset import Prompt, read_prompts
from jaxspec.train.data.jsonl import read_rows
from jaxspec.writer import Asked, WriterConfig, write

#: Seconds between two progress lines.
_PROGRESS = 10.0


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    p.add_argument(
        "--target", type=Path, required=True, help='"demo", a Hugging Face directory or a hub id, with a tokenizer'
    )
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
    p.add_argument("--batch", type=int, help="rows decoded together (default: 128, on a CPU 16)")
    p.add_argument("--limit", type=int, help="the first so many rows only (default: all)")
    p.add_argument("--seed", type=int, default=0, help="same seed, same answers")
    p.add_argument("--chat-template-kwargs", type=modes.parse, metavar="JSON", help="of chats: '{\"enable_thinking\": "
                   "false}' (default: as the template does where nobody says)")  # fmt: skip
    clusters.add_arguments(p)


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
      chat_template_kwargs: of chats; each row says what it had.

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
    chat_template_kwargs: Mapping[str, Any] | None = None

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
    return regenerate(args.target, args.data, args.out, how, clusters.of(args))


def regenerate(
    target: Path, data: Sequence[Path], out: Path, how: Answers = Answers(), cluster: Cluster | None = None
) -> Path:
    """Writes the target's answer to every prompt of `data`, a row of token ids each, in the order of the prompts.

    A row is {"prompt_token_ids", "output_token_ids", "temperature", "dataset"}, and of a chat "chat_template_kwargs";
    read_examples reads it. Beside `out` lies a file with what it was made of. A run that was interrupted goes on when
    it is called again; a finished one returns at once. Prompts that leave no room for max_tokens in the context are
    left out and counted.

    Args:
      cluster: whose workers answer, to the same file; None: this process.

    Returns:
      `out`.

    Raises:
      ValueError: bad data; an `out` made of something else, with both values.
      OSError: the disk is full or fails, naming the file; what was written stays and can be gone on with.
    """
    tokenizer = Tokenizer.from_directory(target) if Tokenizer.is_in(target) else None
    config = hf.load_config(target)
    prompts = read_prompts(
        data, tokenizer, prompt_tokens=how.prompt_tokens, seed=how.seed, vocab_size=config.vocab_size,
        chat_template_kwargs=how.chat_template_kwargs,
    )  # fmt: skip
    how = dataclasses.replace(how, context=min(config.max_position_embeddings, how.context))
    room = f"context {how.context} - max_tokens {how.max_tokens}"
    prompts = _fitting(prompts, how.context - how.max_tokens, room)[: how.limit]
    record = {
        "target": fingerprint(target), "data": [[path.name, digest(path)] for path in map(Path, data)],
        "prompt_tokens": list(how.prompt_tokens), "max_tokens": how.max_tokens, "context": how.context,
        "temperatures": [float(t) for t in how.temperatures], "drafter": how.drafter, "limit": how.limit,
        "seed": how.seed,
        **({"chat_template_kwargs": dict(how.chat_template_kwargs)} if how.chat_template_kwargs else {}),
    }  # fmt: skip
    rows = RowFile(out, record)
    done = rows.count(
        lambda path: (line.row for line in read_rows([path])),
        lambda i, row: i < len(prompts) and row.get("prompt_token_ids") == prompts[i].tokens,
    )
    if done == len(prompts):
        print(f"{out}: all {done:,} rows are there", flush=True)
        return out
    longest = max(len(prompt.tokens) for prompt in prompts) + how.max_tokens
    how_written = WriterConfig(target, how.drafter, longest, any(how.temperatures), tokenizer is not None, how.batch)
    params = [how.params(i) for i in range(len(prompts))]
    start, progress = done, _Progress(done, len(prompts))
    texts = [Asked(prompts[i].tokens, params[i]) for i in range(start, len(prompts))]
    with rows:
        waiting: dict[int, dict[str, Any]] = {}
        for number, written in write(how_written, texts, cluster):
            index = start + number
            if written.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise ValueError(f"{prompts[index].source}: the target could not answer: {written.error}")
            waiting[index] = {
                "prompt_token_ids": prompts[index].tokens, "output_token_ids": written.token_ids,
                "temperature": params[index].temperature, "dataset": prompts[index].dataset,
                **({} if prompts[index].chat is None else {"chat_template_kwargs": prompts[index].chat}),
            }  # fmt: skip
            while done in waiting:
                rows.append(waiting.pop(done))
                done += 1
            progress(done, len(written.token_ids))
    print(f"{out}: {done:,} rows, {progress.rate:,.0f} tokens/s", flush=True)
    return out


def answer(
    target: Path, data: Sequence[Path], out: Path, *, length: int, seed: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Path]:  # fmt: skip
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
            Answers(
                (min(16, longest), longest), max_tokens=min(512, length // 2), context=length, seed=seed,
                chat_template_kwargs=chat_template_kwargs,
            ),
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
