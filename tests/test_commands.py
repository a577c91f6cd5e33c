"""All commands that there are: what they have in common, found by the first lines of their modules."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxspec import __main__ as listing
from jaxspec import cli
from jaxspec.bench.studies import __main__ as studies

ROOT = Path(__file__).resolve().parent.parent
#: What processes of this project are started with, and not by users: they have no flags.
STARTED = {"jaxspec.bench.online.host", "serve.core.tied"}
#: Commands that list others.
LISTS = {"jaxspec": listing.COMMANDS, "jaxspec.bench.studies": studies.STUDIES}
#: Whose parser is another's command of its own.
BELOW = [
    ("jaxspec.bench", name)
    for name in ("serve", "simulate", "report", "adaptive", "tune", "grow", "overheads", "profile")
]
#: One that is started by a command, with flags all the same.
WORKER = "pallas_kernels.aot.worker"


def modules() -> list[str]:
    """What `python -m` is given, as docstrings say."""
    found = []
    files = (path for package in ("jaxspec", "serve", "pallas_kernels") for path in (ROOT / package).rglob("*.py"))
    for path in sorted(files):
        source = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in source and (said := re.match(r'"""python -m ([\w.]+)', source)):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            assert said[1] == name, path
            found.append(name)
    return found


class ParsingError(Exception):
    """A command began to read its arguments."""


def parser_of(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """A command's parser, at the moment that it is used."""

    def stop(self: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise ParsingError(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    try:
        module = importlib.import_module(f"{name}.__main__")
    except ModuleNotFoundError:
        module = importlib.import_module(name)
    with pytest.raises(ParsingError) as caught:
        module.main(words)
    return caught.value.args[0]


def undocumented(p: argparse.ArgumentParser, *, defaults: bool) -> list[str]:
    """Arguments without help.

    Args:
      defaults: flags count, too, whose help says of no default.
    """
    shown = p.formatter_class(p.prog)._get_help_string
    without = []
    for action in (a for a in p._actions if not isinstance(a, argparse._SubParsersAction)):
        text = "" if action.help is None else shown(action) or ""
        optional = bool(action.option_strings) and not action.required and action.dest != "help"
        if not text or (defaults and optional and "default" not in text):
            without.append("/".join(action.option_strings) or action.dest)
    return without


def parsers(p: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [p, *cli._commands(p).values()]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, []) for name in modules() if name not in STARTED | LISTS.keys()),
        (WORKER, []),
        *((name, [word]) for name, word in BELOW),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_every_flag_has_its_help_and_every_error_one_line(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for p in parsers(parser_of(name, words, monkeypatch)):
        assert p.prog.startswith(f"python -m {name}") and p.description, p.prog
        assert undocumented(p, defaults=not name.startswith("serve")) == [], p.prog
        assert not p.allow_abbrev and p.format_help(), p.prog  # which fails where a % stands
        with pytest.raises(SystemExit) as end:
            p.error("wrong")
        assert (end.value.code, capsys.readouterr().err) == (2, f"{p.prog}: error: wrong (see --help)\n")


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]):
    listed: set[str] = set()
    for module in (listing, studies):
        assert module.main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(re.fullmatch(r"python -m [\w.]+ +\S.*[^.]", line) and len(line) < 130 for line in lines), lines
        listed |= {line.split()[2] for line in lines}
    assert listed == {*modules()} - STARTED - {"jaxspec"}


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (listing, ["generate", "hi"], "got 'generate'; say python -m jaxspec.generate\n"),
        (studies, ["round"], "got 'round'; say python -m jaxspec.bench.studies.rounds\n"),
        (listing, ["--zzz"], "got '--zzz'; without arguments it lists commands\n"),
    ],
)
def test_a_list_runs_nothing(module: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert module.main(words) == 2
    error = capsys.readouterr().err
    assert error.endswith(message) and error.count("\n") == 1
