"""Lets the tests of this directory `import planted`: with importlib's import mode it is not on sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("planted", Path(__file__).with_name("planted.py"))
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["planted"] = _module
_spec.loader.exec_module(_module)
