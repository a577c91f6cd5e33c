"""python -m jaxspec.bench.studies.peers: this engine, transformers and a compiled torch loop on the same weights.

Owns the comparison only, in one run: greedy decoding at batch 1, float32, the same prompt tokens, a fixed
number of new tokens, end of text ignored, every engine warmed up, repeats interleaved.
Needs `pip install -e '.[parity]'`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.adaptive.static import StaticPolicy
from jaxspec.bench.offline.prompts import CODE, PROSE
from jaxspec.bench.studies import report
from jaxspec.llm import LLM
from jaxspec.request import SamplingParams
from jaxspec.resolve import resolve_drafter, resolve_model
from jaxspec.tier import PLAIN, Tier

#: (prompt token ids) -> new token ids.
Runner = Callable[[Sequence[int]], list[int]]


def jaxspec_runner(llm: LLM, policy: Callable[[], Any], new_tokens: int) -> Runner:
    """This engine under a policy."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)

    def run(prompt: Sequence[int]) -> list[int]:
        llm.use_policy(policy())
        return llm.generate(list(prompt), params, use_tqdm=False)[0].token_ids

    return run


def transformers_runner(model: Any, new_tokens: int, assistant: Any = None, draft_tokens: int = 0) -> Runner:
    """transformers' generate; with an assistant, its assisted generation.

    Args:
      draft_tokens: drafted every round; 0 leaves transformers' defaults (20, a confidence threshold, its schedule).
    """
    import torch  # pyright: ignore[reportMissingImports]

    extra: dict[str, Any] = {}
    if assistant is not None:
        extra["assistant_model"] = assistant

    def run(prompt: Sequence[int]) -> list[int]:
        if assistant is not None:
            # transformers keeps its schedule's state in the assistant's configuration: set it anew for each prompt.
            own = type(assistant.generation_config)(pad_token_id=0)
            if draft_tokens:
                own.num_assistant_tokens, own.num_assistant_tokens_schedule = draft_tokens, "constant"
                own.assistant_confidence_threshold = 0.0
            assistant.generation_config = own
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **extra,
            )
        return out[0, len(prompt) :].tolist()

    return run


def _fused(layer: Any) -> dict[str, Any]:
    """A transformers Llama layer's weights, those that read the same input as one."""
    import torch  # pyright: ignore[reportMissingImports]

    return {
        "in": layer.input_layernorm.weight,
        "qkv": torch.cat([getattr(layer.self_attn, f"{n}_proj").weight for n in "qkv"]),
        "o": layer.self_attn.o_proj.weight,
        "post": layer.post_attention_layernorm.weight,
        "gate_up": torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
        "down": layer.mlp.down_proj.weight,
    }


def torch_static_runner(model: Any, new_tokens: int, longest: int) -> Runner:
    """Plain decoding with a static cache and a step compiled by inductor, from a transformers Llama's weights."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

    cfg, layers = model.config, [_fused(layer) for layer in model.model.layers]
    heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
    dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // heads
    embedding, norm, head = model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(torch.zeros(1, longest, cfg.hidden_size), torch.arange(longest)[None])
    keys = torch.zeros(len(layers), 1, kv_heads, longest, dim)
    values = torch.zeros_like(keys)

    def rms(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps) * weight

    def rotate(x: Any, at: Any) -> Any:
        lo, hi = x.chunk(2, dim=-1)
        return x * cos[0, at] + torch.cat([-hi, lo], dim=-1) * sin[0, at]

    def forward(ids: Any, at: Any) -> Any:
        n = ids.shape[0]
        x = embedding[ids]
        mask = torch.arange(longest)[None, :] <= at[:, None]
        for i, w in enumerate(layers):
            q, k, v = F.linear(rms(x, w["in"]), w["qkv"]).split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
            q = rotate(q.view(n, heads, dim).transpose(0, 1), at)
            keys[i, 0].index_copy_(1, at, rotate(k.view(n, kv_heads, dim).transpose(0, 1), at))
            values[i, 0].index_copy_(1, at, v.view(n, kv_heads, dim).transpose(0, 1))
            out = F.scaled_dot_product_attention(
                q[None], keys[i], values[i], attn_mask=mask[None, None], enable_gqa=heads != kv_heads
            )
            x = x + F.linear(out[0].transpose(0, 1).reshape(n, -1), w["o"])
            gate, up = F.linear(rms(x, w["post"]), w["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(rms(x[-1:], norm), head).argmax(-1)

    step = torch.compile(forward, fullgraph=True, dynamic=False)

    def run(prompt: Sequence[int]) -> list[int]:
        with torch.inference_mode():
            token = forward(torch.tensor(list(prompt)), torch.arange(len(prompt)))
            out = [int(token)]
            for i in range(new_tokens - 1):
                token = step(token, torch.tensor([len(prompt) + i]))
                out.append(int(token))
        return out

    return run


def compare(
    runners: dict[str, Runner], prompts: Sequence[Sequence[int]], repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:  # fmt: skip
    """Median tokens a second of each runner, end to end, over interleaved repeats; whether all agree on the tokens."""
    reference: dict[int, list[int]] = {}
    differing: dict[str, int] = {}
    for name, run in runners.items():
        for prompt in prompts[:2]:
            run(prompt)
        print(f"warmed up: {name}", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for repeat in range(repeats):
        names = list(runners)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            began = clock()
            outs = [runners[name](prompt) for prompt in prompts]
            seconds[name].append(clock() - began)
            rates[name].append(sum(map(len, outs)) / seconds[name][-1])
            for i, out in enumerate(outs):
                if out != reference.setdefault(i, out):
                    differing[name] = differing.get(name, 0) + 1
    return {
        "tokens_per_second": {name: statistics.median(many) for name, many in rates.items()},
        "seconds": seconds,
        "outputs_that_differ": differing,
    }


def our_runners(model: str, depth: int, new_tokens: int) -> tuple[dict[str, Runner], LLM]:
    """This engine's, with each drafter and policy; and one of the engines."""
    options = {"candidate_steps": tuple(sorted({0, 2, depth, depth + 2}))}
    engine = lambda drafter: LLM(
        model, drafter, options, max_batch_size=1, enable_prefix_caching=False, warmup="eager"
    )  # fmt: skip
    eagle3, draft_model = engine("eagle3"), engine("draft_model")
    runners = {"jaxspec plain": jaxspec_runner(eagle3, lambda: StaticPolicy(PLAIN), new_tokens)}
    for name, llm in (("eagle3", eagle3), ("draft_model", draft_model)):
        static = jaxspec_runner(llm, lambda: StaticPolicy(Tier(depth)), new_tokens)
        runners |= {
            f"jaxspec {name} chain-{depth}": static,
            f"jaxspec {name} adaptive": jaxspec_runner(llm, llm.engine.new_policy, new_tokens),
        }
    return runners, eagle3


def their_runners(directory: Path, depth: int, new_tokens: int, longest: int) -> dict[str, Runner]:
    """torch's and transformers'."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    load = lambda d: transformers.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).eval()
    target, draft = load(directory), load(resolve_drafter("draft_model", directory)[1])
    for model in (target, draft):
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return {
        "torch static cache, compiled": torch_static_runner(target, new_tokens, longest),
        "transformers generate": transformers_runner(target, new_tokens),
        f"transformers assisted, {depth} draft tokens": transformers_runner(target, new_tokens, draft, depth),
        "transformers assisted, its defaults": transformers_runner(target, new_tokens, draft),
    }


def main(argv: Sequence[str] | None = None) -> int:
    p = report.parser("peers", __doc__)
    p.add_argument("--model", default="demo", help='"demo", a Hugging Face directory or a hub id, with a draft model')
    p.add_argument("--new-tokens", type=int, default=128, help="tokens of each answer")
    p.add_argument("--prompts", type=int, default=8, help="prompts of each kind (code, prose)")
    p.add_argument("--repeats", type=int, default=3, help="medians are taken over these, interleaved")
    p.add_argument("--depth", type=int, default=5, help="drafts of a chain; the adaptive policy also has 2, and 2 more")
    args = report.parse(p, argv)

    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        p.exit(2, f"{p.prog}: error: {e}: pip install -e '.[parity]'\n")

    n = args.new_tokens
    runners, llm = our_runners(args.model, args.depth, n)
    prompts = [llm.tokenizer.encode(text) for text in (*CODE[: args.prompts], *PROSE[: args.prompts])]
    runners |= their_runners(resolve_model(args.model), args.depth, n, max(map(len, prompts)) + n + 1)
    result = compare(runners, prompts, args.repeats)
    base = result["tokens_per_second"]["jaxspec plain"]
    print(
        f"{len(prompts)} prompts, {n} new tokens each, batch 1, float32, end to end, "
        f"median of {args.repeats} interleaved repeats"
    )
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:44s} {rate:8.1f} tokens/s  {rate / base:5.2f} x plain jaxspec")
    print(f"outputs that differ from the first engine's: {result['outputs_that_differ'] or 'none'}")
    if args.json:
        result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
