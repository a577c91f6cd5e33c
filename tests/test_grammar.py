"""Grammars without a model: what masks say along any path, and that texts drawn from them are right."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from schemas import DEAD_END
from spelling import CHARACTERS, EOS, SPECS, TOKEN, TOKENIZER, VOCAB, after, spell, tokens_of, walk

from jaxspec.text import matcher as matchers
from jaxspec.text.grammar import GrammarCompiler, GrammarSpec
from jaxspec.text.matcher import Guide


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB)


def satisfies(name: str, text: str) -> None:
    """Raises or asserts where the text is not what the grammar of this name says."""
    spec = SPECS[name]
    if name == "person":
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"] and len(value["name"]) <= 6
        assert type(value["age"]) is int and 0 <= value["age"] <= 120
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "bc"}
    elif name == "object":
        assert isinstance(json.loads(text), dict)
    elif name == "regex":
        assert isinstance(spec.value, str) and re.fullmatch(spec.value, text)
    elif name == "choice":
        assert text in spec.value
    else:
        assert re.fullmatch(r"[0-9+()]+", text) and isinstance(eval(text.replace("0", "1")), int)


def test_a_spec_is_made_of_a_kind_and_its_value():
    schema = {"type": "integer"}
    assert GrammarSpec.of({"json_schema": schema}) == GrammarSpec("json_schema", json.dumps(schema))
    assert GrammarSpec.of({"choice": ["a", "b"]}) == GrammarSpec("choice", ("a", "b"))
    assert GrammarSpec.of({"json_object": True}) == GrammarSpec("json_object")
    for wrong, message in [
        ({"json": schema}, "for 'json' say 'json_schema'"),
        (schema | {"x": 1}, "must be a GrammarSpec or {kind: value} with a kind of"),
        ({"json_object": False}, "json_object must be True, got False"),
        ({"regex": ["a"]}, "must be a string, got tuple"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            GrammarSpec.of(wrong)


@pytest.mark.parametrize("name", SPECS)
def test_whatever_is_drawn_from_the_masks_satisfies_the_grammar(name: str, compiler: GrammarCompiler):
    rng, grammar = np.random.default_rng(3), compiler.compile(SPECS[name])
    finished = 0
    for _ in range(40):
        tokens = walk(grammar, rng, 120)
        matcher = grammar.matcher()
        assert matcher.take(tokens) == len(tokens)
        if matcher.complete:
            finished += 1
            satisfies(name, TOKENIZER.decode(tokens))
    assert finished > 10


@pytest.mark.parametrize("name", SPECS)
def test_masks_of_trees_are_those_of_their_paths(name: str, compiler: GrammarCompiler):
    """Every node's mask is that of a new matcher at its text, and looking ahead changes nothing."""
    rng, grammar = np.random.default_rng(5), compiler.compile(SPECS[name])
    for _ in range(25):
        text = walk(grammar, rng, int(rng.integers(1, 20)))
        matcher = grammar.matcher()
        cut = int(rng.integers(0, len(text)))
        matcher.take(text[:cut])
        root = matcher.root.copy()
        # The continuation that the grammar allows, siblings beside it, tokens that it refuses, and no proposals.
        tokens, parents, spine = [0], [0], [0]
        for token in text[cut : cut + 5]:
            for sibling in rng.integers(0, VOCAB + 1, 2).tolist():
                tokens.append(sibling)
                parents.append(int(rng.choice(spine)))
            tokens.append(token)
            parents.append(spine[-1])
            spine.append(len(tokens) - 1)
        out = np.zeros((len(tokens), len(root)), np.int32)
        matcher.masks(tokens, parents, out)
        paths: dict[int, list[int] | None] = {0: text[:cut]}
        for node in range(1, len(tokens)):
            before, token = paths[parents[node]], tokens[node]
            allowed = before is not None and token != EOS and token in tokens_of(out[parents[node]])
            paths[node] = [*before, token] if allowed and before is not None else None
        for node, path in paths.items():
            expected = np.full_like(root, -1) if path is None else after(grammar, path).root
            np.testing.assert_array_equal(out[node], expected)
        ahead = np.zeros((4, len(root)), np.int32)
        matcher.ahead(ahead)
        path = text[:cut]
        for depth, row in enumerate(ahead):
            np.testing.assert_array_equal(row, after(grammar, path).root)
            if len(tokens_of(row)) > 1 or tokens_of(row) == [EOS]:
                assert np.all(ahead[depth + 1 :] == -1)
                break
            path = [*path, *tokens_of(row)]
        np.testing.assert_array_equal(matcher._mask(), root)
        assert matcher.error is None and not matcher.complete


@pytest.mark.parametrize("name", SPECS)
def test_a_text_is_complete_at_the_same_token_however_it_comes(name: str, compiler: GrammarCompiler):
    rng, grammar = np.random.default_rng(7), compiler.compile(SPECS[name])
    for _ in range(15):
        tokens = walk(grammar, rng, 100)
        burst = grammar.matcher()
        taken = burst.take([*tokens, EOS, 3])
        assert burst.complete == after(grammar, tokens).complete
        assert taken == len(tokens) or not burst.complete


def test_texts_end_only_where_they_may(compiler: GrammarCompiler):
    matcher = compiler.compile(GrammarSpec("choice", ("a", "ab"))).matcher()
    assert tokens_of(matcher.root) == spell("a")
    assert matcher.take(spell("a")) == 1 and not matcher.complete
    assert tokens_of(matcher.root) == [*spell("b"), EOS]
    assert matcher.take([EOS, EOS]) == 1 and matcher.complete
    matcher = compiler.compile(GrammarSpec("choice", ("a", "ab"))).matcher()
    assert matcher.take(spell("abb")) == 2 and matcher.complete and matcher.error is None


def test_refused_tokens_end_a_text_with_an_error(compiler: GrammarCompiler):
    for token in (CHARACTERS.index("z"), EOS):
        matcher = compiler.compile(SPECS["person"]).matcher()
        assert matcher.take([*spell("{"), token]) == 1
        assert matcher.error is not None and str(token) in matcher.error
        assert np.all(matcher.root == -1)


def test_a_dead_end_is_an_error_of_texts_that_take_it_alone(compiler: GrammarCompiler):
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(DEAD_END)))
    at = spell('{"a":"n"')
    branch = [TOKEN[',"'], *spell("b"), TOKEN['":'], *spell(" ")]
    matcher = grammar.matcher()
    assert matcher.take(at) == len(at)
    tokens = [0, *branch, CHARACTERS.index("}")]
    out = np.zeros((len(tokens), matcher.root.size), np.int32)
    matcher.masks(tokens, [0, *range(len(branch)), 0], out)
    assert matcher.error is None and np.all(out[len(branch)] == -1)
    assert branch[-1] in tokens_of(out[len(branch) - 1])
    for node in range(1, len(branch)):
        np.testing.assert_array_equal(out[node], after(grammar, [*at, *branch[:node]]).root)
    unharmed = after(grammar, at)
    np.testing.assert_array_equal(matcher.root, unharmed.root)
    assert matcher.take(spell("}")) == 1 and matcher.complete

    doomed = after(grammar, at)
    doomed.masks(tokens, [0, *range(len(branch)), 0], out)
    doomed.take([*branch, *spell("0")])
    assert doomed.error is not None and not doomed.complete


def test_json_holds_no_runs_of_blanks(compiler: GrammarCompiler):
    grammar = compiler.compile(GrammarSpec("json_schema", '{"type": "array", "items": {"type": "integer"}}'))
    blank = CHARACTERS.index(" ")
    matcher, tokens = grammar.matcher(), []
    for _ in range(40):
        allowed = tokens_of(matcher.root)
        tokens.append(blank if blank in allowed else allowed[len(tokens) % len(allowed)])
        matcher.take(tokens[-1:])
        if matcher.complete:
            break
    text = TOKENIZER.decode(tokens)
    assert "  " not in text and " ]" not in text and "[ " not in text
    spaced = compiler.compile(
        GrammarSpec("json_schema", '{"type": "array", "x-guidance": {"whitespace_flexible": true}}')
    )
    assert spaced.matcher().take(spell("[   ")) == 4


def test_rows_without_a_grammar_may_say_anything(compiler: GrammarCompiler):
    matcher = compiler.compile(SPECS["choice"]).matcher()
    guide = Guide([None, matcher], VOCAB)
    ahead = guide.ahead(4, 2)
    assert ahead.shape == (4, 2, 3) and np.all(ahead[[0, 2, 3]] == -1)
    np.testing.assert_array_equal(ahead[1, 0], matcher.root)
    masks = guide.masks(np.zeros((4, 3), np.int32), np.zeros((4, 3), np.int32))
    assert masks.shape == (4, 3, 3) and np.all(masks[[0, 2, 3]] == -1)
    np.testing.assert_array_equal(masks[1, 0], matcher.root)


def test_texts_whose_masks_take_too_long_fail(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    """What is allowed does not depend on time; whether the text goes on does."""
    grammar = compiler.compile(SPECS["person"])
    text = walk(grammar, np.random.default_rng(0), 40)
    masks = [after(grammar, text[:count]).root for count in range(len(text))]
    clock = itertools.count(step=0.05)  # as long as a mask seems to take
    monkeypatch.setattr(matchers.time, "thread_time", lambda: next(clock))
    matcher, taken = grammar.matcher(), 0
    while matcher.error is None:
        if matcher.root is not None and matcher.error is None:
            np.testing.assert_array_equal(matcher.root, masks[taken])
            taken += matcher.take([text[taken]])
    assert 14 <= taken <= 18 and "too long" in matcher.error  # 0.5 s and 0.02 s a token
    assert "may take 0.8 s" in matcher.error and "make it simpler: smaller numbers in {m,n}" in matcher.error
    out = np.zeros((3, matcher.root.size), np.int32)
    matcher.masks([0, 1, 2], [0, 0, 1], out)  # in the middle of a step nothing more is computed
    assert np.all(out[1:] == -1) and matcher.take([text[taken]]) == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("NoExtensionBias", "no token of the vocabulary continues the text (NoExtensionBias)"),
        ("ParserTooComplex", "it has too many readings of the text: make it less ambiguous (ParserTooComplex)"),
        ("parser error: Too many items (limit 5000; mask)\n<non-verbose/>", "it has too many readings of the text"),
        ("Parser Error: Current row has 210 items; max is 200", "it has too many readings of the text"),
        ("lexer error: too many expressions constructed", "an expression in it has too many states: make it simpler: "),
        ("", "no token of the vocabulary continues the text"),
        ("something new", "something new"),
    ],
)
def test_failures_are_told_in_plain_words(said: str, words: str):
    assert matchers._plainly(said).startswith(words)
