"""Grammars without a model: what compiles, what masks say along any path, and that texts drawn from them are right."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schemas import DEAD_END, person
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxspec.text import grammar as grammars
from jaxspec.text import matcher as matchers
from jaxspec.text.grammar import Grammar, GrammarCompiler, GrammarSpec
from jaxspec.text.matcher import Guide, Matcher
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


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB)


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


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("yaml", "a", "kind must be one of"),
        ("regex", "", "value of a regex must be a non-empty string, got ''"),
        ("regex", ("a",), "value of a regex must be a string, got tuple"),
        ("json_object", "{}", "value of a json_object must be empty, got '{}'"),
        ("json_schema", "x" * (grammars.MAX_SOURCE_BYTES + 1), "may take 262144 bytes, got 262145"),
        ("lark", "\ud800", "must be valid Unicode"),
        ("choice", "a", "must be a tuple of strings, got 'a'"),
        ("choice", (), "1 to 4096 choices, got 0"),
        ("choice", ("a",) * 4097, "1 to 4096 choices, got 4097"),
        ("choice", ("a", ""), "non-empty strings, got ''"),
        ("choice", ("a", 3), "non-empty strings, got 3"),
        ("choice", ("a" * 1025,), "may take 1024 bytes, got 1025"),
        ("choice", ("a" * 1000,) * 300, "may take 262144 bytes, got 300000"),
    ],
)
def test_specs_of_wrong_type_or_size_are_refused(kind: Any, value: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        GrammarSpec(kind, value)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", "{", "the json_schema is not valid: EOF"),
        ("json_schema", "[]", "the json_schema is not valid: Expecting object"),
        ("json_schema", '{"type": "person"}', "cannot be compiled: Invalid type: person"),
        ("json_schema", '{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        ("json_schema", '{"$ref": "#"}', "the json_schema allows no first token"),
        ("regex", "(", "the regex cannot be compiled: .*regex parse error: unclosed group$"),
        ("regex", "(?=a)b", "the regex cannot be compiled"),
        ("lark", 'start: "a" other', "the lark cannot be compiled: .*unknown name"),
        ("lark", 'start: "A"', "the lark allows no first token"),
        ("lark", "root ::= other", "the lark is not valid: read as GBNF.* Rule 'other' not found"),
        ("lark", "root ::= " + "(" * 5000, "the lark is not valid: read as GBNF.*recursion"),
        ("lark", 'root ::= "a"' + " " * 2**15, "GBNF may take 32768 bytes, got 32780; Lark 262144"),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind: Any, value: str, message: str, compiler: GrammarCompiler):
    for _ in range(2):  # a refusal is not kept for a grammar
        with pytest.raises(ValueError, match=message):
            compiler.compile(GrammarSpec(kind, value))


def test_many_choices(compiler: GrammarCompiler):
    options = tuple(f"{i}-" + "abcdefghij"[i % 7 :] * 5 for i in range(4096))
    for spec in (GrammarSpec("choice", options), GrammarSpec("json_schema", json.dumps({"enum": options}))):
        text = TOKENIZER.decode(walk(compiler.compile(spec), np.random.default_rng(0), 100))
        assert text.strip('"') in options


def test_equal_specs_are_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    started, compiled = threading.Barrier(4), []
    inner: Callable[[GrammarSpec, int], Grammar] = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda spec, size: compiled.append(spec) or inner(spec, size))
    results: list[Grammar] = []

    def work() -> None:
        started.wait(100)
        results.append(compiler.compile(GrammarSpec("regex", "once+")))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(results) == 4 and len(compiled) == 1 and all(result is results[0] for result in results)
    for i in range(grammars.MAX_CACHED):
        compiler.compile(GrammarSpec("regex", f"a{{{i + 1}}}"))
    assert len(compiler._grammars) == grammars.MAX_CACHED
    assert compiler.compile(GrammarSpec("regex", "once+")) is not results[0]


def test_large_grammars_are_not_all_kept(monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(TOKENIZER.to_json(), VOCAB, TOKENIZER.eos_token_ids)
    assert (compiler.vocab_size, compiler.eos_token_ids) == (VOCAB, [EOS])
    specs = [GrammarSpec("regex", f"a{{{i}}}") for i in range(1, 5)]
    assert compiler.known(specs[0]) is None
    used = compiler.compile(specs[0], 200 * 2**20)
    for spec in specs[1:]:
        compiler.compile(spec, 100 * 2**20)
    assert [compiler.known(spec) is not None for spec in specs] == [False, False, True, True]
    gc.collect()
    assert used.size_bytes == 200 * 2**20 and compiler.held_bytes == 400 * 2**20  # one is not kept, but in use
    with pytest.raises(ValueError, match="cannot be compiled"):
        compiler.compile(GrammarSpec("regex", "("))
    del used
    compiler.shrink(0)
    gc.collect()
    assert compiler.held_bytes == 0 and compiler.known(specs[3]) is None
    source = GrammarSpec("choice", ("ab",) * 4096)
    assert compiler.compile(source).size_bytes > 2 * 4096


def chained(kind: str, links: int) -> GrammarSpec:
    if kind == "references":
        defs: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(links)}
        schema = {"$defs": {**defs, f"a{links}": {"type": "integer"}}, "$ref": "#/$defs/a0"}
        return GrammarSpec("json_schema", json.dumps(schema))
    if kind == "properties":
        defs = {
            f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}
            for i in range(links)
        }
        schema = {"$defs": {**defs, f"a{links}": {"type": "integer"}}, "$ref": "#/$defs/a0"}
        return GrammarSpec("json_schema", json.dumps(schema, separators=(",", ":")))
    name = "R" if kind == "terminals" else "r"
    rules = "\n".join(f"{name}{i}: {name}{i + 1}" for i in range(links))
    return GrammarSpec("lark", f'start: {name}0\n{rules}\n{name}{links}: "a"')


CHAINS = [("references", 3000), ("properties", 2000), ("rules", 3000), ("rules", 12000), ("terminals", 6000)]


def test_no_chain_of_rules_overflows_the_stack(tmp_path: Path):
    """In a process of its own, which it would take down: on a thread with a usual stack, used and dropped there too."""
    sources = [dataclasses.asdict(chained(kind, links)) for kind, links in CHAINS]
    (tmp_path / "specs.json").write_text(json.dumps(sources))
    program = f"""
import json, sys, threading
from jaxspec.text.grammar import GrammarCompiler, GrammarSpec
compiler = GrammarCompiler(sys.stdin.read(), {VOCAB}, [{EOS}])
def work():
    for source in json.load(open({str(tmp_path / "specs.json")!r})):
        matcher = compiler.compile(GrammarSpec(**source)).matcher()
        assert matcher.root.any() and matcher.error is None
        matcher.take([matcher.root.tolist().index(next(w for w in matcher.root.tolist() if w))])
        compiler.shrink(0)
        del matcher
    print("done")
threading.stack_size(8 * 2**20)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], input=TOKENIZER.to_json(), capture_output=True, text=True, timeout=300,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


#: Every text of letters has exponentially many readings.
AMBIGUOUS = GrammarSpec("lark", "start: e\ne: e | " + " | ".join("e " * k for k in range(2, 12)) + " | /[a-z]/")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux which threads there are")
def test_a_compilation_s_thread_is_gone_when_it_returns():
    # A process with a limit on its address space has room for one such stack.
    for _ in range(500):
        thread_id = grammars._on_deep_stack(threading.get_native_id)
        assert not os.path.exists(f"/proc/self/task/{thread_id}")  # at once: pathlib takes longer than a thread's end


def test_one_mask_takes_no_seconds(compiler: GrammarCompiler):
    matcher, worst = compiler.compile(AMBIGUOUS).matcher(), 0.0
    for _ in range(60):
        began = time.thread_time()
        taken = matcher.take(spell("a"))
        worst = max(worst, time.thread_time() - began)
        if not taken or matcher.error is not None:
            break
    assert worst < 1.0
    assert matcher.error is not None and "readings" in matcher.error and "Error" not in matcher.error.split("(")[0]


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
    out = np.zeros((3, matcher.root.size), np.int32)
    matcher.masks([0, 1, 2], [0, 0, 1], out)  # in the middle of a step nothing more is computed
    assert np.all(out[1:] == -1) and matcher.take([text[taken]]) == 0


def realistic(properties: int) -> dict[str, Any]:
    """As of an interface's description: objects, lists, formats, choices, things that may be absent."""
    kinds: list[dict[str, Any]] = [
        {"type": ["string", "null"], "maxLength": 40},
        {"type": "integer"},
        {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}},
        {"enum": ["aa", "bb", 3]},
    ]
    members = {f"property{i}": kinds[i % 4] for i in range(properties)}
    return {"type": "object", "properties": members, "required": [f"property{i}" for i in range(0, properties, 2)]}


@pytest.mark.parametrize(
    "schema",
    [
        realistic(200),
        {"type": "object", "properties": {"c": {"enum": [f"value number {i}" for i in range(500)]}}, "required": ["c"]},
        {"anyOf": [{"type": "object", "properties": {"kind": {"const": f"k{i}"}, f"v{i}": {"type": "integer"}},
                    "required": ["kind", f"v{i}"], "additionalProperties": False} for i in range(300)]},
    ],
    ids=["200 properties", "500 values", "300 kinds of objects"],
)  # fmt: skip
def test_limits_leave_room_for_real_schemas(schema: dict[str, Any], compiler: GrammarCompiler):
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    for seed in range(2):
        assert len(walk(grammar, np.random.default_rng(seed), 4000)) > 10  # and no mask on the way fails


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("NoExtensionBias", "no token of the vocabulary continues the text (NoExtensionBias)"),
        ("ParserTooComplex", "it has too many readings of the text: make it less ambiguous (ParserTooComplex)"),
        ("parser error: Too many items (limit 5000; mask)\n<non-verbose/>", "it has too many readings of the text"),
        ("Parser Error: Current row has 210 items; max is 200", "it has too many readings of the text"),
        ("", "no token of the vocabulary continues the text"),
        ("something new", "something new"),
    ],
)
def test_failures_are_told_in_plain_words(said: str, words: str):
    assert matchers._plainly(said).startswith(words)


def test_vocabularies_that_cannot_serve_grammars():
    with pytest.raises(ValueError, match=re.escape("end tokens in [0, 70), got []")):
        GrammarCompiler(TOKENIZER, VOCAB, [])
    with pytest.raises(ValueError, match=re.escape("end tokens in [0, 70), got [3, 70]")):
        GrammarCompiler(TOKENIZER, VOCAB, [70, 3])
    with pytest.raises(ValueError, match="cannot serve grammars: vocab size too small"):
        GrammarCompiler(TOKENIZER, EOS, [0])
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(ValueError, match="cannot serve grammars: can't determine decoder type"):
        GrammarCompiler(Tokenizer(backend, eos_token_ids=[1]), 2)


def test_rows_without_a_grammar_may_say_anything(compiler: GrammarCompiler):
    matcher = compiler.compile(SPECS["choice"]).matcher()
    guide = Guide([None, matcher], VOCAB)
    ahead = guide.ahead(4, 2)
    assert ahead.shape == (4, 2, 3) and np.all(ahead[[0, 2, 3]] == -1)
    np.testing.assert_array_equal(ahead[1, 0], matcher.root)
    masks = guide.masks(np.zeros((4, 3), np.int32), np.zeros((4, 3), np.int32))
    assert masks.shape == (4, 3, 3) and np.all(masks[[0, 2, 3]] == -1)
    np.testing.assert_array_equal(masks[1, 0], matcher.root)
