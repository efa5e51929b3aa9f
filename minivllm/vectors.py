# Exported from chapters/19_kernels.py (27d2169d): edit the chapter.
"""Numba's ways made ours: threads, formats, and vectors that a kernel can name."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils as untyped
from numba.extending import intrinsic, models, overload, register_model
from torch import Tensor

cgutils: Any = untyped
Float = np.float32
config: Any = numba.config


# All 512 bits of a vector, where there are so many: by itself LLVM takes 256.
config.CPU_NAME = llvm.get_host_cpu_name()
config.CPU_FEATURES = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"


def has_threads() -> bool:
    """Whether Numba finds the threads of OpenMP; without them one core does all."""
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    config.THREADING_LAYER = "omp"
    return True


Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel, parallel: bool = False) -> Kernel:
    """The function as machine code, made at its first call and kept on disk."""
    rules: Any = {"fastmath": True, "error_model": "numpy", "cache": True}
    return cast(Kernel, njit(parallel=parallel, **rules)(function))


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(typing: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], ir.IntType(32))

    return types.uint32(types.float32), generate


float_of, bits_of = cast(Any, _float_of), cast(Any, _bits_of)  # 32 bits, and back


@compiled
def exp(x: Any) -> Any:
    """e**x, x held between -87 and 88: a power of 2 by its bits, and a polynomial."""
    y = min(max(x, Float(-87.0)), Float(88.0)) * Float(1.44269504)
    whole = np.floor(y + Float(0.5))
    part = y - whole
    p = Float(1.535336e-4)
    p = p * part + Float(1.339887e-3)
    p = p * part + Float(9.618437e-3)
    p = p * part + Float(5.550332e-2)
    p = p * part + Float(2.402265e-1)
    p = p * part + Float(6.931472e-1)
    p = p * part + Float(1.0)
    return p * float_of(np.uint32((whole + Float(127.0)) * Float(2**23)))


def as_array(x: Tensor) -> Any:
    """The same memory for Numba; 16-bit floats as their bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def put(array: Any, i: int, j: int, number: Any) -> None:
    """Store a float32, rounded to the nearest where only 16 bits are kept."""


@overload(put, inline="always")
def _put(array: Any, i: int, j: int, number: Any) -> Any:
    def whole(array: Any, i: int, j: int, number: Any) -> None:
        array[i, j] = number

    def half(array: Any, i: int, j: int, number: Any) -> None:
        bits = bits_of(number)
        to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        array[i, j] = np.uint16((bits + to_even) >> np.uint32(16))

    return whole if isinstance(array.dtype, types.Float) else half


FLOAT, INT, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
LOOSE = ("fast",)  # sums in any order, as in all kernels


class Vector(types.Type):
    """So many float32, side by side."""

    def __init__(self, lanes: int) -> None:
        super().__init__(f"Vector({lanes})")
        self.lanes = lanes


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A `Vector` is one value for LLVM too."""

    def __init__(self, manager: Any, kind: Vector) -> None:
        llvm_kind = ir.VectorType(FLOAT, kind.lanes)
        super().__init__(manager, kind, llvm_kind)  # type: ignore[no-untyped-call]


class Writer:
    """Writes LLVM's instructions. An array's rows may lie apart, not their numbers."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def index(self, number: int) -> Any:
        """A number, as the arguments of kernels are."""
        return self.context.get_constant(types.intp, number)

    def array(self, kind: Any, array: Any) -> Any:
        """Its parts: data, shape, strides."""
        return self.context.make_array(kind)(self.context, self.builder, array)

    def address(self, kind: Any, array: Any, i: Any, j: Any) -> Any:
        """Of array[i, j]."""
        made, b = self.array(kind, array), self.builder
        row = b.mul(i, b.extract_value(made.strides, 0))
        start = b.gep(b.bitcast(made.data, BYTE.as_pointer()), [row])
        return b.gep(b.bitcast(start, made.data.type), [j])

    def load(self, at: Any, bits: int, lanes: int) -> Any:
        """The numbers from an address on; 16 bits are the upper half of a float32."""
        b, source = self.builder, ir.VectorType(ir.IntType(bits), lanes)
        given = b.load(b.bitcast(at, source.as_pointer()), align=bits // 8)
        if bits == 16:
            wide = ir.VectorType(INT, lanes)
            given = b.shl(b.zext(given, wide), ir.Constant(wide, [16] * lanes))
        return b.bitcast(given, ir.VectorType(FLOAT, lanes))

    def store(self, vector: Any, at: Any) -> None:
        """To an address of float32."""
        at = self.builder.bitcast(at, vector.type.as_pointer())
        self.builder.store(vector, at, align=4)

    def spread(self, number: Any, lanes: int) -> Any:
        """The same in all lanes."""
        kind, zeros = ir.VectorType(number.type, lanes), ir.VectorType(INT, lanes)
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(nothing, number, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(
            one, nothing, ir.Constant(zeros, [0] * lanes)
        )

    def zero(self, lanes: int) -> Any:
        """0 in all lanes."""
        return ir.Constant(ir.VectorType(FLOAT, lanes), [0.0] * lanes)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c."""
        product = self.builder.fmul(a, b, flags=LOOSE)
        return self.builder.fadd(product, c, flags=LOOSE)

    def sum(self, vector: Any) -> Any:
        """Of the numbers of a vector: its halves are added, and theirs, to the end."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            kind = ir.VectorType(INT, lanes)
            halves = [
                ir.Constant(kind, [*range(start, start + lanes)])
                for start in (0, lanes)
            ]
            parts = [self.builder.shuffle_vector(vector, vector, h) for h in halves]
            vector = self.builder.fadd(*parts, flags=LOOSE)
        return self.builder.extract_element(vector, ir.Constant(INT, 0))

    def ask(self, at: Any) -> None:
        """Let memory bring what is at an address, and go on."""
        pointer, module = BYTE.as_pointer(), self.builder.module
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
        function = cgutils.get_or_insert_function(module, kind, "llvm.prefetch.p0")
        reading, near, data = (ir.Constant(INT, n) for n in (0, 3, 1))
        at = self.builder.bitcast(at, pointer)
        self.builder.call(function, [at, reading, near, data])


Write = Callable[[Writer, Sequence[Any]], Any]


def written(result: Any, kinds: Sequence[Any], write: Write) -> Any:
    """What Numba wants of an intrinsic: types, and who writes the instructions."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value = write(Writer(context, builder), given)
        return context.get_dummy_value() if value is None else value

    return result(*kinds), generate


@intrinsic(prefer_literal=True)
def _zero(typing: Any, lanes: Any) -> Any:
    many = lanes.literal_value
    return written(Vector(many), [lanes], lambda writer, given: writer.zero(many))


@intrinsic(prefer_literal=True)
def _load(typing: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    many, bits = lanes.literal_value, array.dtype.bitwidth

    def write(writer: Writer, given: Sequence[Any]) -> Any:
        return writer.load(writer.address(array, *given[:3]), bits, many)

    return written(Vector(many), [array, types.intp, types.intp, lanes], write)


@intrinsic(prefer_literal=True)
def _spread(typing: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    many = lanes.literal_value

    def write(writer: Writer, given: Sequence[Any]) -> Any:
        at = writer.address(array, *given[:3])
        return writer.spread(writer.builder.load(at), many)

    return written(Vector(many), [array, types.intp, types.intp, lanes], write)


@intrinsic
def _store(typing: Any, array: Any, i: Any, j: Any, vector: Any) -> Any:
    def write(writer: Writer, given: Sequence[Any]) -> None:
        writer.store(given[3], writer.address(array, *given[:3]))

    return written(types.void, [array, types.intp, types.intp, vector], write)


@intrinsic
def _put_sum(typing: Any, array: Any, i: Any, j: Any, vector: Any) -> Any:
    def write(writer: Writer, given: Sequence[Any]) -> None:
        at = writer.address(array, *given[:3])
        writer.builder.store(writer.sum(given[3]), at)

    return written(types.void, [array, types.intp, types.intp, vector], write)


@intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    return written(c, [c, c, c], lambda writer, given: writer.multiply_add(*given))


@intrinsic
def _larger(typing: Any, a: Any, b: Any) -> Any:
    def write(writer: Writer, given: Sequence[Any]) -> Any:
        kind, module = ir.FunctionType(FLOAT, [FLOAT] * 2), writer.builder.module
        function = module.declare_intrinsic("llvm.maxnum", [FLOAT], kind)
        return writer.builder.call(function, given, fastmath=LOOSE)

    return written(types.float32, [types.float32] * 2, write)


@intrinsic
def _prefetch(typing: Any, array: Any, i: Any, j: Any) -> Any:
    def write(writer: Writer, given: Sequence[Any]) -> None:
        writer.ask(writer.address(array, *given))

    return written(types.void, [array, types.intp, types.intp], write)


zero, load, spread, store = cast(Any, (_zero, _load, _spread, _store))
fma, put_sum, larger, prefetch = cast(Any, (_fma, _put_sum, _larger, _prefetch))


def widened(weight: Any, first: int, room: Any) -> Any:
    """Rows of a weight from `first` on, as float32: an array, and where they begin."""


@overload(widened)
def _widened(weight: Any, first: int, room: Any) -> Any:
    def whole(weight: Any, first: int, room: Any) -> Any:
        return weight, first

    def half(weight: Any, first: int, room: Any) -> Any:
        for r in range(len(room)):
            for i in range(0, room.shape[1], 16):
                store(room, r, i, load(weight, first + r, i, 16))
        return room, 0

    return whole if isinstance(weight.dtype, types.Float) else half


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any,
    rows: Any,
    first: Any,
    columns: Any,
    lane: Any,
    out: Any,
    place: Any,
    coming: Any,
    row: Any,
    shape: Any,
) -> Any:
    """`shape` is (rows, lanes); memory brings `coming` from `row` on, on and on."""
    many, lanes = (each.literal_value for each in shape)
    bits = coming.dtype.bitwidth

    def write(writer: Writer, given: Sequence[Any]) -> None:
        w, start, x, at_lane, told, to, later, next_row, _ = given
        index, b = writer.index, writer.builder
        inputs = b.extract_value(writer.array(rows, w).shape, 1)
        none = writer.zero(lanes)
        totals = [cgutils.alloca_once_value(b, none) for _ in range(many)]
        with cgutils.for_range_slice(b, index(0), inputs, index(2), inc=True) as (i, _):
            for k in range(2):
                at = writer.address(columns, x, b.add(i, index(k)), at_lane)
                taken = writer.load(at, 32, lanes)
                for r, total in enumerate(totals):
                    at = writer.address(
                        rows, w, b.add(start, index(r)), b.add(i, index(k))
                    )
                    weight = writer.spread(b.load(at), lanes)
                    b.store(writer.multiply_add(weight, taken, b.load(total)), total)
            for k in range(0, 2 * many, 512 // bits):
                j = b.add(b.mul(i, index(many)), index(k))
                writer.ask(writer.address(coming, later, next_row, j))
        for r, total in enumerate(totals):
            at = writer.address(out, told, b.add(to, index(r)), at_lane)
            writer.store(b.load(total), at)

    i = types.intp
    kinds = [rows, i, columns, i, out, i, coming, i, shape]
    return written(types.void, kinds, write)


tile = cast(Any, _tile)
