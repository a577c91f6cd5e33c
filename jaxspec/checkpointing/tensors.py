"""Named tensors in safetensors files: lazy reading with exact complaints, atomic writing.

Owns the files of a checkpoint directory (one file, or shards with an index). Must not know
models: what the names mean is the business of hf.py and of the heads' modules.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: safetensors' names of the types that weights may have, and those of id tables and masks.
FLOATS = ("BF16", "F16", "F32")
INTEGERS = ("I64", "I32", "BOOL")
FLOAT8 = "F8_E4M3"
#: What each of safetensors' types is here; its own reader for numpy knows no float8.
_KINDS: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
    FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: How the text begins that Git leaves in place of a large file that was not fetched.
_LFS = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: no such file, not JSON, or not an object; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} is not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def located(directory: Path) -> Iterator[None]:
    """Within it a ValueError names the directory, which readers of fields do not know: another model has them as well.

    Raises:
      ValueError: as raised within, with the directory in front of messages that lack it.
    """
    try:
        yield
    except ValueError as e:
        if re.search(rf"(?<![\w.-]){re.escape(str(directory))}(?![\w.-])", str(e)):
            raise
        mark = os.sep if str(e).startswith("config.json: ") else ": "
        raise ValueError(f"{directory}{mark}{e}") from e


class TensorReader:
    """The tensors of one directory, read one at a time; a context manager.

    Remembers what was read, so that `refuse_unread` can name what a loader did not expect.

    Attributes:
      bytes_read: of all that was given out.
    """

    def __init__(self, directory: Path, files: Mapping[str, Path], handles: Mapping[Path, Any]):
        self.directory, self.bytes_read = directory, 0
        self._files, self._handles = dict(files), dict(handles)
        self._offsets: dict[Path, dict[str, int]] = {}
        self._read: set[str] = set()
        self._stored: dict[str, str] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the files; arrays already handed out stay valid."""
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles = {}

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def rename(self, names: Mapping[str, str]) -> None:
        """Calls tensors by other names than their files do, {new: the file's}.

        Raises:
          ValueError: a name that another tensor has.
        """
        for new, stored in names.items():
            if new in self._files:
                raise ValueError(f"{self.directory} holds {new!r} twice: as it is and as {stored!r}")
            self._files[new], self._stored[new] = self._files.pop(stored), stored

    def first(self, *names: str) -> str | None:
        """The first of these names that is here."""
        return next((n for n in names if n in self._files), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header.

        Raises:
          ValueError: no such tensor.
        """
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's type.

        Raises:
          ValueError: no such tensor.
        """
        return self._slice(name).get_dtype()

    def get(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: tuple[slice, ...] = ()
    ) -> np.ndarray:
        """Reads one tensor, in the file's dtype.

        Args:
          shape: of the whole tensor.
          part: what of it to read, along its first axes; no other bytes are.

        Raises:
          ValueError: absent, another shape, or a type that is not in `dtypes`; names the tensor, its file, and what
            was found and expected.
        """
        view = self._slice(name)
        found, kind = tuple(view.get_shape()), view.get_dtype()
        if found != tuple(shape):
            raise ValueError(
                f"tensor {name!r} in {self._files[name]} has shape {found}; config.json asks for {tuple(shape)}"
            )
        if kind not in dtypes:
            raise ValueError(f"tensor {name!r} in {self._files[name]} has type {kind}; supported are {list(dtypes)}")
        self._read.add(name)
        if not math.prod(found):
            return np.zeros(found, _KINDS[kind])[part]
        # Mapped for this tensor alone, so that pages of the file do not add up in the process' memory.
        mapped = np.memmap(self._files[name], _KINDS[kind], "r", self._offset(name), found)
        array = np.array(mapped[part])
        self.bytes_read += array.nbytes
        return array

    def _offset(self, name: str) -> int:
        """Where a tensor begins in its file, by the file's header, which the library has found to be sound."""
        path = self._files[name]
        if path not in self._offsets:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            begins = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
            self._offsets[path] = {name: 8 + size + begin for name, begin in begins.items()}
        return self._offsets[path][self._stored.get(name, name)]

    def refuse_unread(self, ignore: str = r"(?!)") -> None:
        """Checks that nothing was left over; `ignore` is a regular expression over whole names.

        Raises:
          ValueError: tensors that no parameter took, with their shapes and file.
        """
        extra = [n for n in sorted(self._files) if n not in self._read and not re.fullmatch(ignore, n)]
        if extra:
            shown = ", ".join(f"{n!r} {self.shape(n)} in {self._files[n].name}" for n in extra[:4])
            more = f" and {len(extra) - 4} more" if len(extra) > 4 else ""
            raise ValueError(f"{self.directory} holds tensors that config.json has no place for: {shown}{more}")

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            where = ", ".join(sorted({p.name for p in self._files.values()}))
            raise ValueError(f"tensor {name!r} is missing from {self.directory} (looked in {where})")
        try:
            return self._handles[self._files[name]].get_slice(self._stored.get(name, name))
        except SafetensorError as e:
            raise ValueError(f"{self._files[name]} lacks tensor {name!r}, which the index places there: {e}") from e


def read_tensors(directory: str | os.PathLike[str], also: Sequence[str] = ()) -> TensorReader:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names; reads no tensor yet.

    Args:
      also: other names that the one file may have, tried first.

    Raises:
      ValueError: not a directory, no safetensors (pickles are refused and the message says
        why), a broken index, an absent shard, or a truncated file; names the file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    path = next((directory / n for n in (*also, WEIGHTS) if (directory / n).exists()), None)
    if path is not None:
        handle = _open(path)
        return TensorReader(directory, dict.fromkeys(handle.keys(), path), {path: handle})
    if not (directory / INDEX).exists():
        raise ValueError(_no_weights(directory))
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / INDEX} needs a non-empty object 'weight_map', got {weight_map!r}")
    files: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{directory / INDEX} places {name!r} in {file!r}; expected a .safetensors file beside it")
        files[name] = directory / file
    handles = {path: _open(path) for path in sorted(set(files.values()))}
    held: dict[str, Path] = {}
    for path, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118
            if name in held:
                raise ValueError(f"tensor {name!r} is in {held[name].name} and in {path.name} of {directory}")
            held[name] = path
    files = {**held, **files}
    return TensorReader(directory, files, handles)


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file with the metadata {"format": "pt"} that peers ask for; all or nothing.

    Raises:
      OSError: a full disk or the like; names the file and its size.
    """
    path = Path(path)
    arrays = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    with _sibling(path) as staging:
        try:
            save_file(arrays, staging, metadata={"format": "pt"})
        except SafetensorError as e:
            size = sum(a.nbytes for a in arrays.values())
            raise OSError(f"{path.parent}: {path.name} of {size} bytes cannot be written: {e}") from e
        # safetensors makes files that only their owner can read; a checkpoint is a file like any other.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(staging, 0o666 & ~umask)
        os.replace(staging, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an indented JSON object."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def replace_directory(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a fresh sibling directory whose files move into `directory` if the block succeeds.

    A block that fails (a full disk, Ctrl-C) leaves `directory` as it was. Other files of an
    existing directory stay.

    Raises:
      ValueError: the path names a file.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, not a directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(directory) as staging:
        staging.mkdir()
        yield staging
        if not directory.exists():
            staging.rename(directory)
            return
        for file in sorted(staging.iterdir()):
            os.replace(file, directory / file.name)


@contextlib.contextmanager
def _sibling(path: Path) -> Iterator[Path]:
    """A name beside `path` (so that a rename stays on one file system), gone afterwards."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(staging)
    try:
        yield staging
    finally:
        _remove(staging)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist, but {INDEX} names it")
    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as e:
        size = path.stat().st_size
        with path.open("rb") as file:
            pointer = file.read(len(_LFS)) == _LFS
        likely = "a pointer of Git LFS: run `git lfs pull` there" if pointer else "truncated download?"
        raise ValueError(f"{path} is not a whole safetensors file ({size} bytes; {likely}): {e}") from e


def _no_weights(directory: Path) -> str:
    names = sorted(p.name for p in directory.iterdir())
    pickles = [n for n in names if n.endswith(_PICKLES)]
    if pickles:
        one = pickles[0]
        name = f"{Path(one).stem}.safetensors" if Path(one).stem not in ("pytorch_model", "model") else WEIGHTS
        return (
            f"{directory} holds weights only as pickles ({', '.join(pickles)}). Loading a pickle can run any code "
            f"that its author put there, so they are refused. Fetch the checkpoint's .safetensors version, or convert "
            f"it with PyTorch, in a loader that runs no code: tensors = torch.load({one!r}, map_location='cpu', "
            f"weights_only=True); safetensors.torch.save_file({{k: v.clone() for k, v in tensors.items()}}, {name!r})"
        )
    shards = [n for n in names if n.endswith(".safetensors")]
    found = f"found {', '.join(shards)}, but no index" if shards else f"found {', '.join(names) or 'nothing'}"
    return f"{directory} has neither {WEIGHTS} nor {INDEX}; {found}"
