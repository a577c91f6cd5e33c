"""A warpgroup's registers on NumPy: what `unpack`, `digit_products`, `lines` and `mosaic_scores` write for its 128
threads is computed, not compiled.

Stands in for the modules by which they build code. Values are arrays with a thread along the first axis; addresses are
offsets into one array of bytes, the shared memory.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

THREADS = np.arange(128, dtype=np.uint32)
_DTYPES = {"i8": np.uint8, "i32": np.uint32, "i64": np.uint64, "f32": np.float32, "bf16": ml_dtypes.bfloat16}


class Ref:
    """An array in memory, at an offset; its rows are so many values apart, or one behind the other."""

    def __init__(self, shape: tuple[int, ...], element: str, at: int, pitch: int | None = None) -> None:
        strides = [shape[-1] if pitch is None else pitch, 1]
        self.type = SimpleNamespace(
            shape=list(shape), element_type=element, get_strides_and_offset=lambda: (strides, 0)
        )  # fmt: skip
        self.at = at


class Warpgroup:
    """128 threads over a shared memory of so many bytes."""

    def __init__(self, size: int) -> None:
        self.memory, self.used = np.zeros(size, np.uint8), 0
        self.copied: list[tuple[int, int]] = []  # to and from where, 16 bytes each

    def put(self, image: np.ndarray, shape: tuple[int, ...], element: str) -> Ref:
        """Places bytes as they lie."""
        flat = np.ascontiguousarray(image).view(np.uint8).reshape(-1)
        at, self.used = self.used, self.used + (flat.size + 1023) // 1024 * 1024
        self.memory[at : at + flat.size] = flat
        return Ref(shape, element, at)

    def read(self, address: np.ndarray, dtype: Any, count: int = 1) -> np.ndarray:
        """So many values from an address of each thread."""
        size = np.dtype(dtype).itemsize * count
        assert (address.astype(np.int64) + size <= self.used).all(), "out of shared memory"
        found = self.memory[address[:, None].astype(np.int64) + np.arange(size)]
        return found.view(dtype).reshape(len(address), count)

    def install(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        """Has a module compute here."""
        one = lambda value, dtype=np.uint32: np.full(128, value, dtype)
        number = lambda type_, value: one(value & 0xFFFFFFFF if type_ == "i32" else value, _DTYPES[type_])
        types = SimpleNamespace(
            IntegerType=SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
            F32Type=SimpleNamespace(get=lambda: "f32"), BF16Type=SimpleNamespace(get=lambda: "bf16"),
            VectorType=SimpleNamespace(get=lambda shape, of: (shape[0], of)),
            MemRefType=lambda type_: type_, Type=SimpleNamespace(parse=lambda text: text),
        )  # fmt: skip
        arith = SimpleNamespace(
            constant=number, addi=np.add, muli=np.multiply, remui=np.remainder, divui=np.floor_divide,
            xori=np.bitwise_xor, andi=np.bitwise_and, shli=np.left_shift, shrui=np.right_shift,
            CmpIPredicate=SimpleNamespace(ult=np.less, eq=np.equal), cmpi=lambda operation, a, b: operation(a, b),
            select=np.where,
            extui=lambda type_, x: x.astype(_DTYPES[type_]),
        )  # fmt: skip
        llvm = SimpleNamespace(
            load=self._load, inline_asm=self._asm, bitcast=self._bitcast,
            ptrtoint=lambda _, pointer: pointer, extractvalue=lambda _, value, at: value[at[0]],
            mlir_undef=lambda type_: [None] * type_[0],
            StructType=SimpleNamespace(get_literal=lambda kinds: kinds),
        )  # fmt: skip
        vector = SimpleNamespace(extract=lambda value, _, at: value[at[0]], insert=self._insert)
        utils = SimpleNamespace(
            thread_idx=lambda: THREADS, memref_ptr=lambda ref: one(ref.at),
            getelementptr=lambda base, at, kind: base + at[0] * np.uint32(np.dtype(_DTYPES[kind]).itemsize),
            bitwidth=lambda kind: 8 * np.dtype(_DTYPES[kind]).itemsize,
        )  # fmt: skip
        layouts = SimpleNamespace(
            WGMMA_LAYOUT=mgpu.WGMMA_LAYOUT, WGStridedFragLayout=mgpu.WGStridedFragLayout,
            FragmentedArray=lambda _registers, **_: _registers,
        )  # fmt: skip
        for name, own in dict(ir=types, arith=arith, llvm=llvm, vector=vector, utils=utils, mgpu=layouts).items():
            if hasattr(module, name):
                patch.setattr(module, name, own)

    def _load(self, type_: Any, pointer: np.ndarray, alignment: int) -> Any:
        assert (pointer % alignment == 0).all()
        if isinstance(type_, tuple):
            return list(self.read(pointer, _DTYPES[type_[1]], type_[0]).T)
        return self.read(pointer, _DTYPES[type_])[:, 0]

    def _store(self, pointer: np.ndarray, *words: np.ndarray) -> None:
        """Of the threads whose last word is not 0 the others."""
        own, values = words[-1] != 0, np.stack(words[:-1], axis=1).view(np.uint8)
        assert (pointer % values.shape[1] == 0).all() and (pointer < self.used).all()
        self.memory[pointer[own, None].astype(np.int64) + np.arange(values.shape[1])] = values[own]

    @staticmethod
    def _bitcast(type_: Any, value: Any) -> Any:
        if type_ == "f32":
            return value.view(np.float32)
        if type_ == (2, "bf16"):
            return value
        return [value.view(np.float32)] if type_ == (1, "f32") and not isinstance(value, list) else value

    @staticmethod
    def _insert(value: Any, into: list[Any], _: Any, at: list[int]) -> list[Any]:
        return [value if i == at[0] else old for i, old in enumerate(into)]

    def _asm(self, _: Any, args: list[Any], text: str, *__: Any, **___: Any) -> Any:
        if "cp.async" in text:
            to, source, there = args
            self.copied += [(int(a), int(b)) for a, b, own in zip(to, source, there, strict=True) if own]
            return None
        if "st.shared" in text:
            return self._store(*args)
        if text.startswith("ldmatrix"):
            return self._ldmatrix(args[0])
        if text.startswith("shfl"):
            kind, other = text.split(".")[2], int(text.split(",")[2])
            lanes = THREADS // 4 * 4 + other if kind == "idx" else THREADS ^ other
            return args[0][lanes]
        if text.startswith("mma.sync"):
            return (_whole_mma if "s8" in text else _mma)(args[:4], args[4:6], args[6:])
        return _run(text, args)

    def _ldmatrix(self, address: np.ndarray) -> list[np.ndarray]:
        """Four pieces of 8 rows of 16 bytes, whose addresses eight threads of a warp have each."""
        rows = self.read(address, np.uint32, 4).reshape(4, 4, 8, 4)  # [warp, piece, row, pair]
        return [rows[:, piece].reshape(-1) for piece in range(4)]


def _pairs(words: np.ndarray) -> np.ndarray:
    """Two values of bfloat16 a word, as float32 [..., 2]."""
    return np.ascontiguousarray(words).view(ml_dtypes.bfloat16).reshape(*words.shape, 2).astype(np.float32)


def _mma(a: list[Any], b: list[Any], c: list[Any]) -> list[np.ndarray]:
    """m16n8k16, each warp by itself."""
    wide_a, wide_b = (_pairs(np.stack(x)).reshape(len(x), 4, 8, 4, 2) for x in (a, b))  # [.., warp, lane / 4, % 4, 2]
    rows = np.zeros((4, 16, 16), np.float32)
    columns = np.zeros((4, 16, 8), np.float32)
    for i in range(4):  # the rows' upper half, then the inputs'
        rows[:, i % 2 * 8 : i % 2 * 8 + 8, i // 2 * 8 : i // 2 * 8 + 8] = wide_a[i].reshape(4, 8, 8)
    for i in range(2):
        columns[:, i * 8 : i * 8 + 8] = wide_b[i].reshape(4, 8, 8).transpose(0, 2, 1)
    sums = (rows @ columns).reshape(4, 2, 8, 4, 2)
    return [c[2 * half + j] + sums[:, half, :, :, j].reshape(-1) for half in range(2) for j in range(2)]


def _whole_mma(a: list[Any], b: list[Any], c: list[Any]) -> list[np.ndarray]:
    """m16n8k32 of bytes, each warp by itself."""
    bytes_a, bytes_b = (
        np.ascontiguousarray(np.stack(x)).view(np.int8).astype(np.int32).reshape(len(x), 4, 8, 16) for x in (a, b)
    )  # [.., warp, lane / 4, lane % 4 and byte]
    rows, columns = np.zeros((4, 16, 32), np.int32), np.zeros((4, 32, 8), np.int32)
    for i in range(4):
        rows[:, i % 2 * 8 : i % 2 * 8 + 8, i // 2 * 16 : i // 2 * 16 + 16] = bytes_a[i]
    for i in range(2):
        columns[:, i * 16 : i * 16 + 16] = bytes_b[i].transpose(0, 2, 1)
    sums = (rows @ columns).reshape(4, 2, 8, 4, 2).view(np.uint32)
    return [c[2 * half + j] + sums[:, half, :, :, j].reshape(-1) for half in range(2) for j in range(2)]


def _run(text: str, args: list[Any]) -> np.ndarray:
    """A few lines of PTX: $0 is the result, $1 and so on are given."""
    values: dict[str, Any] = {f"${i + 1}": arg for i, arg in enumerate(args)}
    literal = lambda name: (int(name[2:], 16) if name.startswith("0f") else int(name, 0)) & 0xFFFFFFFF
    read = lambda name: values[name] if name in values else np.full(128, literal(name), np.uint32)
    for line in re.sub(r"[{}\n]", " ", text).split(";"):
        if not (words := line.replace(",", " ").split()) or words[0] == ".reg":
            continue
        name, target, *names = words
        x = [read(n) for n in names]
        values[target] = _OPERATIONS[name](*x)
    return values["$0"]


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    found = np.zeros_like(a)
    for i in range(4):
        choice = int(selector[0]) >> (4 * i) & 15
        byte = (both >> np.uint64(8 * (choice & 7)) & 0xFF).astype(np.uint32)
        found |= (np.where(byte & 0x80, 0xFF, 0).astype(np.uint32) if choice & 8 else byte) << np.uint32(8 * i)
    return found


def _halves(operation: Any) -> Any:
    """On both values of bfloat16 of a word, each rounded."""
    return lambda a, b: (
        operation(_pairs(a), _pairs(b)).astype(ml_dtypes.bfloat16).reshape(len(a), 2).view(np.uint32)[:, 0]
    )


def _words(operation: Any, dtype: Any = np.uint32, result: Any = None) -> Any:
    """On words of whatever type they were."""
    return lambda *args: operation(*(np.ascontiguousarray(x).view(dtype) for x in args)).astype(result or dtype)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c


def _power(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.exp2(x)


def _larger_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a.view(np.uint16), b.view(np.uint16)).view(np.uint32)


_OPERATIONS = {
    "add.u32": _words(np.add), "sub.u32": _words(np.subtract), "max.u32": _words(np.maximum),
    "xor.b32": _words(np.bitwise_xor), "max.u16x2": _words(_larger_halves),
    "cvt.rn.f32.s32": _words(lambda a: a, np.int32, np.float32), "fma.rn.f32": _words(_fused, np.float32),
    "mul.rn.f32": _words(np.multiply, np.float32), "add.rn.f32": _words(np.add, np.float32),
    "lop3.b32": _lop3, "prmt.b32": _prmt, "sub.bf16x2": _halves(np.subtract), "mul.bf16x2": _halves(np.multiply),
    "mov.b32": lambda a: a, "and.b32": np.bitwise_and, "shl.b32": np.left_shift, "shr.u32": np.right_shift,
    "mad.lo.s32": lambda a, b, c: a * b + c, "ex2.approx.ftz.f32": _power, "setp.ne.u32": np.not_equal,
    "vote.sync.any.pred": lambda x, _: np.repeat(x.reshape(4, 32).any(axis=1), 32),
    "selp.u32": lambda a, b, which: np.where(which, a, b),
}  # fmt: skip
