"""Lets the tests of this directory import its helpers: with importlib's import mode it is not on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("mixed",):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_name] = _module
    _spec.loader.exec_module(_module)
