"""One engine per process for `studies.peer_engines`: llama.cpp and vLLM live in environments of their own.

Run by path with the interpreter that has the engine, so nothing of jaxspec is imported before `serve` asks for it.
The protocol is a line of JSON each way: {"prompts": [[id]], "mode": "plain" | "chain-K", "new": N} is answered by
{"seconds": s, "tokens": [[id]]}, greedy, end of text ignored. The first line out is "ready".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
#: (prompts, mode, new tokens) -> each prompt's new tokens.
Engine = Callable[[Tokens, str, int], Tokens]

#: Names of a Llama layer's tensors in safetensors and in GGUF.
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def jaxspec_engine(target: Path, draft: Path, slots: int) -> Engine:
    """This engine with its defaults, but for the prefix cache: prompts repeat."""
    from jaxspec.adaptive.static import StaticPolicy
    from jaxspec.llm import LLM
    from jaxspec.request import SamplingParams
    from jaxspec.tier import PLAIN, Tier

    steps = {"candidate_steps": (0, 2, 3, 4, 5)}
    llm = LLM(target, draft, steps, max_batch_size=slots, enable_prefix_caching=False, warmup="eager", progress=False)

    def generate(prompts: Tokens, mode: str, new: int) -> Tokens:
        llm.use_policy(StaticPolicy(PLAIN if mode == "plain" else Tier(int(mode.split("-")[1]))))
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def vllm_engine(target: Path, draft: Path, slots: int, depth: int) -> Engine:
    """vLLM's CPU build with its defaults; depth 0 is plain, else its draft-model speculation."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": depth}
    extra: dict[str, Any] = {"speculative_config": drafts} if depth else {}
    longest = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    llm = LLM(
        str(target),
        dtype="float32",
        max_model_len=longest,
        max_num_seqs=slots,
        enable_prefix_caching=False,
        **extra,
    )

    def generate(prompts: Tokens, mode: str, new: int) -> Tokens:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    return generate


def write_gguf(model: Path, path: Path) -> None:
    """A Llama checkpoint as a GGUF file of float32 without a vocabulary: prompts come as token ids."""
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    for add in (w.add_key_length, w.add_value_length, w.add_rope_dimension_count):
        add(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_vocab_size(config["vocab_size"])
    w.add_tokenizer_model("no_vocab")
    data = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = (8 + size + at for at in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            wide = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
        elif entry["dtype"] == "F32":
            wide = np.frombuffer(data[begin:end], np.uint32)
        else:
            raise ValueError(f"{model}: {name} is {entry['dtype']}; this comparison reads BF16 and F32")
        value = wide.view(np.float32).reshape(entry["shape"])
        match name.removesuffix(".weight").split(".", 3):
            case ["model", "embed_tokens"]:
                to = "token_embd"
            case ["model", "norm"]:
                to = "output_norm"
            case ["lm_head"]:
                to = "output"
            case [_, _, layer, rest]:
                kind = GGUF_NAMES[rest]
                to = f"blk.{layer}.{kind}"
                if kind in heads:  # llama.cpp rotates neighbours, safetensors' order halves
                    value = value.reshape(heads[kind], 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            case _:
                raise ValueError(f"{model}: no name in GGUF is known for {name}")
        w.add_tensor(f"{to}.weight", np.ascontiguousarray(value))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


class LlamaContext:
    """One model in llama.cpp, through llama-cpp-python's bindings."""

    def __init__(self, model: Path, cache: Path, slots: int):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.lib = llama_cpp
        config = json.loads((model / "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        path = cache / f"{model.name}.gguf"
        write_gguf(model, path)
        loaded = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = slots * 512, config["max_position_embeddings"], slots
        params.n_threads = params.n_threads_batch = os.cpu_count()
        params.type_k = params.type_v = self.lib.GGML_TYPE_F32
        params.kv_unified = True
        self.context = self.lib.llama_init_from_model(loaded, params)
        self.batch = self.lib.llama_batch_init(config["max_position_embeddings"], 0, 1)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are read)."""
        b = self.batch
        for i, (token, position, sequence, read) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, position, 1, sequence, read
        b.n_tokens = len(rows)
        if code := self.lib.llama_decode(self.context, b):
            raise RuntimeError(f"llama_decode returned {code} for {len(rows)} rows")

    def best(self, row: int) -> int:
        """The most likely token after a row of the last call; -1 is its last."""
        import numpy as np

        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def prompt(self, tokens: list[int], sequence: int = 0) -> None:
        self.run([(token, i, sequence, i == len(tokens) - 1) for i, token in enumerate(tokens)])

    def keep(self, length: int) -> None:
        """Forgets what lies at and after a position of every sequence."""
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), -1, length, -1)


def llama_engine(target: Path, draft: Path, slots: int, cache: Path) -> Engine:
    """llama.cpp in float32; chains drafted and verified as its `speculative-simple` example does."""
    t, d = LlamaContext(target, cache, slots), LlamaContext(draft, cache, slots)

    def plain(prompts: Tokens, new: int) -> Tokens:
        found: Tokens = []
        for i, prompt in enumerate(prompts):
            t.prompt(prompt, i)
            found.append([t.best(-1)])
        for n in range(new - 1):
            t.run([(found[i][-1], len(prompt) + n, i, True) for i, prompt in enumerate(prompts)])
            for i, tokens in enumerate(found):
                tokens.append(t.best(i))
        return found

    def chain(prompt: list[int], depth: int, new: int) -> list[int]:
        t.prompt(prompt)
        d.prompt(prompt)
        tokens, known = [*prompt, t.best(-1)], len(prompt)  # known: of these, in the draft's cache
        while len(tokens) < len(prompt) + new:
            last = len(tokens) - 1
            d.run([(tokens[i], i, 0, i == last) for i in range(known, last + 1)])
            drafts = [d.best(-1)]
            while len(drafts) < depth:
                d.run([(drafts[-1], last + len(drafts), 0, True)])
                drafts.append(d.best(-1))
            t.run([(token, last + i, 0, True) for i, token in enumerate([tokens[-1], *drafts])])
            right = [t.best(i) for i in range(depth + 1)]
            accepted = next((i for i in range(depth) if right[i] != drafts[i]), depth)
            tokens += right[: accepted + 1]
            known = last + min(accepted + 1, depth)
            t.keep(last + accepted + 1)
            d.keep(known)
        return tokens[len(prompt) : len(prompt) + new]

    def generate(prompts: Tokens, mode: str, new: int) -> Tokens:
        t.keep(0)
        d.keep(0)
        if mode == "plain":
            return plain(prompts, new)
        if len(prompts) > 1:
            raise ValueError(f"drafts for one prompt at a time, got {len(prompts)}")
        return [chain(prompts[0], int(mode.split("-")[1]), new)]

    return generate


def serve(name: str, target: Path, draft: Path, slots: int, cache: Path) -> None:
    """Answers requests until standard input ends; whatever the engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if name == "jaxspec":
        engine = jaxspec_engine(target, draft, slots)
    elif name == "llama":
        engine = llama_engine(target, draft, slots, cache)
    else:
        engine = vllm_engine(target, draft, slots, int(name.partition("-")[2] or 0))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        tokens = engine(asked["prompts"], asked["mode"], asked["new"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
