# %% [markdown]
# # 19. Where a step's time goes
#
# Sixteen requests decode, each with some 500 tokens of context. One step computes sixteen tokens.
# The work is known to the last multiplication, and so is what must be read: every weight once, every
# key and value of every context once. How long should that take, and where does the rest go?

# %% tags=["hide-output"]
import json
from pathlib import Path

from minivllm.model import ModelConfig

smollm2 = ModelConfig(49_152, 576, 1_536, 30, 9, 3, head_dim=64, max_context=8_192)

# %% name="bytes"
attention = (
    smollm2.hidden_size
    * smollm2.head_dim
    * 2
    * (smollm2.num_heads + smollm2.num_kv_heads)
)
mlp = 3 * smollm2.hidden_size * smollm2.intermediate_size
layers, head = (
    smollm2.num_layers * (attention + mlp),
    smollm2.vocab_size * smollm2.hidden_size,
)
for requests in (1, 8, 16):
    contexts = requests * 494 * smollm2.kv_bytes_per_token(4)
    parts = {"layers": 4 * layers, "head": 4 * head, "contexts": contexts}
    print(f"{requests:2} requests, MB:", {n: round(b / 1e6) for n, b in parts.items()})

# %% [markdown]
# In float32 a step reads [425](#bytes) MB of layers, [113](#bytes) MB of head, and at sixteen
# requests [364](#bytes) MB of keys and values. Two cores of the machine of this book's records read
# about 20 GB a second. That makes 28 milliseconds for one request, and 45 for sixteen.
#
# A record of `minivllm bench engine` on that machine says what a step takes if PyTorch does all of
# it, with the layers of chapter 5:

# %% name="record"
record = json.loads(Path("../figures/measured/engine.json").read_text("utf-8"))
breakdowns = {
    (each["dtype"], each["kernels"], each["num_requests"]): each["parts"]
    for each in record["breakdowns"]
}
for requests in (1, 8, 16):
    parts = breakdowns["float32", "torch", requests]
    shown = {name: f"{1e3 * s:.0f}" for name, s in parts.items()}
    print(f"{requests:2} requests, {1e3 * sum(parts.values()):.0f} ms:", shown)

# %% [markdown]
# Products and head are the reading of the weights. With one request they are most of the step. With
# sixteen they are less than half, for attention has grown with the contexts. And there is a rest in all
# three. One would suspect Python, which calls everything: it is what nobody timed by
# name, and it is a small part. Take the
# norms, two a layer and one at the end, and attention, and hold them against what they read:

# %% name="slow"
NORMS = 2 * smollm2.num_layers + 1
CONTEXTS = 16 * 494 * smollm2.kv_bytes_per_token(4)


def pace(kernels: str) -> str:
    one, many = (breakdowns["float32", kernels, n] for n in (1, 16))
    speed = CONTEXTS / many["attention"] / 1e9
    return f"{1e6 * one['norms'] / NORMS:.0f} µs a norm, contexts at {speed:.1f} GB/s"


print(f"a norm of one token reads {smollm2.hidden_size * 4 / 1e3:.1f} kB")
print("PyTorch:", pace("torch"))

# %% [markdown]
# [79](#slow) microseconds for [2.3](#slow) kB, and contexts far below the speed of memory. A norm is
# several calls inside PyTorch. Each reads its input, writes an output for the next one, and costs some
# microseconds before it begins. Attention gathers keys into a copy, and then reads the copy.
#
# What helps is known from every GPU: do in one call, in one pass over the numbers, what belongs
# together. Such a function is called a *kernel*, and
# this chapter writes those of a CPU in Python. [Numba](https://numba.pydata.org) compiles a
# function of loops when it is first called, and keeps the code on disk. It translates to LLVM's instructions,
# the common language of many compilers, and LLVM makes those of this processor of them.

# %% export="vectors.py"
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


# %% [markdown]
# `fastmath` allows sums in another order, which is what vectors of 16 numbers need; `numpy` as error
# model divides by 0 as NumPy does, without a test in each turn of the loop. And the threads: those of
# OpenMP, PyTorch's and Numba's alike, spin for a moment after each call, for the next one. A step that
# went back and forth between the two would find the cores taken. So from the first layer to the last
# all that is parallel will be Numba's.
#
# ## A lane for each token
#
# A processor computes with vectors, here of 16 numbers: one instruction, sixteen products. Which
# sixteen? A decode step offers them by itself. Every weight meets one number of every request, and
# nothing that happens between products mixes two requests. So the numbers of a step are laid out
# by feature: sixteen requests' first numbers, then their second ones. One *lane* of every vector belongs
# to one request, through all layers: an array of a step is [features, lanes], and request 3 is its
# column 3. Adding to the stream and normalising it is then this:


# %% export="kernels_numba.py"
"""Kernels for a CPU, compiled by Numba: a decode step, layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary as Kept  # as long as the owner lives

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import prange
from torch import Tensor

from minivllm.attention import (
    ChunkPlan,
    PagedAttention,
    Plan,
    read_together,
    shared_runs,
)
from minivllm.linear import Multiply, packed_product
from minivllm.model import Layer, RMSNorm, run_layers
from minivllm.runner import Backend
from minivllm.vectors import Float, compiled, config, has_threads


@compiled
def add_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """x += delta; out = x, normalised. All [hidden, lanes]; weight [hidden, 1]."""
    sums = np.zeros(x.shape[1], np.float32)
    for i in range(len(x)):
        for lane in range(x.shape[1]):
            x[i, lane] += delta[i, lane]
            sums[lane] += x[i, lane] ** 2
    scales = Float(1) / np.sqrt(sums / Float(len(x)) + eps)
    for i in range(len(x)):
        for lane in range(x.shape[1]):
            out[i, lane] = x[i, lane] * scales[lane] * weight[i, 0]


# %% [markdown]
# The gate needs an exponential. A function call in a loop ends all vectors, so this one is made of what
# vectors can do: a power of two is written into the exponent bits of a float, and the rest, an
# exponent between −½ and ½, is a polynomial. (The coefficients are those of the Cephes library.)


# %% export="vectors.py"
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


# %% export="kernels_numba.py"
from minivllm.vectors import exp


@compiled
def gate(both: Any, out: Any) -> None:
    """out = silu(first half) * second half, [2 * wide, lanes] -> [wide, lanes]."""
    for i in range(len(out)):
        for lane in range(out.shape[1]):
            x = both[i, lane]
            share = x / (Float(1) + exp(-x))
            out[i, lane] = share * both[len(out) + i, lane]


@compiled
def norm_heads(heads: Any, weight: Any, eps: Any, head_dim: int) -> None:
    """Normalise each head of rows [heads * head_dim, lanes], as many as weights."""
    for start in range(0, len(weight), head_dim):
        sums = np.zeros(heads.shape[1], np.float32)
        for i in range(start, start + head_dim):
            for lane in range(heads.shape[1]):
                sums[lane] += heads[i, lane] ** 2
        scales = Float(1) / np.sqrt(sums / Float(head_dim) + eps)
        for i in range(start, start + head_dim):
            for lane in range(heads.shape[1]):
                heads[i, lane] *= scales[lane] * weight[i, 0]


@compiled
def rotate(heads: Any, num_rows: int, cos: Any, sin: Any) -> None:
    """Turn the first rows of [heads * head_dim, lanes]; cos, sin [half, lanes]."""
    half = len(cos)
    for start in range(0, num_rows, 2 * half):
        for i in range(half):
            for lane in range(cos.shape[1]):
                a, b = heads[start + i, lane], heads[start + half + i, lane]
                c, s = cos[i, lane], sin[i, lane]
                heads[start + i, lane] = a * c - b * s
                heads[start + half + i, lane] = b * c + a * s


# %% name="exp"
from minivllm.vectors import compiled, exp


@compiled
def exp_all(given, out):
    for i in range(len(given)):
        out[i] = exp(given[i])


x = np.linspace(-87, 80, 100_001, dtype=np.float32)
found = np.empty_like(x)
exp_all(x, found)
error = np.abs(found / np.exp(x.astype(np.float64)) - 1).max()
print("largest relative error:", f"{error:.0e}")

# %% [markdown]
# All that is computed is float32. What is *read* may be shorter: weights, keys and values of 16
# bits are half the bytes, and bytes are what a step waits for. A bfloat16 is the upper half of a
# float32: sixteen bits, and sixteen zeros behind them. Numba knows no bfloat16, and needs none. The bits are
# shifted up when they are read, and a new key is rounded to the nearest when it is written: half of the
# last bit that is kept is added before the cut, and a tie goes to the even neighbour. `put` has no body
# of its own: Numba asks for one when it compiles a call, and gets the one for the array's format.


# %% export="vectors.py"
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


# %% name="rounding"
from minivllm.vectors import as_array, put


@compiled
def copy(given, out):
    for i in range(given.shape[1]):
        put(out, 0, i, given[0, i])


numbers = torch.randn(1, 100_000) * 10.0 ** torch.randint(-20, 20, (1, 100_000))
rounded = torch.empty(1, 100_000, dtype=torch.bfloat16)
copy(as_array(numbers), as_array(rounded))
print("like PyTorch:", bool((rounded == numbers.bfloat16()).all()))

# %% [markdown]
# ## Vectors, said and not hoped for
#
# Up to here the compiler finds the vectors. What follows asks for more. Sixteen sums shall stay in
# registers while a weight passes by; and memory shall be asked now for what is needed a moment
# later. A compiler must prove that no two arrays overlap before it does the one, and never does the
# other. So we say both. Numba lets a program add a type, here a register's worth of numbers, and functions
# that write LLVM's instructions for it:


# %% export="vectors.py"
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


# %% [markdown]
# The functions that a kernel calls are thin: they name their types, and let a `Writer` write. `lanes` is
# a number that the compiler knows.


# %% export="vectors.py"
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


# %% [markdown]
# ## Attention where the pages lie
#
# PyTorch's attention wants keys side by side. So chapter 5 gathers: it reads each key from its page,
# writes it into a row of its own, and then attention reads it again. A decode step does this with
# all contexts, and they are the larger part of what it reads. A kernel can follow the page table, one slot
# after the other. What a processor guesses about the next read is wrong there at the end of
# each page; we know better, and ask for the slot that comes {8} turns later.
#
# What is one core's share? A request is too much: with one request the other core would wait. So
# contexts are cut into *pieces* of about {128} tokens. A piece reads its keys once for all heads,
# gives its weights a sum of 1, reads its values, and leaves an average and the logarithm of the
# sum, as chapter 5's `attend` does. Here a vector lies along a head, and not across requests: each request
# has a context of its own, and no number of it meets two of them.


# %% export="kernels_numba.py"
from minivllm.vectors import (
    fma,
    larger,
    load,
    prefetch,
    put,
    put_sum,
    spread,
    store,
    zero,
)

AHEAD = 8  # slots: far enough to arrive in time, near enough to be there still


@compiled
def ask_for(memory: Any, slot: Any) -> None:
    """Let memory bring a slot's heads."""
    for j in range(0, memory.shape[1], 64 // memory.itemsize):
        prefetch(memory, slot, j)


@compiled
def weigh(scores: Any) -> Any:
    """Softmax, in place; the logarithm of the sum of the exponentials."""
    largest, total = Float(-3.4e38), Float(0)
    for i in range(len(scores)):
        largest = larger(largest, scores[i])
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    share = Float(1) / total
    for i in range(len(scores)):
        scores[i] *= share
    return largest + np.log(total)


@cache
def make_reads(head_dim: int, group: int) -> tuple[Callable[..., None], ...]:
    """Kernels that ask keys and add values up; `group` heads share one of each."""
    lanes = math.gcd(head_dim, 16)

    def score(asked: Any, keys: Any, slots: Any, scores: Any) -> None:
        """scores[head, i] = asked[head] * the key in slots[i]."""
        last = len(slots) - 1
        for i in range(len(slots)):
            ask_for(keys, slots[min(i + AHEAD, last)])
            for head in range(len(scores)):
                start, found = head // group * head_dim, zero(lanes)
                for j in range(0, head_dim, lanes):
                    key = load(keys, slots[i], start + j, lanes)
                    found = fma(load(asked, head, j, lanes), key, found)
                put_sum(scores, head, i, found)

    def average(scores: Any, values: Any, slots: Any, out: Any) -> None:
        """Add to out[head] the sum of scores[head, i] * the value in slots[i]."""
        last = len(slots) - 1
        for i in range(len(slots)):
            ask_for(values, slots[min(i + AHEAD, last)])
            for first in range(0, len(out), group):
                start = first // group * head_dim
                for j in range(0, head_dim, lanes):
                    value = load(values, slots[i], start + j, lanes)
                    for head in range(first, first + group):
                        weight = spread(scores, head, i, lanes)
                        sums = fma(weight, value, load(out, head, j, lanes))
                        store(out, head, j, sums)

    return compiled(score), compiled(average)


# %% export="kernels_numba.py"
@cache
def make_attend(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for one shape of heads: loops of known length become registers."""
    score, average = make_reads(head_dim, group)
    scale = Float(1 / math.sqrt(head_dim))

    def attend(
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        pieces: Any,
        found: Any,
        sums: Any,
    ) -> None:
        """What the queries find in their pieces; the logarithms of the sums of weights.

        `heads` [any, lanes] begin with the queries; keys and values are [slots,
        kv_heads * head_dim]; tables and pieces are a `DecodePlan`'s. The results go to
        `found` [pieces, heads, head_dim] and `sums` [pieces, heads].
        """
        num_heads = found.shape[1]
        for piece in prange(len(pieces)):
            row, start, end = pieces[piece]
            slots = tables[row, start:end]
            asked = np.empty((num_heads, head_dim), np.float32)
            for head in range(num_heads):
                for j in range(head_dim):
                    asked[head, j] = heads[head * head_dim + j, row] * scale
            scores = np.empty((num_heads, end - start), np.float32)
            score(asked, keys, slots, scores)
            for head in range(num_heads):
                sums[piece, head] = weigh(scores[head])
            found[piece] = Float(0)
            average(scores, values, slots, found[piece])

    return compiled(attend, parallel=has_threads())


# %% export="kernels_numba.py"
PIECE = 128  # tokens of context: enough of them to share among cores, few to merge
MOST = 32  # tokens: with more of them a product is work, and no longer reading


@dataclass(frozen=True)
class DecodePlan(Plan):
    """A plan of single tokens, which read their contexts piece by piece.

    `slots` are those to write to; `tables` [rows, longest] those of each context.
    `pieces` [pieces, 3] are (row, start, end). `runs` [runs, 4] are pieces that several
    rows have in common: start, end, and where their `readers` begin and end; what each
    finds counts as a further piece. Those of row i are `order[ends[i - 1] : ends[i]]`.
    """

    slots: Any = None
    tables: Any = None
    pieces: Any = None
    runs: Any = None
    readers: Any = None
    order: Any = None
    ends: Any = None


def arrange(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """Cut the contexts of a decode step into pieces; those that are shared, once."""
    chunks = plan.chunks
    if len(chunks) > MOST or len(chunks) < len(plan.positions):
        return read_together(plan, page_size, memory)
    tables = np.zeros((len(chunks), max(len(c.context) for c in chunks)), np.int64)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.context)] = chunk.context.numpy()
    runs, readers, starts = find_runs(chunks, page_size)
    parts = zip(starts, chunks, strict=True)
    pieces = [
        (i, *piece)
        for i, (s, c) in enumerate(parts)
        for piece in cut(s, len(c.context))
    ]
    owners = np.array([row for row, *_ in pieces] + readers)
    order = np.argsort(owners, kind="stable")
    whole = (plan.positions, plan.write_slots, chunks, (), plan.write_slots.numpy())
    shared = np.array(runs).reshape(-1, 4), np.array(readers, np.int64)
    ends = np.bincount(owners).cumsum()
    return DecodePlan(*whole, tables, np.array(pieces), *shared, order, ends)


def find_runs(
    chunks: Sequence[ChunkPlan], page_size: int
) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Runs and readers, as in a `DecodePlan`, and where each own context starts."""
    tables = [tuple(c.pages[: (len(c.context) - 1) // page_size]) for c in chunks]
    readers, starts = list[int](), [0] * len(chunks)
    runs: list[tuple[int, ...]] = []
    for members, first, last in shared_runs(tables, page_size):
        for start, end in cut(first * page_size, last * page_size):
            runs.append((start, end, len(readers), len(readers) + len(members)))
            readers += members
        for row in members:
            starts[row] = last * page_size
    return runs, readers, starts


def cut(start: int, end: int) -> list[tuple[int, int]]:
    """The pieces of a context from `start`; the last of several is not very short."""
    cuts = [start, *range(start + PIECE, end - PIECE // 2, PIECE), end]
    return list(pairwise(cuts))


# %% tags=["hide-input"]
from minivllm.attention import plan_batch
from minivllm.batch import Chunk
from minivllm.drawing import draw_rows
from minivllm.kernels_numba import arrange
from minivllm.request import encode_ids

prefix = range(30)
batch = [
    Chunk("A", encode_ids([0]), 493, [*prefix, 30], 30, samples=True),
    Chunk("B", encode_ids([0]), 517, [*prefix, 31, 32, 33], 30, samples=True),
    Chunk("C", encode_ids([0]), 399, range(40, 65), 0, samples=True),
]
memory = torch.zeros(70 * 16, 2, 8)
plan = arrange(plan_batch(batch, 16, 69, torch.device("cpu")), 16, memory)
rows = [(chunk.request_id, []) for chunk in batch]
for row, start, end in plan.pieces.tolist():
    rows[row][1].append((start, end - start, "private", f"{end - start}"))
for start, end, first, last in plan.runs.tolist():
    for row in plan.readers[first:last].tolist():
        rows[row][1].append((start, end - start, "pinned", f"{end - start}"))
draw_rows(
    rows,
    unit=1.4,
    caption="Three contexts, cut up: the numbers are tokens that a core reads in one go. "
    "A and B share 480 tokens (blue), which are read once for both, one K/V head after the other.",
)

# %% [markdown]
# ## Products that read
#
# With few tokens a product is reading: each weight is used once for each token and never again.
# A weight is spread over all lanes, meets its input of every token, and is added to the sums. No vector
# must be added up at the end, and sixteen rows of the weight keep sixteen registers of sums busy. While they
# do, the next sixteen rows are on their way: for every two inputs that pass, memory is asked for
# thirty-two numbers of what lies behind, so that all of it is asked for when the loop ends. A `tile` is
# this loop. In NumPy it would be one line:
#
# `out[place:][:16, lane:][:, :lanes] = rows[first:][:16] @ columns[:, lane:][:, :lanes]`


# %% export="vectors.py"
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


# %% [markdown]
# Sixteen-bit rows are widened first, into a place that stays in the cache: in the loop it would be done
# number by number. Float32 rows are taken where they are. One token has a kernel of its own, a vector
# along the inputs, and widens what it reads as it reads it.


# %% export="kernels_numba.py"
from minivllm.vectors import as_array, tile, widened

WIDE, ROWS = (16, 16) if "+avx512f" in config.CPU_FEATURES else (8, 8)  # registers
BLOCK = 96  # outputs that a core takes


@cache
def make_multiply(lanes: int) -> Callable[..., None]:
    """The product's kernel for so many tokens."""
    if lanes == 1:
        return multiply_one
    wide = min(lanes, WIDE)
    shape = (ROWS, wide)

    def multiply(x: Any, weight: Any, bias: Any, out: Any) -> None:
        """out = weight times x, plus bias: [inputs, lanes] -> [outputs, lanes]."""
        num_outputs, num_inputs = weight.shape
        for block in prange(-(-num_outputs // BLOCK)):
            room = np.empty((ROWS, num_inputs), np.float32)
            for at in range(block * BLOCK, min(num_outputs, (block + 1) * BLOCK), ROWS):
                first = min(at, num_outputs - ROWS)  # the last: some of them again
                rows, start = widened(weight, first, room)
                for lane in range(0, lanes, wide):
                    coming = first + ROWS
                    tile(rows, start, x, lane, out, first, weight, coming, shape)
        for i in range(len(bias)):
            for lane in range(lanes):
                out[i, lane] += bias[i, 0]

    return compiled(multiply, parallel=has_threads())


@partial(compiled, parallel=has_threads())
def multiply_one(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """The same for one token: sums along the inputs, a multiple of 16."""
    num_outputs, num_inputs = weight.shape
    given = x.reshape((1, num_inputs))
    for block in prange(-(-num_outputs // BLOCK)):
        for at in range(block * BLOCK, min(num_outputs, (block + 1) * BLOCK), 4):
            first = min(at, num_outputs - 4)
            a = b = c = d = zero(16)
            for i in range(0, num_inputs, 16):
                part = load(given, 0, i, 16)
                a = fma(load(weight, first, i, 16), part, a)
                b = fma(load(weight, first + 1, i, 16), part, b)
                c = fma(load(weight, first + 2, i, 16), part, c)
                d = fma(load(weight, first + 3, i, 16), part, d)
                for k in range(0, 64, 64 // weight.itemsize):
                    prefetch(weight, first + 4, 4 * i + k)
            put_sum(out, first, 0, a)
            put_sum(out, first + 1, 0, b)
            put_sum(out, first + 2, 0, c)
            put_sum(out, first + 3, 0, d)
    for i in range(len(bias)):
        out[i, 0] += bias[i, 0]


# %% [markdown]
# A tile is also what a shared run of pages asks for. Sixteen readers of one system prompt, three heads each that
# share a key: 48 queries meet the same key, as 16 tokens meet the same weight. The keys of a run are the
# rows of a weight, and a lane is a query. Then weights for each lane, and the values, turned around, are a
# second weight. Keys are copied after all, but once for 48 queries, and a core takes one K/V head of a
# run: there is enough in it.


# %% export="kernels_numba.py"
@compiled
def weigh_lanes(scores: Any, sums: Any) -> None:
    """`weigh` for each column of scores [tokens, lanes]."""
    largest = np.full(scores.shape[1], Float(-3.4e38), np.float32)
    total = np.zeros(scores.shape[1], np.float32)
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            largest[lane] = larger(largest[lane], scores[i, lane])
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            scores[i, lane] = exp(scores[i, lane] - largest[lane])
            total[lane] += scores[i, lane]
    for i in range(len(scores)):
        for lane in range(scores.shape[1]):
            scores[i, lane] /= total[lane]
    for lane in range(scores.shape[1]):
        sums[lane] = largest[lane] + np.log(total[lane])


@cache
def make_attend_together(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for runs of pages that several rows read."""
    multiply_tiles, scale = make_tiles(WIDE), Float(1 / math.sqrt(head_dim))
    gather, deep = make_gather(head_dim), -(-head_dim // ROWS) * ROWS

    def attend_together(
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        runs: Any,
        readers: Any,
        found: Any,
        sums: Any,
    ) -> None:
        """As `attend`, with a result for each reader of a run."""
        num_kv_heads = keys.shape[1] // head_dim
        for job in prange(len(runs) * num_kv_heads):
            kv = job % num_kv_heads
            start, end, first, last = runs[job // num_kv_heads]
            slots = tables[readers[first], start:end]
            rows = -(-len(slots) // ROWS) * ROWS
            lanes = -(-(last - first) * group // WIDE) * WIDE
            asked = np.zeros((deep, lanes), np.float32)
            for reader in range(first, last):
                for g in range(group):
                    lane, head = (reader - first) * group + g, kv * group + g
                    for j in range(head_dim):
                        query = heads[head * head_dim + j, readers[reader]]
                        asked[j, lane] = query * scale
            known = np.zeros((rows, deep), np.float32)
            gather(keys, slots, kv * head_dim, known)
            scores = np.empty((rows, lanes), np.float32)
            multiply_tiles(known, asked, scores)
            logs = np.empty(lanes, np.float32)
            weigh_lanes(scores[: len(slots)], logs)
            scores[len(slots) :] = Float(0)
            gather(values, slots, kv * head_dim, known)
            average = np.empty((deep, lanes), np.float32)
            multiply_tiles(known.T.copy(), scores, average)
            for reader in range(first, last):
                for g in range(group):
                    lane, head = (reader - first) * group + g, kv * group + g
                    sums[reader, head] = logs[lane]
                    for j in range(head_dim):
                        found[reader, head, j] = average[j, lane]

    return compiled(attend_together, parallel=has_threads())


@cache
def make_gather(head_dim: int) -> Callable[..., None]:
    """Copies a head of some slots."""
    wide = math.gcd(head_dim, 16)

    def gather(memory: Any, slots: Any, start: Any, out: Any) -> None:
        """out[i] = the head that begins at `start` in slots[i], as float32."""
        for i in range(len(slots)):
            for j in range(0, head_dim, wide):
                store(out, i, j, load(memory, slots[i], start + j, wide))

    return compiled(gather)


@cache
def make_tiles(wide: int) -> Callable[..., None]:
    """A product of small arrays, on one core."""
    shape = (ROWS, wide)

    def multiply_tiles(weight: Any, x: Any, out: Any) -> None:
        for row in range(0, len(weight), ROWS):
            for lane in range(0, x.shape[1], wide):
                tile(weight, row, x, lane, out, row, weight, row + ROWS, shape)

    return compiled(multiply_tiles)


# %% [markdown]
# In the end the pieces of a row are put together, each by its share of the whole sum.


# %% export="kernels_numba.py"
@partial(compiled, parallel=has_threads())
def merge(found: Any, sums: Any, order: Any, ends: Any, out: Any) -> None:
    """out [heads * head_dim, lanes]: averages of each row's pieces, by their sums."""
    head_dim = found.shape[2]
    for row in prange(len(ends)):
        pieces = order[ends[row - 1] if row else 0 : ends[row]]
        for head in range(found.shape[1]):
            weights = sums[pieces, head]
            weigh(weights)
            for j in range(head_dim):
                total = Float(0)
                for k in range(len(pieces)):
                    total += weights[k] * found[pieces[k], head, j]
                out[head * head_dim + j, row] = total


# %% [markdown]
# A prompt of 512 tokens is the other case: each weight is used 512 times, and what counts is
# arithmetic. That is PyTorch's float32 product, for either format: 16-bit weights are
# widened first, layer by layer. Both ways take the weights as the checkpoint has them, so there is one copy.


# %% export="kernels_numba.py"
NO_BIAS = np.empty((0, 1), np.float32)


class ReadProduct:
    """x -> x times weight, plus bias: read once for few tokens, PyTorch's for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        added = NO_BIAS if bias is None else bias.float()[:, None].numpy()
        self.arrays = as_array(weight), added
        self._room: dict[int, Tensor] = {}  # new memory is slow at first touch

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        if len(x) > MOST:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        lanes = lanes_for(len(x))
        if lanes not in self._room:
            self._room[lanes] = torch.empty(len(self.weight), lanes)
        out = self._room[lanes].numpy()
        make_multiply(lanes)(as_lanes(x, lanes).numpy(), *self.arrays, out)
        told = x.new_empty(len(x), len(self.weight))
        turn(out, as_array(told))
        return told


@partial(compiled, parallel=has_threads())
def turn(columns: Any, out: Any) -> None:
    """[outputs, lanes] -> [tokens, outputs], in the format of the result."""
    for block in prange(-(-len(columns) // BLOCK)):
        first = max(0, block * BLOCK)
        for i in range(first, min(len(columns), first + BLOCK)):
            for lane in range(len(out)):
                put(out, lane, i, columns[i, lane])


def lanes_for(num_tokens: int) -> int:
    """How many lanes so many tokens take."""
    return 1 if num_tokens == 1 else next(n for n in (8, 16, 32) if n >= num_tokens)


def as_lanes(x: Tensor, lanes: int) -> Tensor:
    """[tokens, features] -> float32 [features, lanes]; lanes left over are 0."""
    out = torch.zeros(x.shape[1], lanes)
    out[:, : len(x)] = x.t()
    return out


def read_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of a weight that the kernels can read, or else packed."""
    num_outputs, num_inputs = weight.shape
    if num_outputs < ROWS or num_inputs % 16:
        return packed_product(weight, bias)
    return ReadProduct(weight, bias)


# %% [markdown]
# ## A layer of kernels
#
# What is left for Python is to call them in order, some twelve calls a layer. Between two products no
# tensor is made: all kernels of a step write to the same arrays, layer after layer.


# %% export="kernels_numba.py"
@compiled
def write(heads: Any, first: int, slots: Any, keys: Any, values: Any) -> None:
    """Store each lane's key and value, rows of `heads` from `first` on, in its slot."""
    width = keys.shape[1]
    for lane in range(len(slots)):
        for j in range(width):
            put(keys, slots[lane], j, heads[first + j, lane])
            put(values, slots[lane], j, heads[first + width + j, lane])


class CompiledLayers:
    """Runs the layers of a decode step by kernels, others as chapter 5 does."""

    def __init__(self) -> None:
        self._weights: Kept[Layer, tuple[Any, ...] | None] = Kept()
        self._memory: Kept[PagedAttention, tuple[Any, Any]] = Kept()
        # attributes, so that chapter 15 can time them
        self.add_norm: Any = add_norm
        self.rotate: Any = rotate
        self.gate: Any = gate

    def multiply(self, x: Any, arrays: tuple[Any, Any], out: Any) -> None:
        """out = the weight in `arrays` times x, plus its bias."""
        make_multiply(x.shape[1])(x, *arrays, out)

    def attend(
        self, heads: Any, memory: Any, plan: DecodePlan, room: Any, out: Any
    ) -> None:
        """Store each lane's key and value; out: what it finds in its context."""
        write(heads, len(out), plan.slots, *memory)
        found, sums = room
        head_dim, own = found.shape[2], len(plan.pieces)
        shape = (head_dim, found.shape[1] * head_dim // memory[0].shape[1])
        given = (heads, *memory, plan.tables)
        make_attend(*shape)(*given, plan.pieces, found, sums)
        if len(plan.runs):
            together = make_attend_together(*shape)
            together(*given, plan.runs, plan.readers, found[own:], sums[own:])
        merge(found, sums, plan.order, plan.ends, out)

    def __call__(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        angles: Tensor,
    ) -> Tensor:
        """What `run_layers` gives."""
        weights = [self._weights_of(layer) for layer in layers]
        if not isinstance(plan, DecodePlan) or None in weights:
            return run_layers(layers, x, memory, plan, angles)
        lanes = lanes_for(len(x))
        stream = as_lanes(x, lanes).numpy()
        delta, room = np.zeros_like(stream), make_room(layers[0], plan, lanes)
        turns = [as_lanes(turn, lanes).numpy() for turn in (angles.cos(), angles.sin())]
        for own, layer_memory in zip(weights, memory, strict=True):
            kept = self._memory_of(layer_memory)
            self._layer(stream, delta, own, kept, plan, turns, room)
        return torch.from_numpy(stream + delta)[:, : len(x)].t().to(x.dtype)

    def _layer(
        self,
        x: Any,
        delta: Any,
        weights: Any,
        memory: Any,
        plan: DecodePlan,
        turns: Any,
        room: Any,
    ) -> None:
        """Add delta to the stream x [hidden, lanes]; delta = what the layer leaves."""
        norm, qkv, head_norm, output, second_norm, gate_and_up, down = weights
        normal, heads, seen, both, inner, found = room
        self.add_norm(x, delta, *norm, normal)
        self.multiply(normal, qkv, heads)
        if head_norm is not None:
            norm_heads(heads, head_norm[0], head_norm[1], found[0].shape[2])
        self.rotate(heads, len(seen) + memory[0].shape[1], *turns)
        self.attend(heads, memory, plan, found, seen)
        self.multiply(seen, output, delta)
        self.add_norm(x, delta, *second_norm, normal)
        self.multiply(normal, gate_and_up, both)
        self.gate(both, inner)
        self.multiply(inner, down, delta)

    def _weights_of(self, layer: Layer) -> tuple[Any, ...] | None:
        if layer not in self._weights:
            self._weights[layer] = weights_of(layer)
        return self._weights[layer]

    def _memory_of(self, memory: PagedAttention) -> tuple[Any, Any]:
        if memory not in self._memory:
            arrays = [as_array(x.flatten(1)) for x in (memory.keys, memory.values)]
            self._memory[memory] = (arrays[0], arrays[1])
        return self._memory[memory]


def weights_of(layer: Layer) -> tuple[Any, ...] | None:
    """A layer's weights for the kernels, or None if some are not for them."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.qkv, attention.output, mlp.gate_and_up, mlp.down)
    products = [part.multiply for part in parts]
    if not all(isinstance(product, ReadProduct) for product in products):
        return None
    qkv, output, gate_and_up, down = (cast(Any, each).arrays for each in products)
    norm = norm_of((layer.input_layernorm, 1))
    second = norm_of((layer.post_attention_layernorm, 1))
    head_norm, (num_heads, num_kv_heads) = None, attention.heads
    if attention.q_norm is not None and attention.k_norm is not None:
        head_norm = norm_of(
            (attention.q_norm, num_heads), (attention.k_norm, num_kv_heads)
        )
    return norm, qkv, head_norm, output, second, gate_and_up, down


def norm_of(*norms: tuple[RMSNorm, int]) -> tuple[Any, Any]:
    """Weights of norms, each so often, [all, 1]; what keeps them from dividing by 0."""
    weights = [norm.weight.detach().float().repeat(often) for norm, often in norms]
    return torch.cat(weights)[:, None].numpy(), Float(norms[0][0].eps)


def make_room(layer: Layer, plan: DecodePlan, lanes: int) -> tuple[Any, ...]:
    """Arrays for what a layer computes on its way; the next one writes over them.

    All 0: what lies in lanes without a token may be too small for normal floats, and a
    processor takes a hundred times as long for those.
    """
    attention, mlp = layer.self_attn, layer.mlp
    num_heads, num_pieces = attention.heads[0], len(plan.order)
    hidden = layer.input_layernorm.weight.numel()
    products = (attention.qkv, mlp.gate_and_up)
    heads, both = (len(cast(Any, each.multiply).weight) for each in products)
    seen = num_heads * attention.head_dim
    found = np.empty((num_pieces, num_heads, attention.head_dim), np.float32)
    pieces = (found, np.empty((num_pieces, num_heads), np.float32))
    rows = (hidden, heads, seen, both, both // 2)
    return (*(np.zeros((n, lanes), np.float32) for n in rows), pieces)


# %% [markdown]
# All of it is a `Backend`, which chapter 14's `LLM` takes by itself where it can be used
# (`kernels="auto"`), and `kernels="torch"` leaves out.


# %% export="kernels_numba.py"
def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    numba.set_num_threads(min(torch.get_num_threads(), config.NUMBA_NUM_THREADS))
    return Backend(CompiledLayers(), arrange, read_product)


# %% [markdown]
# ## The same numbers?
#
# Both ways compute two prompts, which is chapter 5's work either way, and then a decode step of three requests,
# one of which goes on from another's pages. In float32 the logits must agree as well as any two orders of adding do. In bfloat16 they
# differ by more: PyTorch rounds every result to 8 bits of mantissa, and the kernels round what they store.

# %% name="same"
import torch

from minivllm.batch import Chunk
from minivllm.kernels_numba import backend
from minivllm.model import Decoder
from minivllm.runner import ModelRunner


def small(dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(99, 48, 64, 3, 6, 2, 8, max_context=512)).to(dtype)


kernels = {
    dtype: backend(torch.device("cpu"), dtype)
    for dtype in (torch.float32, torch.bfloat16)
}
prompts = [
    Chunk("A", encode_ids(range(40)), 0, [3, 1, 2], 0, samples=True),
    Chunk("B", encode_ids(range(50, 80)), 0, [7, 4], 0, samples=True),
]
tokens = [
    Chunk("A", encode_ids([41]), 40, [3, 1, 2], 0, samples=True),
    Chunk("B", encode_ids([81]), 30, [7, 4], 0, samples=True),
    Chunk("C", encode_ids([9]), 32, [3, 1, 9], 2, samples=True),
]
for dtype, chosen in kernels.items():
    plain, fast = (
        ModelRunner(small(dtype), 16, 16, backend=each) for each in (None, chosen)
    )
    for batch in (prompts, tokens):
        wanted, found = plain.logits(batch), fast.logits(batch)
        close = (wanted - found).abs().max() / wanted.abs().max()
        limit = 1e-5 if dtype == torch.float32 else 0.05
        who = "chapter 5's layers" if batch is prompts else "kernels"
        print(f"{str(dtype)[6:]}, {who}:", "equal" if close < limit else "DIFFERENT")

# %% [markdown]
# ## The record
#
# The same step, in parts, with PyTorch alone and with kernels:

# %% tags=["hide-input"]
colours = {"products": "published", "head": "pinned", "attention": "private"}
rows = []
for (dtype, who, requests), parts in breakdowns.items():
    start, cells = 0.0, []
    for part, colour in colours.items():
        cells.append((start, 1e3 * parts[part], colour, part))
        start += 1e3 * parts[part]
    whole = 1e3 * sum(parts.values())
    cells.append((start, whole - start, "plain", "rest"))
    rows.append(
        (f"{dtype}, {requests}, {'PyTorch' if who == 'torch' else 'kernels'}", cells)
    )
draw_rows(
    rows,
    unit=4,
    caption="Milliseconds of a decode step of 1, 8 and 16 requests. Dark and blue: weights are read. "
    "Light: contexts are read. The rest is what lies between, Python and the scheduler.",
)

# %% name="won"
print("PyTorch:", pace("torch"))
print("kernels:", pace("auto"))
for dtype, size in (("float32", 4), ("bfloat16", 2)):
    for who, name in (("torch", "PyTorch"), ("auto", "kernels")):
        one, many = (breakdowns[dtype, who, n]["products"] for n in (1, 16))
        print(
            f"{dtype}, {name}: weights at {size * layers / one / 1e9:.0f} GB/s, "
            f"products of 16 requests {1e3 * many:.0f} ms"
        )

# %% [markdown]
# A norm takes [9](#won) microseconds instead of [79](#won), and adds to the stream besides. Contexts are read at
# [12.9](#won) GB a second instead of [6.5](#won), and the weights of one request about as fast as memory gives them,
# in either format. With sixteen requests the 16-bit products take [26](#won) ms and the others [33](#won) ms, with
# half the bytes: reading is not all of it any more.
#
# How far is a step from what its bytes need, at 20 GB a second?

# %% name="bound"
for dtype, size in (("float32", 4), ("bfloat16", 2)):
    for requests in (1, 8, 16):
        read = size * (layers + head + requests * 494 * smollm2.kv_bytes_per_token(1))
        step = sum(breakdowns[dtype, "auto", requests].values())
        least = read / 20e9
        print(
            f"{dtype:8} {requests:2} requests: {1e3 * step:.0f} ms, "
            f"bytes alone {1e3 * least:.0f} ms, {step / least:.1f} times"
        )
most = breakdowns["float32", "auto", 16]
excess = {
    "products": most["products"] - 4 * layers / 20e9,
    "head": most["head"] - 4 * head / 20e9,
    "contexts": most["attention"] - CONTEXTS / 20e9,
}
print("above their bytes, ms:", {n: round(1e3 * s) for n, s in excess.items()})

# %% [markdown]
# And beside transformers, with the same weights?

# %% name="ratios"
for row in record["rows"]:
    name = f"{row['dtype']:8} {row['load']:13} {row['num_requests']:2}"
    low, high = row["ratio"]["low"], row["ratio"]["high"]
    print(
        f"{name}: {row['ratio']['median']:.2f} ({low:.2f} to {high:.2f}) × {row['against']}"
    )
for (dtype, who, requests), parts in breakdowns.items():
    if who != "torch" and requests == 8:
        for part in ("scheduling and cache", "Python"):
            share = parts[part] / sum(parts.values())
            print(f"{dtype}, 8 requests: {part} {share:.1%} of a step")

# %% [markdown]
# The ratios are medians of steps taken in turn, in one process: above 1 the other side takes longer. (*Mixed
# lengths* are sixteen requests of different prompts and answers, against one padded batch.)
# Little is won where a prompt is computed in float32. There both sides call the same product of the same
# library, which takes most of the time. Scheduling and cache are the Python of chapters 3 to
# 7: a small share, for all they decide.
#
# The shared prefix deserves a look. Sixteen requests that begin with the same 480 tokens read them once,
# and the step is faster than the same step with sixteen copies. Prefix reuse is said to save prefill. Here
# it saves decode time too, because the scheduler gave the requests the same *pages*, and not only equal ones.
# The better a step reads its contexts, the less there is left to save: sharing takes memory traffic away, and
# the products stay.
#
# ## What still goes wrong
#
# The record was made on a machine that is shared with others, whose memory traffic is seen in the spread:
# the ratios of one row differ by a tenth and more from one reading to the next, and so will yours. A step of many
# requests takes longer than its bytes, and the excess is spread: some of it in the products, as much in
# the contexts. Processors have instructions that multiply pairs of 16-bit numbers, and matrices of them, which these
# kernels do not use. And fewer bytes would help everywhere: weights of 8 or 4
# bits stay in the file, and are widened when they are loaded. The kernels are for float32 and bfloat16
# on a CPU; on a GPU the page table is followed by nobody
# yet, and contexts are gathered. A step in which a prompt is computed beside decodes is chapter 5's. And the first
# step after an installation waits some seconds for the compiler, once for each format and number of lanes.
#
# ## Exercises
#
# ### Exercise 1
#
# From how many requests on, each with 494 tokens of context, does a float32 step of SmolLM2 read
# more keys and values than weights?

# %% tags=["solution"]
answer_1 = -(-4 * (layers + head) // (494 * smollm2.kv_bytes_per_token(4)))

# %%
assert answer_1 == 24

# %% [markdown]
# ### Exercise 2
#
# A context of 192 tokens is one piece. How long must it be to become two, and how long are these?

# %% tags=["solution"]
from minivllm.kernels_numba import cut

answer_2 = [end - start for start, end in cut(0, 193)]

# %%
assert cut(0, 192) == [(0, 192)] and answer_2 == [128, 65]

# %% [markdown]
# ### Exercise 3
#
# Between 1 and the next bfloat16 lie 2⁻⁷. What do 1 + 2⁻⁸ and 1 + 3 · 2⁻⁸ become, each a tie?

# %% tags=["solution"]
answer_3 = [1.0, 1 + 2**-6]  # to the even neighbour: down here, up there

# %%
ties = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8]])
rounded = torch.empty(1, 2, dtype=torch.bfloat16)
copy(as_array(ties), as_array(rounded))
assert rounded[0].tolist() == answer_3
