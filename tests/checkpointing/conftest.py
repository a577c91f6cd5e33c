"""Lets the tests of this directory `import head_cases`: with importlib's import mode it is not on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("head_cases", Path(__file__).with_name("head_cases.py"))
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["head_cases"] = _module
_spec.loader.exec_module(_module)
