"""Directories of the Hugging Face hub: which names look like one, and its download by huggingface_hub, if installed.

Must not know what the files hold.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

#: What jaxspec reads of a model's repository; weights in other formats stay where they are.
_READ = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form "organisation/model"."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII) is not None


def download(hub_id: str) -> Path:
    """The directory of a hub id in huggingface_hub's cache, downloaded where it is not there yet.

    Raises:
      ValueError: huggingface_hub is absent, or the download failed; says how to download it by hand.
    """
    by_hand = f"download it with `hf download {hub_id} --local-dir DIR` and pass DIR"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as e:
        raise ValueError(
            f"{hub_id!r} is no directory, and looks like an id of the Hugging Face hub, but the package "
            f"huggingface_hub is not installed: install it, or elsewhere {by_hand}"
        ) from e
    try:
        return Path(hub.snapshot_download(hub_id, allow_patterns=list(_READ)))
    except Exception as e:  # the network's, the file system's and the hub's own kinds, which differ between versions
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(f"{hub_id!r} is no directory, and not to be had from the hub ({reason}): {by_hand}") from e
