"""Short names for the code of a warpgroup's threads, where Pallas has none for what they do."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

# To shared memory, where the last is not 0.
STORE = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
STORE_TWO = "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.v2.b32 [$0], {$1, $2}; }"


class Code:
    """Short names, and where a thread is."""

    def __init__(self) -> None:
        self.i32, self.f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(utils.thread_idx(), self.c(128))
        self.thread, self.warp, self.lane = (Index(self, x) for x in (thread, *self.divided(thread, 32)))

    def c(self, value: int) -> Any:
        return arith.constant(self.i32, value)

    def divided(self, value: Any, by: int) -> tuple[Any, Any]:
        return arith.divui(value, self.c(by)), arith.remui(value, self.c(by))

    def asm(self, text: str, *args: Any, to: Any = None) -> Any:
        """A word, or a float32 where `to` is its type, of words and float32."""
        letters = ["f" if getattr(arg, "type", None) == self.f32 else "r" for arg in args]
        constraints = ",".join(["=r" if to is None else "=f", *letters])
        return llvm.inline_asm(self.i32 if to is None else to, list(args), text, constraints)

    def shuffle(self, text: str, value: Any, to: Any = None) -> Any:
        kind = self.i32 if to is None else to
        constraints = "=r,r" if to is None else "=f,f"
        return llvm.inline_asm(kind, [value], text, constraints, has_side_effects=True)

    def store(self, text: str, *args: Any) -> None:
        constraints = ",".join(["r"] * len(args)) + ",~{memory}"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), text, constraints, has_side_effects=True)

    def words(self, base: Any, at: Any, count: int) -> list[Any]:
        """From so many bytes behind a pointer."""
        pointer = utils.getelementptr(base, [at], ir.IntegerType.get_signless(8))
        loaded = llvm.load(ir.VectorType.get((count,), self.i32), pointer, alignment=4 * count)
        return [vector.extract(loaded, [], [i]) for i in range(count)]

    def float32(self, base: Any, index: Any) -> Any:
        return llvm.load(self.f32, utils.getelementptr(base, [index], self.f32), alignment=4)


class Index:
    """A number that threads compute, for formulas that are for any number."""

    def __init__(self, code: Code, value: Any) -> None:
        self.code, self.value = code, value

    def _with(self, operation: Any, other: Any) -> Index:
        other = other.value if isinstance(other, Index) else self.code.c(other)
        return Index(self.code, operation(self.value, other))

    def __floordiv__(self, other: Any) -> Index:
        return self._with(arith.divui, other)

    def __mod__(self, other: Any) -> Index:
        return self._with(arith.remui, other)

    def __mul__(self, other: Any) -> Index:
        return self._with(arith.muli, other)

    def __add__(self, other: Any) -> Index:
        return self._with(arith.addi, other)

    def __xor__(self, other: Any) -> Index:
        return self._with(arith.xori, other)

    __rmul__, __radd__ = __mul__, __add__

    def least(self, most: int) -> Index:
        """The smaller of both."""
        limit = self.code.c(most)
        small = arith.cmpi(arith.CmpIPredicate.ult, self.value, limit)
        return Index(self.code, arith.select(small, self.value, limit))
