"""python -m jaxspec.batch prompts.jsonl --out texts.jsonl: completes every row of a file, here or on a Ray cluster.

A row has `prompt` (a text), `prompt_token_ids` or `messages`, and may have an `id` and fields of SamplingParams; the
command's flags are for what is missing. Answers come in the order of the rows, each once; a run that was
interrupted goes on when it is called again. What cannot be honoured is refused before a model is loaded, by file and
line.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import cli

with cli.starting(__name__):
    import numpy as np

    from jaxspec import clusters
    from jaxspec.checkpointing import hf
    from jaxspec.drafters import registry
    from jaxspec.names import Advice, hints
    from jaxspec.prompts import text_and_ids
    from jaxspec.request import SAMPLING_ELSEWHERE, SAMPLING_FLAGS, SamplingParams
    from jaxspec.resolve import resolve_drafter, resolve_model
    from jaxspec.rowfile import RowFile, digest, fingerprint
    from jaxspec.text.tokenizer import Tokenizer
    from jaxspec.train.data.jsonl import Line, named, read_rows
    from jaxspec.writer import Asked, WriterConfig, write

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
#: Fields that a row may have; an answer is one completion, and holds no log-probabilities.
_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("n", "logprobs"))
#: Those that flags are for.
_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_FILES = Advice("leave the flag out, files of prompts are given as they are")
#: What other projects call these flags.
_ELSEWHERE = {
    **SAMPLING_FLAGS, "input_file": _FILES, "data": _FILES, "-i": _FILES, "output_file": "out", "-o": "out",
    "max_model_len": "context", "max_num_seqs": "batch",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.batch", description=(__doc__ or "").splitlines()[0], formatter_class=cli.Help
    )
    rows = "rows with prompt, prompt_token_ids or messages; they may have an id and fields of SamplingParams"
    p.add_argument("data", type=Path, nargs="+", help=f"JSONL files, .gz too, of {rows}")
    p.add_argument("--out", type=Path, required=True, help="the .jsonl to write, or to go on with")
    p.add_argument(
        "--model", default="demo", help="'demo', a Hugging Face directory or a hub id, the same on all machines"
    )
    p.add_argument("--drafter", help=f"{', '.join(registry.names())}, a directory or a hub id (default: an EAGLE-3 "
                   "head beside the model where there is one, else ngram)")  # fmt: skip
    p.add_argument("--batch", type=int, metavar="N", help="rows written together (default: 16 on a CPU, else 128)")
    p.add_argument("--context", type=int, default=2048, metavar="N", help="longest prompt and text together")
    sampling = p.add_argument_group("sampling, where a row does not say").add_argument
    sampling("--max-tokens", type=int, default=256, metavar="N", help="most tokens to write")
    sampling("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    sampling("--top-p", type=float, default=1.0, metavar="P", help="mass of the tokens kept; 1 keeps all")
    sampling("--top-k", type=int, default=0, metavar="K", help="likeliest tokens kept; 0 keeps all")
    sampling("--seed", type=int, default=0, metavar="N", help="of a row's own seed, with the row's number")
    clusters.add_arguments(p)
    return p


@dataclasses.dataclass(frozen=True)
class Row:
    """A row, understood."""

    asked: Asked
    id: Any = None


def understood(
    line: Line, number: int, tokenizer: Tokenizer | None, args: argparse.Namespace, context: int, vocab_size: int
) -> Row:  # fmt: skip
    """What a row asks for.

    Raises:
      ValueError: what cannot be honoured, without file and line.
    """
    row = {key: value for key, value in line.row.items() if value is not None}
    if unknown := sorted(set(row) - {*_PROMPTS, *_PARAMS, "id", "dataset"}):
        known = [*_PROMPTS, "id", *_PARAMS]
        here = {name: own for name, own in SAMPLING_ELSEWHERE.items() if own in known or isinstance(own, Advice)}
        raise ValueError(f"a row may have {known}, got {unknown}{hints(unknown, known, here)}")
    if "messages" in row:
        if given := sorted({"prompt", "prompt_token_ids"} & set(row)):
            raise ValueError(f"a row must have one of {list(_PROMPTS)}, got 'messages' and {given}")
        text, ids = _needed(tokenizer).apply_chat_template(row["messages"]), None
    else:
        text, ids = text_and_ids({key: row[key] for key in _PROMPTS if key in row}, number)
    if ids is None:
        assert text is not None
        ids = _needed(tokenizer).encode(text, add_special_tokens="messages" not in row)
    own: dict[str, Any] = {"seed": int(np.random.default_rng((args.seed, number)).integers(2**32))}
    own |= {name: getattr(args, name) for name in _FLAGS if name != "seed"}
    own |= {name: row[name] for name in _PARAMS if name in row}
    if isinstance(bias := own.get("logit_bias"), dict):  # JSON has no other keys than strings
        own["logit_bias"] = {int(token): value for token, value in bias.items()}
    params = SamplingParams(**own)
    if params.stop and tokenizer is None:
        raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and this checkpoint has none")
    params.check_vocabulary(vocab_size)
    if not ids:
        raise ValueError("a prompt must hold at least 1 token, got an empty one")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"prompt token ids must lie in [0, {vocab_size}), got {token!r}")
    room = context - (params.max_tokens or 1)
    if len(ids) > room:
        raise ValueError(
            f"a prompt must leave room for its text in a context of {context} tokens: at most {room}, got {len(ids)}"
        )
    return Row(Asked(list(ids), params), row.get("id"))


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer: prompts must be prompt_token_ids")
    return tokenizer


def run(args: argparse.Namespace) -> Path:
    """Writes the file and returns it.

    Raises:
      ValueError: rows or options that cannot be honoured, an `out` made of something else, or what the engine refuses.
      OSError: the disk is full or fails; what was written stays and can be gone on with.
    """
    cluster = clusters.of(args)
    model = resolve_model(args.model)
    resolve_drafter(args.drafter, model)
    for name in ("batch", "context"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    tokenizer = Tokenizer.from_directory(model) if Tokenizer.is_in(model) else None
    config = hf.load_config(model)
    context = min(config.max_position_embeddings, args.context)
    lines: list[Row] = []
    for number, line in enumerate(read_rows(args.data)):
        with named(line.source):
            lines.append(understood(line, number, tokenizer, args, context, config.vocab_size))
    made_of = {
        "model": fingerprint(model), "data": [[path.name, digest(path)] for path in args.data],
        "drafter": args.drafter, "context": context, **{name: getattr(args, name) for name in _FLAGS},
    }  # fmt: skip
    file = RowFile(args.out, made_of)
    done = file.count(
        lambda path: (line.row for line in read_rows([path])),
        lambda i, row: i < len(lines) and row.get("prompt_token_ids") == lines[i].asked.tokens,
    )
    if done == len(lines):
        print(f"{args.out}: all {done:,} rows are there")
        return args.out
    longest = max(len(row.asked.tokens) + (row.asked.params.max_tokens or context) for row in lines)
    sampled = not all(row.asked.params.plain_greedy for row in lines)
    how = WriterConfig(model, args.drafter, min(longest, context), sampled, tokenizer is not None, args.batch)
    start, waiting = done, {}
    with file:
        for number, written in write(how, [row.asked for row in lines[start:]], cluster):
            row = lines[start + number]
            answer = {
                "prompt_token_ids": row.asked.tokens, "output_token_ids": written.token_ids, "text": written.text,
                "finish_reason": str(written.reason.value), "temperature": row.asked.params.temperature,
            }  # fmt: skip
            answer |= {} if row.id is None else {"id": row.id}
            waiting[start + number] = answer | ({} if written.error is None else {"error": written.error})
            while done in waiting:
                file.append(waiting.pop(done))
                done += 1
    print(f"{args.out}: {done:,} rows")
    return args.out


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(cli.parse(parser(), argv, _ELSEWHERE))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    cli.run(main)
