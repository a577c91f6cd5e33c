"""python -m jaxspec.bench.studies.overheads: what it costs to be able to speculate, and to have room, on this machine.

Two questions, each a ratio within one run: what plain rounds cost in an engine that could speculate, against one that
cannot; how a round's cost grows with the tokens in use and with the longest context that the engine allows.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline.prompts import CODE
from jaxspec.bench.studies import report
from jaxspec.llm import LLM
from jaxspec.request import SamplingParams
from jaxspec.tier import PLAIN


def build(model: str, max_seq_len: int, depth: int) -> LLM:
    """A batch-1 engine for greedy requests; depth 0 builds it without speculation."""
    speculation = {"policy": "off"} if depth == 0 else {"candidate_steps": (0, depth)}
    return LLM(
        model, None, speculation, max_batch_size=1, max_seq_len=max_seq_len, variants=("greedy",), warmup="eager",
        enable_prefix_caching=False, progress=False,
    )  # fmt: skip


def decode(llm: LLM, prompt: Sequence[int], tokens: int) -> tuple[float, int]:
    """(seconds, tokens) of the rounds of one request: from its first token to its last."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    metrics = llm.generate(list(prompt), params, use_tqdm=False)[0].metrics
    assert metrics.tpot is not None
    return metrics.tpot * (metrics.output_tokens - 1), metrics.output_tokens - 1


def paired(engines: dict[str, LLM], prompts: Sequence[Sequence[int]], tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds a plain round, median over interleaved requests."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for llm in engines.values():
        llm.use_policy(StaticPolicy(PLAIN))
        decode(llm, prompts[0], tokens)
    for repeat in range(repeats):
        for prompt in prompts:
            names = list(engines) if repeat % 2 else list(reversed(engines))
            for name in names:
                seconds, rounds = decode(engines[name], prompt, tokens)
                times[name].append(1e3 * seconds / rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    p = report.parser("overheads", __doc__)
    p.add_argument("--model", default="demo", help='"demo", a Hugging Face directory or a hub id')
    p.add_argument("--tokens", type=int, default=96, help="of each answer")
    p.add_argument("--repeats", type=int, default=5, help="medians are taken over these, interleaved")
    p.add_argument("--depth", type=int, default=4, help="drafts of a chain of the engine that can speculate")
    args = report.parse(p, argv)

    able = build(args.model, 512, args.depth)
    prompts = [able.tokenizer.encode(text) for text in CODE[:6]]
    result: dict[str, Any] = {}
    plain = build(args.model, 512, 0)
    cost = result["plain round, ms"] = paired(
        {"speculative engine": able, "plain engine": plain}, prompts, args.tokens, args.repeats
    )
    ratio = cost["speculative engine"] / cost["plain engine"]
    print(f"tier 0 against an engine without speculation: {ratio:.3f} times ({cost['plain engine']:.3f} ms a round)")

    long = build(args.model, 2048, 0)
    text = [token for prompt in prompts * 20 for token in prompt]
    sized = {f"{n} tokens in use": text[:n] for n in (64, 256, 1024)}
    for name, prompt in sized.items():
        engines = (
            {"max_seq_len 2048": long} if len(prompt) > 400 else {"max_seq_len 512": plain, "max_seq_len 2048": long}
        )
        row = result[name] = paired(engines, [prompt], 64, args.repeats)
        print(f"{name:20s} " + ", ".join(f"{key}: {value:.3f} ms a round" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
