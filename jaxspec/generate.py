"""python -m jaxspec.generate "prompt": streams a completion; --chat talks; --demo compares with plain decoding.

Whatever can be refused is refused before a model is loaded or compiled, and before the first of several prompts runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import cli

with cli.starting(__name__):
    from tqdm import tqdm

    from jaxspec.adaptive import registry as policies
    from jaxspec.adaptive.static import StaticPolicy
    from jaxspec.chat import Chat, still_compiling
    from jaxspec.checkpointing import hf
    from jaxspec.choosing import check_choice
    from jaxspec.config import (
        DRAFT_QUANTIZATIONS,
        ENGINE_ELSEWHERE,
        SHORT_FLAGS,
        SPECULATION_FLAGS,
        VERIFICATIONS,
        EngineConfig,
        SpeculationConfig,
    )
    from jaxspec.config.engine import WARMUPS
    from jaxspec.drafters import registry
    from jaxspec.events import Delta, Finished
    from jaxspec.fitting import longest_text
    from jaxspec.llm import LLM
    from jaxspec.names import DTYPES, Advice
    from jaxspec.request import SAMPLING_FLAGS, RequestOutput, SamplingParams
    from jaxspec.resolve import resolve_drafter, resolve_model
    from jaxspec.runtime.sharding import check_devices
    from jaxspec.text.grammar import GrammarCompiler, GrammarSpec
    from jaxspec.text.tokenizer import Tokenizer
    from jaxspec.tier import PLAIN
# None ends in a space or a line break: a text's next token begins with it.
DEMO_PROMPTS = (
    "def __init__(self, name, value):",
    "class Queue:\n    def __init__(self, maxsize=0):",
    "import os\nimport sys\n\ndef main(argv=None):",
    "In the beginning God created",
    "Then the king said to his servants,",
)
_PROMPT = Advice("leave the flag out, prompts are given as they are")
#: What other projects call these flags.
ELSEWHERE = {
    **ENGINE_ELSEWHERE, **SPECULATION_FLAGS, **SAMPLING_FLAGS, **SHORT_FLAGS, "prompt": _PROMPT, "-p": _PROMPT,
    "-n": "max_tokens", "stream": Advice("leave it out, texts are streamed as they come"),
    "interactive": "chat", "-i": "chat", "-cnv": "chat",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.generate", description=(__doc__ or "").splitlines()[0], formatter_class=cli.Help
    )
    p.add_argument("prompt", nargs="*", help="one or more prompts; - reads one from standard input")
    p.add_argument("--demo", action="store_true", help="the demo's prompts, with and without speculation")
    p.add_argument("--chat", action="store_true", help="a conversation, a line a turn; /reset and /exit")
    p.add_argument("--model", default="demo", help="'demo', a Hugging Face directory or a hub id")
    p.add_argument("--max-seq-len", type=int, metavar="N",
        help="longest prompt plus output in tokens (default: the model's context, at most 2048)")  # fmt: skip
    p.add_argument("--dtype", type=cli.dtype, choices=DTYPES,
        help="of weights and activations (default: float32 on CPUs, else bfloat16)")  # fmt: skip
    p.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share every layer")
    p.add_argument("--warmup", choices=WARMUPS, default=WARMUPS[0],
        help="eager compiles everything first; background writes meanwhile, at first without drafts")  # fmt: skip
    p.add_argument("--quiet", action="store_true", help="the completion only")
    _add_speculation(p)
    _add_sampling(p)
    shape = p.add_argument_group("structured output").add_mutually_exclusive_group()
    add = shape.add_argument
    add("--json-schema", help="what the text has to be: a JSON schema, or the file that holds one (default: anything)")
    add("--regex", help="what the text has to match (default: anything goes)")
    add("--choice", action="append", help="one of what the text has to be; repeat it (default: anything)")
    return p


def _add_speculation(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("speculation").add_argument
    add("--drafter", help=f"{', '.join(registry.names())}, a directory or a hub id (default: an EAGLE-3 head "
        "beside the model where there is one, else ngram)")  # fmt: skip
    add("--policy", help=f"{', '.join(policies.names())}, or the path of an SGLang-style JSON (default: "
        f"{policies.FIXED} with --depth, else {policies.DEFAULT})")  # fmt: skip
    add("--candidate-steps", type=depths, metavar="0,2,4",
        help="depths that the adaptive policy chooses among (default: by the device and the drafter)")  # fmt: skip
    add("--depth", type=int, metavar="N", help="draft tokens of a static tier (default: none, the policy chooses)")
    add("--topk", type=int, default=1, metavar="N", help="candidates a node: 1 drafts chains, more drafts trees")
    add("--num-nodes", type=int, metavar="N", help="nodes of a tree, root included (default: 2 * topk)")
    add("--draft-quantization", choices=DRAFT_QUANTIZATIONS, default="auto", help="round the drafter's weights when "
        "they are loaded; changes no text, but for rejection and typical verification (default: auto, int8 on a Hopper "
        "GPU with kernels for it)")  # fmt: skip
    add("--verification", choices=VERIFICATIONS, default="coupled", help="how drafts are accepted; typical is lossy")


def _add_sampling(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=128, metavar="N", help="most tokens to write; the context may end it before")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    add("--top-p", type=float, default=1.0, metavar="P", help="mass of the tokens kept; 1 keeps all")
    add("--top-k", type=int, default=0, metavar="K", help="likeliest tokens kept; 0 keeps all")
    add("--min-p", type=float, default=0.0, metavar="P", help="least probability kept, relative to the likeliest's")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="over prompt and output; 1 is none")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same text")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the model's end of sequence")


def depths(text: str) -> tuple[int, ...]:
    """Depths from "0,2,4"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers separated by commas, got {text!r}") from None


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


@dataclasses.dataclass(frozen=True)
class Job:
    """What a command line asks for, checked.

    Attributes:
      prompts: texts.
      params: how they are sampled.
      grammar: what the texts have to be; None: anything.
      context: tokens of the longest prompt plus output.
      engine: fields of EngineConfig.
    """

    prompts: list[str]
    params: SamplingParams
    grammar: GrammarSpec | None
    speculation: SpeculationConfig
    context: int
    engine: dict[str, Any]


def check(args: argparse.Namespace) -> Job:
    """What the arguments ask for, by the tokenizer and the configurations alone: no weight is read, nothing compiled.

    Raises:
      ValueError: names what cannot be honoured.
    """
    grammar = grammar_of(args)
    if grammar is not None and args.demo:
        raise ValueError("--demo compares free texts, got a grammar beside it")
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, seed=args.seed,
        max_tokens=args.max_tokens, stop=args.stop, repetition_penalty=args.repetition_penalty,
        ignore_eos=args.ignore_eos or args.demo,
    )  # fmt: skip
    speculation = SpeculationConfig(
        policy=args.policy, depth=args.depth, topk=args.topk, num_nodes=args.num_nodes,
        candidate_steps=args.candidate_steps, verification=args.verification,
        draft_quantization=args.draft_quantization,
    )  # fmt: skip
    directory = resolve_model(args.model)
    drafter = registry.find(resolve_drafter(args.drafter, directory)[0])
    engine: dict[str, Any] = dict(
        max_batch_size=1, max_seq_len=args.max_seq_len, dtype=args.dtype, tensor_parallel=args.tensor_parallel,
        warmup=args.warmup, keep_learnt=True,
    )  # fmt: skip
    config = EngineConfig(**engine)
    check_devices()
    check_choice(drafter, speculation, config)
    model, tokenizer = hf.load_config(directory), Tokenizer.from_directory(directory)
    context = longest_text(config, model.max_position_embeddings)
    if grammar is not None:
        eos = sorted({*model.eos_token_ids, *tokenizer.eos_token_ids})
        GrammarCompiler(tokenizer, model.vocab_size, eos).compile(grammar)
    if args.chat:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    texts = list(DEMO_PROMPTS) if args.demo else [sys.stdin.read() if text == "-" else text for text in args.prompt]
    for text in texts:
        _check_fits(text, tokenizer, context)
    return Job(texts, params, grammar, speculation, context, engine)


def _check_fits(prompt: str, tokenizer: Tokenizer, context: int) -> None:
    if not prompt:
        raise ValueError("a prompt must hold at least 1 token, got an empty text")
    count = len(tokenizer.encode(prompt))
    if count >= context:
        shown = repr(prompt if len(prompt) <= 40 else f"{prompt[:40]}...")
        raise ValueError(f"a prompt must be shorter than the context of {context} tokens, got {count} tokens: {shown}")


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
        f"executables, {stats.compilations_after_warmup} compilations after that"
    )
    return 0 if same else 1


def keep(llm: LLM, *, quiet: bool) -> None:
    """Ends an LLM so that the next run starts with what this one has found out, and drafts from its first token on."""
    if llm.compiling and not quiet:
        print("finishing what is being compiled, for the next run; Ctrl-C leaves at once", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        llm.finish_warmup()
    llm.close()


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = cli.parse(p, argv, ELSEWHERE)
    if bool(args.prompt) + args.demo + args.chat != 1:
        p.error("give one of: prompts, --demo, --chat")
    try:
        with cli.quick_interrupts():
            job = check(args)
            llm = LLM(
                args.model, args.drafter, job.speculation, **job.engine, progress=not args.quiet,
                structured_output=job.grammar is not None,
            )  # fmt: skip
        if args.demo:
            return demo(llm, job.params)
        if args.chat:
            status = Chat(llm, job.params, job.context, grammar=job.grammar, quiet=args.quiet).run()
            keep(llm, quiet=args.quiet)
            return status
        for prompt in job.prompts:
            output, seconds = stream_one(llm, prompt, job.params, echo=not args.quiet, grammar=job.grammar)
            print()
            if not args.quiet:
                stats = llm.stats
                line = summary([output], seconds)
                if llm.compiling:
                    line += still_compiling(stats.executables_ready, stats.executables)
                    line += " (--warmup eager waits for all)"
                print(line, file=sys.stderr)
        keep(llm, quiet=args.quiet)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    cli.run(main, at_once=True)
