"""Lets the tests of this directory import its helpers: with importlib's import mode it is not on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
