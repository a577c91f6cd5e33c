"""python -m jaxspec.generate "prompt": streams a completion; --demo compares with plain decoding."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from jaxspec.adaptive import registry as policies
from jaxspec.adaptive.static import StaticPolicy
from jaxspec.config import VERIFICATIONS
from jaxspec.drafters import registry
from jaxspec.events import Delta, Finished
from jaxspec.llm import LLM
from jaxspec.request import RequestOutput, SamplingParams
from jaxspec.text.grammar import GrammarSpec
from jaxspec.tier import PLAIN

# None ends in a space or a line break: a text's next token begins with it.
DEMO_PROMPTS = (
    "def __init__(self, name, value):",
    "class Queue:\n    def __init__(self, maxsize=0):",
    "import os\nimport sys\n\ndef main(argv=None):",
    "In the beginning God created",
    "Then the king said to his servants,",
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m jaxspec.generate", description=__doc__)
    p.add_argument("prompt", nargs="*", help="one or more prompts; - reads one from standard input")
    p.add_argument("--demo", action="store_true", help="the demo's prompts, with and without speculation")
    p.add_argument("--model", default="demo", help="'demo' or a Hugging Face directory")
    p.add_argument("--drafter", help=f"{', '.join(registry.names())}, or a directory")
    p.add_argument("--policy", help=f"{', '.join(policies.names())}, or the path of an SGLang-style JSON")
    p.add_argument("--depth", type=int, help="draft tokens of a static tier")
    p.add_argument("--topk", type=int, default=1)
    p.add_argument("--num-nodes", type=int)
    p.add_argument("--verification", choices=VERIFICATIONS, default="coupled")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--repetition-penalty", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--stop", action="append", default=[])
    p.add_argument("--ignore-eos", action="store_true")
    shape = p.add_mutually_exclusive_group()
    shape.add_argument("--json-schema", help="what the text has to be: a JSON schema, or the file that holds one")
    shape.add_argument("--regex", help="what the text has to match")
    shape.add_argument("--choice", action="append", help="one of what the text has to be; give it once for each")
    p.add_argument("--max-seq-len", type=int)
    p.add_argument("--quiet", action="store_true", help="the completion only")
    return p


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Tokens a second, accepted length and the tiers that ran, on one line."""
    tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    rounds = sum(o.metrics.rounds for o in outputs)
    accepted = sum(o.metrics.accepted for o in outputs)
    tiers: Counter[str] = Counter()
    for o in outputs:
        tiers.update(o.metrics.tier_rounds)
    line = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    if rounds:
        line += f", {(accepted + rounds) / rounds:.2f} tokens a round"
    shown = ", ".join(f"{name} {count}" for name, count in sorted(tiers.items(), key=lambda item: -item[1]))
    return f"{line}; rounds by tier: {shown or 'none'}"


def grammar_of(args: argparse.Namespace) -> GrammarSpec | None:
    """What the arguments say that the text has to be.

    Raises:
      ValueError: a schema that is neither JSON nor a file that can be read, or too large a grammar.
    """
    if args.regex is not None:
        return GrammarSpec("regex", args.regex)
    if args.choice is not None:
        return GrammarSpec("choice", tuple(args.choice))
    if args.json_schema is None:
        return None
    text: str = args.json_schema
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as e:
            raise ValueError(f"--json-schema must be a JSON object or a file, got {text!r}: {e}") from e
    return GrammarSpec("json_schema", text)


def stream_one(
    llm: LLM, prompt: str, params: SamplingParams, *, echo: bool = True, grammar: GrammarSpec | None = None
) -> tuple[RequestOutput, float]:
    """Streams one completion to standard output; returns it with its wall seconds.

    Args:
      echo: the prompt before it.
    """
    if echo:
        print(f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt, end="", flush=True)
    began = time.perf_counter()
    final: RequestOutput | None = None
    for _, event in llm.stream(prompt, params, grammar=grammar):
        match event:
            case Delta():
                print(event.text, end="", flush=True)
            case Finished():
                final = event.output
    assert final is not None
    return final, time.perf_counter() - began


def run_all(llm: LLM, params: SamplingParams) -> tuple[list[RequestOutput], float]:
    """The demo's prompts one after the other, unseen, with their wall seconds."""
    began = time.perf_counter()
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in DEMO_PROMPTS]
    return outputs, time.perf_counter() - began


def demo(llm: LLM, params: SamplingParams) -> int:
    """Streams the demo's prompts while executables still come, then times them with and without speculation."""
    streamed: list[RequestOutput] = []
    for prompt in DEMO_PROMPTS:
        streamed.append(stream_one(llm, prompt, params)[0])
        print("\n" + "-" * 80, flush=True)
    with tqdm(total=llm.stats.executables, desc="compiling the rest, to compare", leave=False) as bar:
        while not llm.warm:
            bar.update(llm.stats.executables_ready - bar.n)
            time.sleep(0.1)
    # A pass in front, so that the policy has seen these texts, as it has after a minute of any use.
    run_all(llm, params)
    fast, fast_seconds = run_all(llm, params)
    llm.use_policy(StaticPolicy(PLAIN))
    plain, plain_seconds = run_all(llm, params)
    texts = [[output.token_ids for output in outputs] for outputs in (streamed, fast, plain)]
    same = texts[0] == texts[1] == texts[2]
    print(f"with speculation     {summary(fast, fast_seconds)}")
    print(f"without speculation  {summary(plain, plain_seconds)}")
    stats = llm.stats
    print(
        f"speed-up {plain_seconds / fast_seconds:.2f}x; the tokens are {'the same' if same else 'NOT the same'}; "
        f"ready after {stats.startup_seconds:.1f} s, warm after {stats.warmup_seconds:.1f} s with {stats.executables} "
        f"executables, {stats.compilations_after_warmup} compilations beside"
    )
    return 0 if same else 1


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    if not args.prompt and not args.demo:
        p.error("give a prompt, or --demo")
    speculation = {
        "policy": args.policy, "depth": args.depth, "topk": args.topk, "num_nodes": args.num_nodes,
        "verification": args.verification,
    }  # fmt: skip
    try:
        grammar = grammar_of(args)
        if grammar is not None and args.demo:
            raise ValueError("--demo compares free texts, got a grammar beside it")
        params = SamplingParams(
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, seed=args.seed,
            max_tokens=args.max_tokens, stop=args.stop, repetition_penalty=args.repetition_penalty,
            ignore_eos=args.ignore_eos or args.demo,
        )  # fmt: skip
        llm = LLM(
            args.model,
            args.drafter,
            speculation,
            max_batch_size=1,
            max_seq_len=args.max_seq_len,
            progress=not args.quiet,
            structured_output=grammar is not None,
        )
        if args.demo:
            return demo(llm, params)
        for prompt in args.prompt:
            text = sys.stdin.read() if prompt == "-" else prompt
            output, seconds = stream_one(llm, text, params, echo=not args.quiet, grammar=grammar)
            print()
            if not args.quiet:
                print(summary([output], seconds), file=sys.stderr)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def leave(code: int) -> None:
    """Ends the process, at once where executables are still being compiled: nobody waits for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name.startswith("warm-up") for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    leave(status)
