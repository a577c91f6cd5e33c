"""Compiled executables on disk, found by what they were made from, so that a restart traces nothing.

JAX's own compilation cache is keyed by the lowered program, and tracing and lowering take most of a warm start.
Here the key is everything that tracing depends on: the sources of what is traced, the versions below it, the
device, JAX's configuration, and the traced function with all that it closes over. Where something of that cannot
be described, nothing is stored. Must not know engines or models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import pickle
import platform
import shutil
import sys
import tempfile
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

_log = logging.getLogger(__name__)
#: Modules and packages that hold all traced code; they import nothing else of the project.
SOURCES = ("jaxspec.models", "jaxspec.speculation", "jaxspec.cache", "jaxspec.tier", "jaxspec.sizes", "pallas_kernels")
#: Packages whose version stands for their sources.
_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
#: Options of JAX that no program depends on.
_SILENT = (
    "jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log", "jax_debug_log",
    "jax_explain", "jax_traceback", "jax_dump",
)  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS")
#: Environments (versions of all of the above) whose executables are kept.
_KEPT = 4


class IndescribableError(TypeError):
    """A value whose effect on tracing cannot be told from the outside."""


class Fingerprints:
    """Digests that are equal for values that trace alike, in every process. Not thread-safe."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Any, bytes]] = {}  # with the value, so that its id is not used again
        self._open: dict[int, int] = {}

    def __call__(self, value: Any) -> str:
        """The digest of a value and all it holds.

        Raises:
          IndescribableError: it holds arrays (constants of the traced program), or objects of classes whose sources
            are not part of the environment's key.
        """
        return self._digest(value).hex()

    def _digest(self, value: Any) -> bytes:
        kind = type(value)
        digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}:".encode())
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            digest.update(repr(value).encode())
            return digest.digest()
        if id(value) in self._digests:
            return self._digests[id(value)][1]
        if id(value) in self._open:
            return f"the one {len(self._open) - self._open[id(value)]} above".encode()
        self._open[id(value)] = len(self._open)
        try:
            for part in _parts(value, kind):
                digest.update(self._digest(part))
        finally:
            del self._open[id(value)]
        self._digests[id(value)] = value, digest.digest()
        return digest.digest()


def _parts(value: Any, kind: type) -> Sequence[Any]:
    """What to describe a value by."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.shape, str(value.dtype), value.weak_type, value.sharding
    if isinstance(value, jax.Array | np.ndarray):
        raise IndescribableError(f"an array of shape {value.shape}")
    if isinstance(value, np.dtype | np.generic):
        return (repr(value),)
    if isinstance(value, jax.tree_util.PyTreeDef):
        if " at 0x" in (text := str(value)):
            raise IndescribableError(f"a tree of {text[:200]}")
        return (text,)
    if isinstance(value, jax.sharding.Mesh):
        return value.axis_names, value.devices.shape, [d.id for d in value.devices.flat], str(value.axis_types)
    if isinstance(value, jax.sharding.NamedSharding):
        return value.mesh, str(value.spec), value.memory_kind
    if isinstance(value, Mapping):
        return [part for item in sorted(value.items(), key=lambda item: repr(item[0])) for part in item]
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        _known(value.__module__, value)
        name = f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return name, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, type | types.BuiltinFunctionType):
        _known(value.__module__, value)
        return (f"{value.__module__}.{value.__qualname__}",)
    _known(kind.__module__, value)
    if isinstance(value, enum.Enum):
        return (value.name,)
    if dataclasses.is_dataclass(value):
        return [part for field in dataclasses.fields(value) for part in (field.name, getattr(value, field.name))]
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)]
    held = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    if not held:
        raise IndescribableError(f"an object of {kind.__module__}.{kind.__qualname__}")
    return (held,)


def _known(module: str | None, value: Any) -> None:
    allowed = (*SOURCES, *_VERSIONED, "builtins", "types", "typing", "collections", "functools")
    if not f"{module}.".startswith(tuple(f"{name}." for name in allowed)):
        raise IndescribableError(f"{value!r} of {module}")


@functools.cache
def source_digest() -> str:
    """A digest of every source file that traced functions come from."""
    digest = hashlib.sha256()
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin)
        for path in sorted(root.parent.rglob("*.py")) if root.name == "__init__.py" else [root]:
            digest.update(f"{name}/{path.relative_to(root.parent)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """What a program compiled for this host's CPU may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()} {flags}"


def _environment(devices: Sequence[Any]) -> str:
    first = devices[0]
    options = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_SILENT)}
    versions = [(name, importlib.metadata.version(name)) for name in _VERSIONED]
    where = (first.platform, first.client.platform_version, first.device_kind, [d.id for d in devices])
    host = _processor() if first.platform == "cpu" else platform.machine()
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    return Fingerprints()([source_digest(), sys.version, versions, where, host, variables, options])


_keeping = threading.Lock()
#: How many `kept_once` are open, which may overlap in any way, and the option's value before the first.
_keepers, _written_from = 0, 0.0


@contextlib.contextmanager
def kept_once() -> Iterator[None]:
    """JAX's own cache is not written meanwhile: it would hold the same programs again."""
    global _keepers, _written_from
    name = "jax_persistent_cache_min_compile_time_secs"
    with _keeping:
        if not _keepers:
            _written_from = jax.config.values[name]
            jax.config.update(name, math.inf)
        _keepers += 1
    try:
        yield
    finally:
        with _keeping:
            _keepers -= 1
            if not _keepers:
                jax.config.update(name, _written_from)


class _Hits(threading.local):
    """Programs that this thread has got from JAX's cache. They are not stored again: on CPUs their code is lost."""

    count = 0

    def listen(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.count += 1


_hits = _Hits()
jax.monitoring.register_event_listener(_hits.listen)


def _check_owner(directory: Path) -> None:
    if not hasattr(os, "geteuid"):
        return
    info = directory.stat()
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise PermissionError(f"{directory} must belong to this user and be writable by nobody else")


class ExecutableStore:
    """Executables of one environment in one directory. Thread-safe, and safe between processes.

    Args:
      directory: made where it is missing. What lies there is run, so nothing is read or written where somebody else
        could have put it: it must belong to this user or to root, and be writable by its owner alone. One that cannot
        be written is read.
      devices: what the executables run on, in the mesh's order.
    """

    def __init__(self, directory: Path, devices: Sequence[Any]):
        self._devices = list(devices)
        self._directory: Path | None = directory / _environment(devices)[:32]
        self._failed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(self._directory)
        except OSError as e:
            _log.warning("executables are not kept: %s", e)
            self._directory = None
            return
        try:
            os.utime(self._directory)
            known = sorted(
                (d for d in directory.iterdir() if d.is_dir()), key=lambda d: d.stat().st_mtime, reverse=True
            )
        except OSError:  # read-only
            return
        for old in known[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def __contains__(self, key: object) -> bool:
        """Whether something is stored under a key."""
        return self._directory is not None and (self._directory / str(key)).exists()

    def get(self, key: str, args: Sequence[Any], compile: Callable[[], Any]) -> Any:
        """The executable of a key: the stored one, else what `compile` returns, which is then stored.

        Args:
          args: what it takes, as shapes.
        """
        executable = self._load(key, args)
        if executable is None:
            hits = _hits.count
            executable = compile()
            if _hits.count == hits:
                self._save(key, executable, args)
        return executable

    def _load(self, key: str, args: Sequence[Any]) -> Any | None:
        if self._directory is None:
            return None
        path = self._directory / key
        try:
            program, out = pickle.loads(zlib.decompress(path.read_bytes()))
            structures = jax.tree.structure((tuple(args), {})), jax.tree.structure(out)
            return deserialize_and_load(program, *structures, self._devices[0].client, self._devices)
        except FileNotFoundError:
            return None
        except Exception as e:  # whatever is wrong with a file, compiling mends it
            _log.warning("the stored executable %s cannot be loaded and is compiled anew: %s", path.name, e)
            return None

    def _save(self, key: str, compiled: Any, args: Sequence[Any]) -> None:
        if self._directory is None:
            return
        try:
            program, ins, outs = serialize(compiled)
            if ins != jax.tree.structure((tuple(args), {})):
                raise ValueError("its arguments have another structure than those it was traced with")
            # A tree's structure cannot be written, but a tree of numbers can.
            blob = zlib.compress(pickle.dumps((program, jax.tree.unflatten(outs, range(outs.num_leaves)))), level=1)
        except Exception as e:  # a backend that cannot, an unusual type: only the next start is slower
            _log.debug("the executable %s cannot be stored: %s", key, e)
            return
        partial: Path | None = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                partial = Path(file.name)
                file.write(blob)
            partial.replace(self._directory / key)
        except OSError as e:
            if partial is not None:
                partial.unlink(missing_ok=True)
            _log.log(
                logging.DEBUG if self._failed else logging.WARNING, "the executable %s cannot be stored: %s", key, e
            )
            self._failed = True
