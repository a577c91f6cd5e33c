"""What a checkpoint's directory tells gateways: the tokenizer's files in one archive, and a few facts of config.json.

Reads files; call it off the event loop. Must not know gRPC.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

from jaxspec.checkpointing.tensors import read_json
from jaxspec.text.tokenizer import FILE, Tokenizer

#: Whatever may say how text becomes token ids; no weights.
_TOKENIZER_FILES = (
    FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
#: The oldest date that a zip archive can hold: the same files make the same archive, and the same fingerprint.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class CheckpointFacts:
    """Of config.json; empty or 0 where it says nothing.

    Attributes:
      eos_token_ids: as listed there; a tokenizer may know more.
    """

    model_type: str = ""
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int = 0
    pad_token_id: int = 0


def checkpoint_facts(directory: Path) -> CheckpointFacts:
    """Facts about a checkpoint.

    Raises:
      ValueError: its config.json is missing or broken.
    """
    config = read_json(directory / "config.json")
    return CheckpointFacts(
        model_type=str(config.get("model_type") or ""),
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        eos_token_ids=_ids(config.get("eos_token_id")),
        bos_token_id=next(iter(_ids(config.get("bos_token_id"))), 0),
        pad_token_id=next(iter(_ids(config.get("pad_token_id"))), 0),
    )


def tokenizer_archive(directory: Path) -> tuple[bytes, str] | None:
    """(zip archive of the tokenizer's files, its SHA-256 in hexadecimal); None: there is no tokenizer.

    What was read of a tokenizer.model comes as the tokenizer.json that gateways look for.

    Raises:
      ValueError: the tokenizer.model cannot be read.
    """
    if not Tokenizer.is_in(directory):
        return None
    contents = {name: (directory / name).read_bytes() for name in _TOKENIZER_FILES if (directory / name).is_file()}
    if FILE not in contents:
        contents[FILE] = Tokenizer.from_directory(directory).to_json().encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
