"""A vocabulary of characters and a few longer tokens, grammars of every kind, and walks through their masks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from schemas import person
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxspec.text.grammar import Grammar, GrammarSpec
from jaxspec.text.matcher import Matcher
from jaxspec.text.tokenizer import Tokenizer

CHARACTERS = [*'{}[]":,.-+_\\/ ()', *"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
MERGES = [('"', ":"), ('"', ","), ("{", '"'), (",", '"'), ("n", "a"), ("m", "e"), ("na", "me"), ("t", "r"), ("0", "0")]


def json_tokenizer() -> Tokenizer:
    """A token a character, some longer ones, and an end."""
    byte_level = lambda text: text.replace(" ", "Ġ")
    tokens = [byte_level(c) for c in CHARACTERS] + [a + b for a, b in MERGES]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, eos_token_ids=[len(tokens)])


TOKENIZER = json_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]
TOKEN = {a + b: len(CHARACTERS) + i for i, (a, b) in enumerate(MERGES)}
VOCAB = 70  # a model's table may be larger than its tokenizer's
SPECS = {
    "person": GrammarSpec("json_schema", json.dumps(person(6))),
    "object": GrammarSpec("json_object"),
    "regex": GrammarSpec("regex", r"(name|n+a)_[0-9]{2,4}(\.0+)?"),
    "lark": GrammarSpec("lark", 'start: sum\nsum: product ("+" product)*\nproduct: /[0-9]/ | "(" sum ")"'),
    "gbnf": GrammarSpec("lark", '# a sum\nroot ::= item ("+" item)*\nitem ::= [0-9]{1,3} | "(" root ")"'),
    "choice": GrammarSpec("choice", ("name", "nam", 'a"b', "na me")),
}


def tokens_of(mask_W: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def after(grammar: Grammar, tokens: Sequence[int]) -> Matcher:
    """A new matcher that has taken the tokens one by one and has looked nowhere else."""
    matcher = grammar.matcher()
    for token in tokens:
        assert matcher.take([token]) == 1
    assert matcher.error is None
    return matcher


def walk(grammar: Grammar, rng: np.random.Generator, limit: int) -> list[int]:
    """Tokens drawn evenly from the masks until the text is complete; the end token included where it was drawn."""
    matcher, tokens = grammar.matcher(), []
    while not matcher.complete and len(tokens) < limit:
        tokens.append(int(rng.choice(tokens_of(matcher.root))))
        assert matcher.take(tokens[-1:]) == 1
    assert matcher.error is None
    return tokens


def spell(text: str) -> list[int]:
    return [CHARACTERS.index(c) for c in text]
