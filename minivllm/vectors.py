# Exported from chapters/19_kernels.py (f2d59ed4): edit the chapter.
"""Numba's ways made ours: threads, formats, and vectors that a kernel can name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from filelock import FileLock
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


Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel, inline: str = "never") -> Kernel:
    """The function as machine code, made at its first call and kept on disk."""
    rules: Any = {"fastmath": True, "error_model": "numpy", "cache": True}
    label = label_of(function)
    function.__qualname__ += "_" + label[:16]  # else two may bear one name for a linker
    made: Any = njit(**rules | {"inline": inline})(function)
    kept = made._cache
    kept._index_key = lambda sig, gen: (sig, gen.magic_tuple(), label)
    kept.save_overload = one_at_a_time(kept.save_overload, Path(kept.cache_path))
    return cast(Kernel, made)


def one_at_a_time(save: Callable[..., None], folder: Path) -> Callable[..., None]:
    """Saves for one process after the other: two would choose the same file's name."""

    def save_alone(*given: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "kernels.lock"):
            save(*given)

    return save_alone


@cache
def hash_of(file: str) -> str:
    """Of what is in a file, or of nothing where code has none."""
    path = Path(file)
    return sha256(path.read_bytes() if path.exists() else b"").hexdigest()


def label_of(function: Callable[..., Any]) -> str:
    """The same for the same code in each process, and another for any other.

    Numbers that the code finds in its module count, and the two files. Kernels that it
    takes from further files do not.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    used = [label_of(x.py_func) if hasattr(x, "py_func") else repr(x) for x in cells]
    code = function.__code__
    files = hash_of(__file__), hash_of(code.co_filename)
    named = [(name, function.__globals__.get(name)) for name in code.co_names]
    kinds: Any = int | float | str | tuple | np.generic
    plain = [pair for pair in named if isinstance(pair[1], kinds)]
    told = files, HAS_TEAM, parts_of(code), plain, *used
    return sha256(repr(told).encode()).hexdigest()


def parts_of(code: CodeType) -> tuple[object, ...]:
    """Instructions, names and constants; of functions within it too."""
    inner = [parts_of(x) if isinstance(x, CodeType) else x for x in code.co_consts]
    return code.co_code, code.co_names, *inner


TEAM, CLOCK = "GOMP_parallel", "omp_get_wtime"


def has_team() -> bool:
    """Whether PyTorch's threads are OpenMP's and can be called; else one core works."""
    library = ctypes.CDLL(torch._C.__file__)  # and all that it has loaded
    found = [getattr(library, name, None) for name in (TEAM, CLOCK)]
    for name, function in zip((TEAM, CLOCK), found, strict=True):
        if function is not None:
            address = ctypes.cast(function, ctypes.c_void_p).value
            llvm.add_symbol(name, address)
    return None not in found


HAS_TEAM = has_team()


@intrinsic
def _hand_out(typing: Any, part: Any, number: Any, given: Any) -> Any:
    """part(i, *given) for each i below a number, handed out to the threads."""
    kinds = (types.intp, *given)
    signature = part.get_call_type(typing, kinds, {})
    made = part.dispatcher.overloads[signature.args]

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        context.active_code_library.add_linking_library(made.library)
        write_team(context, builder, values[1:], made.fndesc, signature)
        return context.get_dummy_value()

    return types.void(part, types.intp, given), generate


def write_team(
    context: Any, builder: Any, values: Any, function: Any, signature: Any
) -> None:
    """Pack what is given; a function unpacks it and does its parts; the team is called.

    A part that fails, for want of memory, raises a flag that is looked at in the end.
    """
    module, number, count = builder.module, ir.IntType(32), values[0].type
    failed = cgutils.alloca_once_value(builder, ir.Constant(ir.IntType(1), 0))
    taken = cgutils.alloca_once_value(builder, ir.Constant(count, 0))
    packed = cgutils.pack_struct(builder, [*values, failed, taken])
    room = cgutils.alloca_once_value(builder, packed)
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    member = ir.Function(module, kind, module.get_unique_name("member"))
    member.linkage = "internal"
    own = ir.IRBuilder(member.append_basic_block())
    unpacked = own.load(own.bitcast(member.args[0], room.type))
    end, given, flag, next_one = cgutils.unpack_tuple(own, unpacked, 4)
    items, call = cgutils.unpack_tuple(own, given), context.call_internal_no_propagate
    loop = own.append_basic_block()
    own.branch(loop)
    own.position_at_end(loop)
    i = own.atomic_rmw("add", next_one, ir.Constant(count, 1), "monotonic")
    with own.if_then(own.icmp_signed("<", i, end)):
        status, _ = call(own, function, signature, [i, *items])
        with own.if_then(status.is_error, likely=False):
            own.store(ir.Constant(ir.IntType(1), 1), flag)
        own.branch(loop)
    own.ret_void()
    few = builder.icmp_signed("<", values[0], ir.Constant(count, 2))
    as_many_as_set, alone = ir.Constant(number, 0), ir.Constant(number, 1)
    threads = builder.select(few, alone, as_many_as_set)
    packet = builder.bitcast(room, pointer)
    asked = [member, packet, threads, as_many_as_set]
    call_outside(builder, TEAM, ir.VoidType(), asked)
    with builder.if_then(builder.load(failed), likely=False):
        told = ("a part of a kernel failed",)
        context.call_conv.return_user_exc(builder, MemoryError, told)


def call_outside(builder: Any, name: str, result: Any, given: Sequence[Any]) -> Any:
    """A call of a function that is not Numba's."""
    kind = ir.FunctionType(result, [value.type for value in given])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, name), given
    )


hand_out = cast(Any, _hand_out)


def in_parts(part: Callable[..., None]) -> Callable[..., None]:
    """A kernel that does part(i, *given) for each i below its first argument."""
    one = compiled(part)

    def by_all(number: Any, *given: Any) -> None:
        hand_out(one, number, given)

    def by_one(number: Any, *given: Any) -> None:
        for i in range(number):
            one(i, *given)

    return compiled(by_all if HAS_TEAM else by_one)


@intrinsic
def _now(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        if not HAS_TEAM:
            return context.get_constant(types.float64, 0.0)
        return call_outside(builder, CLOCK, ir.DoubleType(), [])

    return types.float64(), generate


now = cast(Any, _now)  # seconds, by the team's clock; without a team there is none


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
    rest = y - whole
    p = Float(1.535336e-4)
    p = p * rest + Float(1.339887e-3)
    p = p * rest + Float(9.618437e-3)
    p = p * rest + Float(5.550332e-2)
    p = p * rest + Float(2.402265e-1)
    p = p * rest + Float(6.931472e-1)
    p = p * rest + Float(1.0)
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
LINE_BITS = 512  # what memory brings at a time


class Vector(types.Type):
    """So many float32, side by side."""

    def __init__(self, width: int) -> None:
        super().__init__(f"Vector({width})")
        self.width = width


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A `Vector` is one value for LLVM too."""

    def __init__(self, manager: Any, kind: Vector) -> None:
        llvm_kind = ir.VectorType(FLOAT, kind.width)
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

    def load(self, at: Any, bits: int, width: int) -> Any:
        """The numbers from an address on; 16 bits are the upper half of a float32."""
        b, source = self.builder, ir.VectorType(ir.IntType(bits), width)
        given = b.load(b.bitcast(at, source.as_pointer()), align=bits // 8)
        if bits == 16:
            words = ir.VectorType(INT, width)
            given = b.shl(b.zext(given, words), ir.Constant(words, [16] * width))
        return b.bitcast(given, ir.VectorType(FLOAT, width))

    def store(self, vector: Any, at: Any) -> None:
        """To an address of float32."""
        at = self.builder.bitcast(at, vector.type.as_pointer())
        self.builder.store(vector, at, align=4)

    def ask(self, at: Any) -> None:
        """Let memory bring what is at an address, and go on."""
        reading, near, data = (ir.Constant(INT, n) for n in (0, 3, 1))
        given = [self.builder.bitcast(at, BYTE.as_pointer()), reading, near, data]
        call_outside(self.builder, "llvm.prefetch.p0", ir.VoidType(), given)

    def spread(self, number: Any, width: int) -> Any:
        """The same, everywhere in a vector."""
        kind, zeros = ir.VectorType(number.type, width), ir.VectorType(INT, width)
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(nothing, number, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(
            one, nothing, ir.Constant(zeros, [0] * width)
        )

    def zero(self, width: int) -> Any:
        """0, everywhere in a vector."""
        return ir.Constant(ir.VectorType(FLOAT, width), [0.0] * width)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c."""
        product = self.builder.fmul(a, b, flags=LOOSE)
        return self.builder.fadd(product, c, flags=LOOSE)

    def sums(self, vectors: Sequence[Any]) -> Any:
        """One number for each of some vectors, side by side.

        They are a power of two, and not more than a vector is wide.

        Halves are added, and theirs. Two vectors of halves are one vector, so the work
        shrinks as their number does.
        """
        vectors, block = list(vectors), vectors[0].type.count
        shuffle, add = self.builder.shuffle_vector, self.builder.fadd
        while block > 1:
            block, alone = block // 2, len(vectors) == 1
            pairs = [*zip(vectors[::2], vectors[not alone :: 2], strict=True)]
            width = vectors[0].type.count // (1 + alone)
            starts = range(0, 2 * width, 2 * block)
            left = [start + k for start in starts for k in range(block)]
            kind = ir.VectorType(INT, width)
            chosen = [ir.Constant(kind, [i + by for i in left]) for by in (0, block)]
            halves = [[shuffle(a, b, which) for which in chosen] for a, b in pairs]
            vectors = [add(a, b, flags=LOOSE) for a, b in halves]
        return vectors[0]


Write = Callable[[Writer, Sequence[Any]], Any]


def written(result: Any, kinds: Sequence[Any], write: Write) -> Any:
    """What Numba wants of an intrinsic: types, and who writes the instructions."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value = write(Writer(context, builder), given)
        return context.get_dummy_value() if value is None else value

    return result(*kinds), generate


@intrinsic(prefer_literal=True)
def _load(typing: Any, array: Any, i: Any, j: Any, width: Any) -> Any:
    many, bits = width.literal_value, array.dtype.bitwidth

    def write(writer: Writer, given: Sequence[Any]) -> Any:
        return writer.load(writer.address(array, *given[:3]), bits, many)

    return written(Vector(many), [array, types.intp, types.intp, width], write)


@intrinsic
def _store(typing: Any, array: Any, i: Any, j: Any, vector: Any) -> Any:
    def write(writer: Writer, given: Sequence[Any]) -> None:
        writer.store(given[3], writer.address(array, *given[:3]))

    return written(types.void, [array, types.intp, types.intp, vector], write)


@intrinsic
def _larger(typing: Any, a: Any, b: Any) -> Any:
    def write(writer: Writer, given: Sequence[Any]) -> Any:
        kind, module = ir.FunctionType(FLOAT, [FLOAT] * 2), writer.builder.module
        function = module.declare_intrinsic("llvm.maxnum", [FLOAT], kind)
        return writer.builder.call(function, given, fastmath=LOOSE)

    return written(types.float32, [types.float32] * 2, write)


load, store, larger = cast(Any, (_load, _store, _larger))

AHEAD = 8  # slots: far enough to arrive in time, near enough to be there still


class Reader:
    """Writes the reads of a head in a memory's slots, and asks for those to come."""

    def __init__(
        self,
        writer: Writer,
        memory: tuple[Any, Any],
        slots: tuple[Any, Any],
        column: Any,
    ) -> None:
        self.writer, self.column = writer, column
        self.kind, self.memory = memory
        self.slots = writer.array(*slots)
        self.number = writer.builder.extract_value(self.slots.shape, 0)

    def slot(self, i: Any, further: int) -> Any:
        """The one so much further than the i-th, or the last."""
        b, index = self.writer.builder, self.writer.index
        wanted, last = b.add(i, index(further)), b.sub(self.number, index(1))
        there = b.select(b.icmp_signed("<", wanted, last), wanted, last)
        return b.load(b.gep(self.slots.data, [there]))

    def at(self, slot: Any, j: int) -> Any:
        """The address of a number of a head."""
        place = self.writer.builder.add(self.column, self.writer.index(j))
        return self.writer.address(self.kind, self.memory, slot, place)

    def read(self, slot: Any, j: int, width: int) -> Any:
        """Some numbers of a head."""
        return self.writer.load(self.at(slot, j), self.kind.dtype.bitwidth, width)

    def ask(self, slot: Any, head_dim: int) -> None:
        """Let memory bring a head."""
        for j in range(0, head_dim, LINE_BITS // self.kind.dtype.bitwidth):
            self.writer.ask(self.at(slot, j))


@intrinsic(prefer_literal=True)
def _score(
    typing: Any,
    asked: Any,
    head: Any,
    keys: Any,
    column: Any,
    slots: Any,
    first: Any,
    scores: Any,
    shape: Any,
) -> Any:
    """scores[head + g, i] = asked[head + g] * the key in slots[i], from `column` on.

    For some i from `first` on; `shape` is (heads, slots at a time, head_dim, width).
    """
    group, many, head_dim, width = (each.literal_value for each in shape)

    def write(writer: Writer, given: Sequence[Any]) -> None:
        queries, start, memory, begin, places, i, told, _ = given
        index, b = writer.index, writer.builder
        reader = Reader(writer, (keys, memory), (slots, places), begin)
        heads = [b.add(start, index(g)) for g in range(group)]
        some = [reader.slot(i, n) for n in range(many)]
        for n in range(many):
            reader.ask(reader.slot(i, many + n), head_dim)
        sums = [[writer.zero(width)] * many for _ in heads]
        for j in range(0, head_dim, width):
            places_of = [writer.address(asked, queries, h, index(j)) for h in heads]
            wanted = [writer.load(at, 32, width) for at in places_of]
            for n, slot in enumerate(some):
                key = reader.read(slot, j, width)
                for own, query in zip(sums, wanted, strict=True):
                    own[n] = writer.multiply_add(query, key, own[n])
        for own, h in zip(sums, heads, strict=True):
            writer.store(writer.sums(own), writer.address(scores, told, h, i))

    i = types.intp
    return written(types.void, [asked, i, keys, i, slots, i, scores, shape], write)


@intrinsic(prefer_literal=True)
def _average(
    typing: Any,
    scores: Any,
    head: Any,
    values: Any,
    column: Any,
    slots: Any,
    first: Any,
    end: Any,
    out: Any,
    shape: Any,
) -> Any:
    """out[head + g] += the sum of scores[head + g, i] * the value in slots[i].

    For i from `first` to `end`; `shape` is (heads, slots at a time, head_dim, width).
    """
    group, _, head_dim, width = (each.literal_value for each in shape)

    def write(writer: Writer, given: Sequence[Any]) -> None:
        weights, start, memory, begin, places, from_slot, to_slot, told, _ = given
        index, b = writer.index, writer.builder
        reader = Reader(writer, (values, memory), (slots, places), begin)
        heads = [b.add(start, index(g)) for g in range(group)]
        parts = [index(j) for j in range(0, head_dim, width)]
        places_of = [[writer.address(out, told, h, j) for j in parts] for h in heads]
        totals = [
            [cgutils.alloca_once_value(b, writer.load(at, 32, width)) for at in row]
            for row in places_of
        ]
        steps = (from_slot, to_slot, index(1))
        with cgutils.for_range_slice(b, *steps, inc=True) as (i, _):
            slot = reader.slot(i, 0)
            reader.ask(reader.slot(i, AHEAD), head_dim)
            found = [reader.read(slot, j, width) for j in range(0, head_dim, width)]
            for own, h in zip(totals, heads, strict=True):
                weight = b.load(writer.address(scores, weights, h, i))
                weight = writer.spread(weight, width)
                for total, value in zip(own, found, strict=True):
                    b.store(writer.multiply_add(weight, value, b.load(total)), total)
        for own, row in zip(totals, places_of, strict=True):
            for total, at in zip(own, row, strict=True):
                writer.store(b.load(total), at)

    i = types.intp
    kinds = [scores, i, values, i, slots, i, i, out, shape]
    return written(types.void, kinds, write)


score, average = cast(Any, (_score, _average))


@intrinsic(prefer_literal=True)
def _dots(
    typing: Any, rows: Any, first: Any, x: Any, token: Any, out: Any, shape: Any
) -> Any:
    """out[first + r, t] = rows[first + r] * x[t], for some tokens t from `token` on.

    `shape` is (rows, tokens, width).
    """
    many, tokens, width = (each.literal_value for each in shape)
    bits = rows.dtype.bitwidth

    def write(writer: Writer, given: Sequence[Any]) -> None:
        weight, start, inputs, from_token, told, _ = given
        index, b = writer.index, writer.builder
        none = writer.zero(width)
        places = [b.add(start, index(r)) for r in range(many)]
        asked = [b.add(from_token, index(t)) for t in range(tokens)]
        sums = [
            [cgutils.alloca_once_value(b, none) for _ in range(tokens)] for _ in places
        ]
        end = b.extract_value(writer.array(rows, weight).shape, 1)
        with cgutils.for_range_slice(b, index(0), end, index(width), inc=True) as (
            i,
            _,
        ):
            some = [writer.address(rows, weight, place, i) for place in places]
            weights = [writer.load(at, bits, width) for at in some]
            for t, token in enumerate(asked):
                taken = writer.load(writer.address(x, inputs, token, i), 32, width)
                for own, row in zip(weights, sums, strict=True):
                    b.store(writer.multiply_add(own, taken, b.load(row[t])), row[t])
            for place in places:
                later = b.add(place, index(many))
                writer.ask(writer.address(rows, weight, later, i))
        for place, row in zip(places, sums, strict=True):
            at = writer.address(out, told, place, from_token)
            writer.store(writer.sums([b.load(total) for total in row]), at)

    i = types.intp
    return written(types.void, [rows, i, x, i, out, shape], write)


dots = cast(Any, _dots)


class Tile:
    """Writes sums [rows, vectors * width] that stay in registers."""

    def __init__(self, writer: Writer, num_rows: int, vectors: int, width: int) -> None:
        self.writer, self.width, self.starts = (
            writer,
            width,
            range(0, vectors * width, width),
        )
        b, none = writer.builder, writer.zero(width)
        self.totals = [
            [cgutils.alloca_once_value(b, none) for _ in self.starts]
            for _ in range(num_rows)
        ]

    def add(
        self, numbers: Sequence[Any], kind: Any, x: Any, i: Any, column: Any
    ) -> None:
        """To each row: its number, at an address, times x[i, column:]."""
        writer, b, taken = self.writer, self.writer.builder, []
        for start in self.starts:
            at = writer.address(kind, x, i, b.add(column, writer.index(start)))
            taken.append(writer.load(at, 32, self.width))
        for at, row in zip(numbers, self.totals, strict=True):
            number = writer.spread(b.load(at), self.width)
            for total, other in zip(row, taken, strict=True):
                b.store(writer.multiply_add(number, other, b.load(total)), total)

    def store(self, kind: Any, out: Any, first: Any, column: Any) -> None:
        """As out[first + r, column:]."""
        writer, b = self.writer, self.writer.builder
        for r, row in enumerate(self.totals):
            for total, start in zip(row, self.starts, strict=True):
                place = (
                    b.add(first, writer.index(r)),
                    b.add(column, writer.index(start)),
                )
                writer.store(b.load(total), writer.address(kind, out, *place))


STRETCH, WORDS = 32, 16  # numbers of a row at a time; their words, in 16 bits
SOON = 3 * STRETCH  # numbers later


def split(writer: Writer, rows: Sequence[Any], room: Any) -> None:
    """From each address on: a stretch's even numbers, then the odd ones, as float32."""
    b, words = writer.builder, ir.VectorType(INT, WORDS)
    upper, by = (ir.Constant(words, [n] * WORDS) for n in (0xFFFF0000, 16))
    for r, at in enumerate(rows):
        both = b.load(b.bitcast(at, words.as_pointer()), align=2)
        for k, half in enumerate((b.shl(both, by), b.and_(both, upper))):
            there = b.gep(room, [writer.index(r * STRETCH + k * WORDS)])
            b.store(half, b.bitcast(there, words.as_pointer()), align=LINE_BITS // 8)


@intrinsic(prefer_literal=True)
def _sweep(
    typing: Any, rows: Any, first: Any, x: Any, column: Any, out: Any, shape: Any
) -> Any:
    """out[first + r, column:] = rows[first + r] * x[:, column:], a tile of it.

    Rows come from memory, in either format, and have 32, 48, 64 … numbers. `shape` is
    (rows, vectors, width).
    """
    many, *size = (each.literal_value for each in shape)
    bits = rows.dtype.bitwidth
    line = LINE_BITS // bits
    lines = many * STRETCH // line

    def write(writer: Writer, given: Sequence[Any]) -> None:
        weight, start, inputs, at_column, told, _ = given
        index, b, sums = writer.index, writer.builder, Tile(writer, many, *size)
        end = b.extract_value(writer.array(rows, weight).shape, 1)
        places = [b.add(start, index(r)) for r in range(many)]
        room = cgutils.alloca_once(b, FLOAT, size=many * STRETCH)
        room.align = LINE_BITS // 8
        last, steps = b.sub(end, index(STRETCH)), (index(0), end, index(STRETCH))
        with cgutils.for_range_slice(b, *steps, inc=True) as (begin, _):
            i = b.select(b.icmp_signed("<", begin, last), begin, last)
            words = b.udiv(b.sub(begin, i), index(2)), index(WORDS)  # or half of them
            if bits == 16:
                some = [writer.address(rows, weight, place, i) for place in places]
                split(writer, some, room)
            later = b.add(i, index(SOON))
            over = b.icmp_signed(">=", later, end)  # then in the next rows
            ahead = b.select(over, b.sub(later, end), later)
            row = b.add(start, b.select(over, index(many), index(0)))
            with cgutils.for_range_slice(b, *words, index(1), inc=True) as (j, _):
                line_at = b.udiv(b.mul(j, index(lines)), index(WORDS))
                for k in range(max(1, lines // WORDS)):
                    place = b.mul(b.add(line_at, index(k)), index(line))
                    there = b.add(ahead, b.urem(place, index(STRETCH)))
                    asked = b.add(row, b.udiv(place, index(STRETCH)))
                    writer.ask(writer.address(rows, weight, asked, there))
                for k in range(2):
                    input_at = b.add(b.add(i, b.mul(j, index(2))), index(k))
                    if bits == 16:
                        starts = range(k * WORDS, many * STRETCH, STRETCH)
                        numbers = [b.gep(room, [b.add(j, index(n))]) for n in starts]
                    else:
                        numbers = [
                            writer.address(rows, weight, r, input_at) for r in places
                        ]
                    sums.add(numbers, x, inputs, input_at, at_column)
        sums.store(out, told, start, at_column)

    i = types.intp
    return written(types.void, [rows, i, x, i, out, shape], write)


sweep = cast(Any, _sweep)


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any,
    rows: Any,
    first: Any,
    x: Any,
    column: Any,
    out: Any,
    shape: Any,
) -> Any:
    """out[first + r, column:] = rows[first + r] * x[:, column:], of an even length.

    `shape` is (rows, vectors, width, transposed): the rows of a weight, or its columns.
    """
    many, *size, transposed = (each.literal_value for each in shape)

    def write(writer: Writer, given: Sequence[Any]) -> None:
        weight, start, inputs, at_column, told, _ = given
        index, b, sums = writer.index, writer.builder, Tile(writer, many, *size)
        end = b.extract_value(writer.array(rows, weight).shape, int(not transposed))
        with cgutils.for_range_slice(b, index(0), end, index(2), inc=True) as (i, _):
            for k in range(2):
                j = b.add(i, index(k))
                places = [[b.add(start, index(r)), j] for r in range(many)]
                pairs = (place[:: -1 if transposed else 1] for place in places)
                numbers = [writer.address(rows, weight, *pair) for pair in pairs]
                sums.add(numbers, x, inputs, j, at_column)
        sums.store(out, told, start, at_column)

    i = types.intp
    return written(types.void, [rows, i, x, i, out, shape], write)


tile = cast(Any, _tile)


@intrinsic
def _elsewhere(typing: Any, arrays: Any, addresses: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        places = context.make_array(addresses)(context, builder, given[1])
        told = []
        for i, array in enumerate(cgutils.unpack_tuple(builder, given[0])):
            made = context.make_array(arrays[i])(context, builder, array)
            address = builder.load(builder.gep(places.data, [ir.Constant(INT, i)]))
            made.data = builder.inttoptr(address, made.data.type)
            told.append(made._getvalue())
        result = context.make_tuple(builder, arrays, told)
        context.nrt.incref(builder, arrays, result)  # as if they were the first ones
        return result

    return arrays(arrays, addresses), generate


elsewhere = cast(Any, _elsewhere)  # a tuple of arrays as they are, at other addresses
