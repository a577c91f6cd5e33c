"""Tiny engines with text: one of thirteen tokens, and one that can write JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quick
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.adaptive.cost import CostTable
from jaxspec.assemble import assemble
from jaxspec.config import EngineConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.loading import Drafting, bind_drafter
from jaxspec.models.tiny import tiny_target
from jaxspec.speculation.drafters.suffix import prompt_lookup
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tier import PLAIN, Tier

ALPHABET, EOS = "abcdefghijkl", 12
VOCAB = len(ALPHABET) + 1
TIERS = (PLAIN, Tier(1), Tier(3))
#: As few executables as serving needs to see several; what each computes is for tests/engine.
BUCKETS, VARIANTS = (2, 4), ("sampled",)
SIZES = dict(
    max_batch_size=4, max_seq_len=120, page_size=8, num_pages=30, prefill_chunk=16, structured_output=True,
    batch_buckets=BUCKETS, variants=VARIANTS, warmup="eager",
)  # fmt: skip
#: Tokens of the engine that can write JSON: printable ASCII and the end of text.
WRITTEN = [chr(code) for code in range(32, 127)]
TREE = Tier(3, 2, 7)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


def text_of(tokens: Sequence[int]) -> str:
    """What the tiny tokenizer makes of tokens, the end of sequence left out."""
    return "".join(ALPHABET[token] for token in tokens if token != EOS)


def tiny_tokenizer() -> Tokenizer:
    """A character a token: "a" is 0, "l" is 11, and 12 ends a text."""
    vocab = {letter: i for i, letter in enumerate(ALPHABET)} | {"<eos>": EOS}
    backend = Backend(models.BPE(vocab, [], unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token_ids=(EOS,), chat_template=TEMPLATE, special_tokens={"eos_token": "<eos>"})


def build_tiny_engine(tiers: tuple[Tier, ...] = TIERS, **config: Any) -> Engine:
    """The 13-token model with n-gram drafts and text; the policy's costs are made up, so nothing is timed."""
    cost = CostTable({(t, b): 1e-3 * (1 + 0.1 * t.depth) for t in tiers for b in BUCKETS})
    with quick.prompts_alone():
        return assemble(
            tiny_target(0, eos_token_ids=(EOS,)), tiny_tokenizer(), SpeculationConfig(tiers=tiers),
            EngineConfig(**{**SIZES, **config}),
            drafter=Drafting(lambda geo: (prompt_lookup(VOCAB), ()), name="suffix"), cost=cost,
            progress=False,
        )  # fmt: skip


def writing_tokenizer() -> Tokenizer:
    """A printable character a token, in the order of ASCII; others are a blank. A text ends with the last token."""
    vocab = {character.replace(" ", "Ġ"): i for i, character in enumerate(WRITTEN)}
    backend = Backend(models.BPE(vocab, [], unk_token="Ġ"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    end = len(WRITTEN)
    return Tokenizer(backend, eos_token_ids=(end,), chat_template=TEMPLATE, special_tokens={"eos_token": "<eos>"})


def build_writing_engine(kept: Path) -> Engine:
    """A model that can write JSON, with a draft model that proposes trees; one bucket, so that it compiles quickly."""
    end, vocab = len(WRITTEN), len(WRITTEN) + 1
    tiers = (PLAIN, TREE)
    draft = tiny_target(1, num_layers=1, vocab_size=vocab)
    few = dict(batch_buckets=(4,), max_seq_len=240, num_pages=60)
    with quick.prompts_alone():
        return assemble(
            tiny_target(0, vocab_size=vocab, eos_token_ids=(end,)), writing_tokenizer(),
            SpeculationConfig(tiers=tiers), EngineConfig(**{**SIZES, "compile_cache": kept, **few}),
            drafter=Drafting(lambda geo: bind_drafter("draft_model", draft, geo), trees=True, name="draft_model"),
            cost=CostTable({(t, 4): 1e-3 * (1 + 0.1 * t.depth) for t in tiers}), progress=False,
        )  # fmt: skip
