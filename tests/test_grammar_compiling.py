"""What becomes of a grammar before a text: what is refused, what is kept, and what it may cost."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spelling import EOS, TOKENIZER, VOCAB, spell, walk
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jaxspec.text import grammar as grammars
from jaxspec.text.grammar import Grammar, GrammarCompiler, GrammarSpec
from jaxspec.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB)


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
