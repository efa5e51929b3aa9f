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
READS = 25e9  # bytes a second
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
print("requests  layers    head  contexts    all of it")
for requests in (1, 8, 16):
    contexts = requests * 494 * smollm2.kv_bytes_per_token(4)
    sizes = [f"{b / 1e6:5.0f} MB" for b in (4 * layers, 4 * head, contexts)]
    least = (4 * (layers + head) + contexts) / READS
    print(f"{requests:8}", *sizes, f"   {1e3 * least:.0f} ms at {READS / 1e9:.0f} GB/s")

# %% [markdown]
# In float32 a step reads [425](#bytes) MB of layers, [113](#bytes) MB of head, and at sixteen
# requests [364](#bytes) MB of keys and values. Two cores of the machine of this book's records read
# about [25](#bytes) GB a second, in quiet hours a little more. That makes [22](#bytes) milliseconds for one request, and [36](#bytes) for sixteen.
#
# A record of `minivllm bench engine` on that machine says what a step takes if PyTorch does all of
# it, with the layers of chapter 5:

# %% name="record"
record = json.loads(Path("../figures/measured/engine.json").read_text("utf-8"))
breakdowns = {
    (each["dtype"], each["kernels"], each["num_requests"]): each["parts"]
    for each in record["breakdowns"]
}
steps = [breakdowns["float32", "torch", requests] for requests in (1, 8, 16)]
print("ms with so many requests:     1     8    16")
for name in steps[0]:
    print(f"{name:24}", "".join(f"{1e3 * parts[name]:6.0f}" for parts in steps))
print(f"{'all':24}", "".join(f"{1e3 * sum(parts.values()):6.0f}" for parts in steps))

# %% [markdown]
# Products and head are the reading of the weights. With one request they are most of the step. With
# sixteen they are less than half, for attention has grown with the contexts. *Python* is what is left of a step
# when all other parts are taken away. Hold norms, two a layer, and attention against what they read:

# %% name="slow"
num_norms = 2 * smollm2.num_layers
CONTEXTS = 16 * 494 * smollm2.kv_bytes_per_token(4)


def pace(kernels: str) -> str:
    one, many = (breakdowns["float32", kernels, n] for n in (1, 16))
    speed = CONTEXTS / many["attention"] / 1e9
    return (
        f"{1e6 * one['norms'] / num_norms:.0f} µs a norm, contexts at {speed:.1f} GB/s"
    )


print(f"a norm of one token reads {smollm2.hidden_size * 4 / 1e3:.1f} kB")
print("PyTorch:", pace("torch"))

# %% [markdown]
# [45](#slow) microseconds for [2.3](#slow) kB, and contexts far below the speed of memory. A norm is
# several calls inside PyTorch. Each reads its input, writes an output for the next one, and costs some
# microseconds before it begins. Attention gathers keys into a copy, and then reads the copy.
#
# What helps is known from every GPU: do in one call, in one pass over the numbers, what belongs together.
# Such a function is called a *kernel*, and this chapter writes those of a CPU in Python.
# [Numba](https://numba.pydata.org) compiles a function of loops when it is first called, and keeps the code
# on disk. It translates the function into the instructions of LLVM, a library that many compilers share, and LLVM
# turns these into the processor's. The best of those work on *vectors*: some numbers side by side, here 16.

# %% export="vectors.py"
"""Numba's ways made ours: threads, formats, and vectors that a kernel can name."""

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


# %% [markdown]
# `fastmath` allows sums in another order, which is what vectors of 16 numbers need; `numpy` as error
# model divides by 0 as NumPy does, without a test in each pass of the loop.
#
# What is kept on disk takes three cares. Processes save one after the other. Each kernel's name ends in a label,
# for a linker must not meet one name twice. And by this label, made of its code and that of the kernels it uses,
# it is found again: Numba's own label for it is new in each process.


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# ## Functions that write instructions
#
# Loops do not say everything that a kernel needs. The rest is said in LLVM's instructions. A function marked
# `@intrinsic` runs while a kernel that calls it is being *compiled*. It is told the types of the arguments, and
# names the result's. Then its `generate` gets a `builder`: each method of that writes one
# instruction into the kernel. What it returns is no number yet, but the name of a result, for the next
# instruction to use. Here is one. How often will it print?


# %% name="intrinsic"
@intrinsic
def grow(typing, x, n):
    def generate(context, builder, signature, given):
        place = cgutils.alloca_once_value(builder, given[0])
        with cgutils.for_range(builder, given[1]):
            for _ in range(2):
                product = builder.fmul(builder.load(place), given[0])
                print("written:", product.opname)
                builder.store(product, place)
        return builder.load(place)

    return types.float64(types.float64, types.intp), generate


@njit
def grown(x, n):
    return grow(x, n)


for n in (0, 1, 5):
    print(f"2 after {n} rounds: {grown(2.0, n):.0f}")

# %% [markdown]
# Twice, before the first answer: that was the compiler at work. The Python `for` is gone; it has been unrolled into
# two products. `for_range` has written a loop, and that one runs when the kernel does, as often as `n` says: in
# [5](#intrinsic) rounds the two products were computed ten times, up to [2048](#intrinsic). (`for_range_slice`, further on,
# is the same with a start and a step.) `alloca` makes a place on the stack, and LLVM keeps what is stored there in
# a register where it can. `gep` computes the address of an array's element and reads nothing; `load` reads.
#
# ## Both cores
#
# PyTorch has a team of threads already, OpenMP's, one for each core. After each call they spin for some
# milliseconds, for the next one may come. A second team, Numba's own, would find the cores taken. So the
# kernels ask PyTorch's, if there is one:


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# A team is called by `GOMP_parallel`: with a function, and one address of what it needs. (`bitcast` is about
# addresses: it says of what they are, and changes no bit.) So what is given is packed into one place on the stack, and a new function, `member`, unpacks it. Every member takes the
# next part that nobody has taken, until there is none: a slower core takes fewer. Taking a part is one
# instruction (`atomic_rmw`) that no other core can come between.


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# A kernel for the team is written as one part of it. Where there is no team, one core does all parts. The team
# also has a clock, which will tell where time goes.


# %% export="vectors.py"
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


# %% [markdown]
# ## A lane for each token
#
# A processor computes with vectors, here of 16 numbers: one instruction, sixteen products. Which sixteen? A
# decode step offers them by itself. Every weight meets one number of every request, and nothing that
# happens between products mixes two requests. So the numbers of a step are laid out by feature: sixteen
# requests' first numbers, then their second ones. A *lane* belongs to one token, through all layers: an
# array of a step is [features, lanes], and token 3 is its column 3. A prompt of 512 tokens has more lanes,
# and each core takes 128 at a time. For a few one core is enough: to call the team takes longer than the
# work.
#
# What goes from layer to layer, and what each adds its results to, is the *residual stream*, or the stream
# for short. This kernel adds to it, and writes it, normalised, into another array:


# %% export="kernels_numba.py"
"""Kernels for a CPU, compiled by Numba: a step, layer by layer."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary as Kept  # as long as the owner lives

import numpy as np
import torch
from torch import Tensor

from minivllm.attention import ChunkPlan, PagedAttention, Plan, shared_runs
from minivllm.linear import Multiply, packed_product
from minivllm.model import Layer, RMSNorm, run_layers
from minivllm.runner import Backend
from minivllm.vectors import Float, compiled, config, in_parts

# Numbers in a vector; rows in a tile.
WIDTH, ROWS = (16, 16) if "+avx512f" in config.CPU_FEATURES else (8, 8)
MOST = 32  # tokens: with more of them a product is work, and no longer reading
SPAN = 128  # lanes that a core takes, where there are more


def by_lanes(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel for all lanes of its first array; it gets those of one core's part."""
    part = in_parts(kernel)

    def run(*given: Any) -> None:
        lanes = given[0].shape[1]
        span = lanes if lanes <= MOST else SPAN
        part(-(-lanes // span), span, *given)

    return compiled(run)


@by_lanes
def add_norm(
    part: Any, span: Any, x: Any, delta: Any, weight: Any, eps: Any, out: Any
) -> None:
    """x += delta; out = x, normalised. All [hidden, lanes]; weight [hidden, 1]."""
    first = part * span
    sums = np.zeros(min(span, x.shape[1] - first), np.float32)
    for i in range(len(x)):
        stream, added = x[i, first : first + span], delta[i, first : first + span]
        for lane in range(len(sums)):
            stream[lane] += added[lane]
            sums[lane] += stream[lane] ** 2
    scales = Float(1) / np.sqrt(sums / Float(len(x)) + eps)
    for i in range(len(x)):
        stream, normal = x[i, first : first + span], out[i, first : first + span]
        for lane in range(len(scales)):
            normal[lane] = stream[lane] * scales[lane] * weight[i, 0]


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
    rest = y - whole
    p = Float(1.535336e-4)
    p = p * rest + Float(1.339887e-3)
    p = p * rest + Float(9.618437e-3)
    p = p * rest + Float(5.550332e-2)
    p = p * rest + Float(2.402265e-1)
    p = p * rest + Float(6.931472e-1)
    p = p * rest + Float(1.0)
    return p * float_of(np.uint32((whole + Float(127.0)) * Float(2**23)))


# %% name="exp"
from minivllm.vectors import compiled, exp


@compiled
def exp_all(given, out):
    for i in range(len(given)):
        out[i] = exp(given[i])


for end in (87, 1):
    x = np.linspace(-end, end, 100_001, dtype=np.float32)
    found = np.empty_like(x)
    exp_all(x, found)
    error = np.abs(found / np.exp(x.astype(np.float64)) - 1).max()
    print(f"largest relative error from {-end} to {end}: {error:.0e}")

# %% [markdown]
# Far from 0 the exponent itself is rounded more coarsely, and that is a relative error of the power:
# [4e-06](#exp), against [1e-07](#exp) near 0. With `exp` the gate is one loop. Heads are normalised and
# rotated lane by lane.


# %% export="kernels_numba.py"
from minivllm.vectors import exp


@in_parts
def gate_some(part: Any, gates: Any, ups: Any, out: Any) -> None:
    """A core's part of `gate`."""
    for i in range(part * SOME, min((part + 1) * SOME, len(out))):
        out[i] = gates[i] / (Float(1) + exp(-gates[i])) * ups[i]


SOME = 16_384  # numbers that a core takes


@compiled
def gate(both: Any, out: Any) -> None:
    """out = silu(first half) * second half, [2 * inner, lanes] -> [inner, lanes]."""
    gates, ups = both[: len(out)].reshape(-1), both[len(out) :].reshape(-1)
    told = out.reshape(-1)
    gate_some(-(-len(told) // SOME), gates, ups, told)


@by_lanes
def norm_heads(
    part: Any, span: Any, heads: Any, weight: Any, eps: Any, head_dim: int
) -> None:
    """Normalise each head of rows [heads * head_dim, lanes], as many as weights."""
    first, last = part * span, min((part + 1) * span, heads.shape[1])
    for start in range(0, len(weight), head_dim):
        sums = np.zeros(last - first, np.float32)
        for i in range(start, start + head_dim):
            row = heads[i, first:last]
            for lane in range(len(sums)):
                sums[lane] += row[lane] ** 2
        scales = Float(1) / np.sqrt(sums / Float(head_dim) + eps)
        for i in range(start, start + head_dim):
            row = heads[i, first:last]
            for lane in range(len(scales)):
                row[lane] *= scales[lane] * weight[i, 0]


@by_lanes
def rotate(part: Any, span: Any, heads: Any, num_rows: int, cos: Any, sin: Any) -> None:
    """Rotate the first rows of [heads * head_dim, lanes]; cos, sin [half, lanes]."""
    first, last, half = part * span, (part + 1) * span, len(cos)
    for start in range(0, num_rows, 2 * half):
        for i in range(half):
            left = heads[start + i, first:last]
            right = heads[start + half + i, first:last]
            c, s = cos[i, first:last], sin[i, first:last]
            for lane in range(len(left)):
                a, b = left[lane], right[lane]
                left[lane] = a * c[lane] - b * s[lane]
                right[lane] = b * c[lane] + a * s[lane]


# %% [markdown]
# All that is computed is float32. What is *read* may be shorter: weights, keys and values of 16 bits are
# half the bytes. A bfloat16 is the upper half of a float32: sixteen bits, and sixteen zeros behind them.
# Numba knows no bfloat16, and needs none. The bits are shifted up when they are read, and a new key is
# rounded to the nearest when it is written: just under half of the last bit that is kept is added before
# the cut, and a full half if that bit is 1, so that a tie goes to the even neighbour. `put` has no body of
# its own: Numba asks for one when it compiles a call, and gets the one for the array's format.


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
# other. So we say both. Numba lets a program add a type, here a register's worth of numbers:


# %% export="vectors.py"
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


# %% [markdown]
# The instructions are written by a `Writer`. It finds an address in an array, and a vector there:


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# And it computes. A number that meets a whole vector is first spread over one.


# %% export="vectors.py" tags=["hide-input"]
class Writer(Writer):
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


# %% [markdown]
# The intrinsics that a kernel calls are thin: they name their types, and let a `Writer` write. A vector's
# `width` must be known while the kernel is compiled: `prefer_literal` asks for the number, and not only for its type.


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# ## Attention where the pages lie
#
# PyTorch's attention wants keys side by side. So chapter 5 gathers: it reads each key from its page, writes
# it into a row of its own, and then attention reads it again. A kernel can follow the page table, one slot
# after the other. What a processor guesses about the next read is wrong there at the end of each page; we
# know better, and ask for a slot some places ahead.
#
# How much does one core do at a time? A request is too much: with one request the other core would wait. So
# contexts are cut into *pieces* of about 128 tokens. A piece leaves the average of its values and the
# logarithm of the sum of its weights, as chapter 5's `attend` does. Here a vector lies along a head, and
# not across requests: each request has a context of its own, and no number of it meets two of them.
#
# A `Reader` finds a head in a slot, and asks for the slots to come:


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# A score is a sum along a vector, and such a sum is dear: four times its halves are added. Eight of them
# at once are cheaper. Two vectors of halves fit into one, and that into half of another, so that a quarter
# of the additions is left:


# %% export="vectors.py" tags=["hide-input"]
class Writer(Writer):
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


# %% [markdown]
# Eight slots and the three heads that share a key make twenty-four sums, all in registers. In what follows
# every Python loop is unrolled: it is over heads, slots, and vectors of a head, whose numbers the compiler knows.


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# An average grows in registers too, for all heads of a group at once. Only the loop over the slots runs,
# for their number is not known:


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# Between the two come the weights, a softmax:


# %% export="kernels_numba.py"
from minivllm.vectors import average, larger, load, put, score, store


@compiled
def weigh(scores: Any) -> Any:
    """Softmax, in place; the logarithm of the sum of the exponentials."""
    largest, total = Float(-3.4e38), Float(0)
    for i in range(len(scores)):
        largest = larger(largest, scores[i])
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
        total += scores[i]
    scale = Float(1) / total
    for i in range(len(scores)):
        scores[i] *= scale
    return largest + np.log(total)


# %% [markdown]
# So a core goes through a piece's slots twice, for the keys and then for the values. All heads meet some slots before the next
# ones are read, for the heads of a slot lie side by side.


# %% export="kernels_numba.py"
def shape_of_reads(head_dim: int, group: int) -> tuple[int, int, int, int]:
    """Heads and slots at a time, as many sums as registers hold; head_dim; width."""
    width, most = math.gcd(head_dim, WIDTH), WIDTH + WIDTH // 2
    fits = (n for n in range(group, 1, -1) if group % n == 0)
    heads = next((n for n in fits if n * head_dim <= most * width), 1)
    slots = next(n for n in (8, 4, 2, 1) if n <= width and n * heads <= most)
    return heads, slots, head_dim, width


STRIP = 16  # slots that are averaged for a head before the next


@cache
def make_attend(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for one shape of heads: loops of known length become registers."""
    shape, scale = shape_of_reads(head_dim, group), Float(1 / math.sqrt(head_dim))
    heads_at_once, slots_at_once, *_ = shape

    def attend(
        piece: Any,
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        pieces: Any,
        found: Any,
        log_sums: Any,
    ) -> None:
        """What a query finds in a piece; the logarithms of the sums of weights.

        `heads` [any, lanes] begin with the queries; keys and values are [slots,
        kv_heads * head_dim]; tables and pieces are a `StepPlan`'s. The results go to
        `found` [pieces, heads, head_dim] and `log_sums` [pieces, heads].
        """
        num_heads = found.shape[1]
        lane, table, start, end = pieces[piece]
        slots = tables[table, start:end]
        asked = np.empty((num_heads, head_dim), np.float32)
        for head in range(num_heads):
            for j in range(head_dim):
                asked[head, j] = heads[head * head_dim + j, lane] * scale
        scores = np.empty((num_heads, len(slots) + slots_at_once), np.float32)
        for first in range(0, len(slots), slots_at_once):
            for head in range(0, num_heads, heads_at_once):
                column = head // group * head_dim
                score(asked, head, keys, column, slots, first, scores, shape)
        for head in range(num_heads):
            log_sums[piece, head] = weigh(scores[head, : len(slots)])
        told = found[piece]
        told[:] = 0
        for first in range(0, len(slots), STRIP):
            end = min(first + STRIP, len(slots))
            for head in range(0, num_heads, heads_at_once):
                column = head // group * head_dim
                average(scores, head, values, column, slots, first, end, told, shape)

    return in_parts(attend)


# %% [markdown]
# The plan of a step says which pieces there are, and who reads them. A piece that several tokens read
# together is a *run*. There are two kinds. Contexts that share pages have one, or several, up to where they
# part. And the new tokens of a prompt read the same context, each up to itself: they do so sixteen at a
# time, up to the last of the sixteen. Runs are longer than other pieces, because there is more to do in
# each.


# %% export="kernels_numba.py"
PIECE = 128  # tokens of context: enough to divide among cores, few to merge
SHARED = 256  # the same, for a context that several share
LONGER = 512  # for the new tokens of a prompt
READERS = 16  # new tokens of a prompt that read it together


@dataclass(frozen=True, kw_only=True)
class StepPlan(Plan):
    """A plan whose tokens read their contexts piece by piece. A lane is a token.

    `slots` [tokens] are those to write to; `tables` [chunks, longest] those of each
    context. `pieces` [pieces, 4] are for a single token: (lane, table, start, end).
    `runs` [runs, 5] are for several: (table, start, end), and where their `readers`
    begin and end. A reader (lane, end) sees the context up to its own end, and what it
    finds counts as a further piece. Those of lane i are `order[ends[i - 1] : ends[i]]`,
    and are merged, unless all that it reads is one run.
    """

    slots: Any
    tables: Any
    pieces: Any
    runs: Any
    readers: Any
    order: Any
    ends: Any
    merged: Any

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the kernels take of it."""
        where = self.slots, self.tables, self.pieces, self.runs, self.readers
        return *where, self.order, self.ends, self.merged


# %% [markdown]
# `arrange` makes such a plan of chapter 5's:


# %% export="kernels_numba.py" tags=["hide-input"]
def arrange(plan: Plan, page_size: int, memory: Tensor) -> Plan:
    """Cut the contexts of a step into pieces; those that are shared, once.

    `memory` is for other backends.
    """
    tables = slot_tables(plan.chunks, page_size)
    singles = [(i, c) for i, c in enumerate(plan.chunks) if c.num_new == 1]
    runs, readers, starts = find_runs(singles, page_size)
    pieces = [
        (chunk.rows.start, table, *piece)
        for (table, chunk), start in zip(singles, starts, strict=True)
        for piece in cut(start, chunk.length, PIECE)
    ]
    for table, chunk in enumerate(plan.chunks):
        if chunk.num_new > 1:
            add_chunk(chunk, table, runs, readers)
    own, others = as_table(pieces, 4), as_table(readers, 2)
    owners = np.concatenate((own[:, 0], others[:, 0]))
    counts = np.bincount(owners)
    ends = counts.cumsum()
    counts[own[:, 0]] += 1  # these are never alone
    return StepPlan(
        *(plan.positions, plan.write_slots, plan.chunks),
        slots=plan.write_slots.numpy(),
        tables=tables,
        pieces=own,
        runs=as_table(runs, 5),
        readers=others,
        order=np.argsort(owners, kind="stable"),
        ends=ends,
        merged=np.flatnonzero(counts > 1),
    )


def slot_tables(chunks: Sequence[ChunkPlan], page_size: int) -> Any:
    """The slots of each context, [chunks, longest]; what lies behind one is page 0."""
    num_pages = [-(-chunk.length // page_size) for chunk in chunks]
    longest = max(num_pages)
    known = zip(num_pages, chunks, strict=True)
    rows = ([*chunk.pages[:n], *[0] * (longest - n)] for n, chunk in known)
    slots = as_table(rows, longest)[:, :, None] * page_size + np.arange(page_size)
    return slots.reshape(len(chunks), -1)


def as_table(rows: Iterable[Sequence[int]], size: int) -> Any:
    """Rows of numbers as an array; quicker than `np.array` finds out what they are."""
    return np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, size)


# %% [markdown]
# Chapter 5's `shared_runs` finds the pages that contexts share. They are cut too, each piece a run, and
# what a token reads alone starts behind them.


# %% export="kernels_numba.py" tags=["hide-input"]
Numbers = list[tuple[int, ...]]


def find_runs(
    singles: Sequence[tuple[int, ChunkPlan]], page_size: int
) -> tuple[Numbers, Numbers, list[int]]:
    """Shared runs and their readers; where each own context starts."""
    tables = [chunk.shareable for _, chunk in singles]
    runs, readers, starts = Numbers(), Numbers(), [0] * len(singles)
    for members, first, last in shared_runs(tables, page_size):
        table = singles[members[0]][0]
        for piece in cut(first * page_size, last * page_size, SHARED):
            runs.append((table, *piece, len(readers), len(readers) + len(members)))
            some = [singles[i][1] for i in members]
            readers += [(chunk.rows.start, chunk.length) for chunk in some]
        for i in members:
            starts[i] = last * page_size
    return runs, readers, starts


def add_chunk(chunk: ChunkPlan, table: int, runs: Numbers, readers: Numbers) -> None:
    """Runs for the new tokens of a prompt, some at a time: all up to their last."""
    behind = chunk.length - chunk.rows.stop  # of a lane's position
    for lane in range(chunk.rows.start, chunk.rows.stop, READERS):
        lanes = range(lane, min(lane + READERS, chunk.rows.stop))
        for piece in cut(0, lanes[-1] + behind + 1, LONGER):
            runs.append((table, *piece, len(readers), len(readers) + len(lanes)))
            readers += [(i, i + behind + 1) for i in lanes]


def cut(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """The pieces of a context from `start`; the last of several is not very short."""
    cuts = [start, *range(start + size, end - size // 2, size), end]
    return list(pairwise(cuts))


# %% tags=["hide-input"]
from minivllm.attention import plan_batch
from minivllm.batch import Chunk
from minivllm.drawing import CHAR, draw_rows
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
for row, _, start, end in plan.pieces.tolist():
    rows[row][1].append((start, end - start, "private", f"{end - start}"))
for _, start, end, first, last in plan.runs.tolist():
    for row, _ in plan.readers[first:last].tolist():
        rows[row][1].append((start, end - start, "pinned", f"{end - start}"))
draw_rows(
    rows,
    unit=1.4,
    caption="Three contexts, cut up: the numbers are tokens that a core reads in one go. "
    "A and B share 480 tokens (blue), which are read once for both, head by head.",
)

# %% [markdown]
# ## Products that read
#
# With few tokens a product is reading: each weight must come from memory, become 32 bits wide if it is 16,
# meet its input of every token, and be added up. Which way round? One token has one way: a vector of
# inputs, sixteen at a time, meets a vector of a weight's row, and at the end the sixteen sums are added.
# Eight tokens can do the same, and use every vector of weights eight times once it is there. With three
# rows that makes twenty-four sums, and a processor with thirty-two registers keeps them all. While they
# grow, the next rows are asked for.


# %% export="vectors.py"
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


# %% [markdown]
# From nine tokens on, lanes are better: a weight is spread over all lanes, meets its input of sixteen
# tokens, and no vector must be added up at the end. Sixteen rows keep sixteen registers of sums busy, or eight
# rows of 32 lanes. Such a block of sums, which stays where it is while weights and inputs pass, is a *tile*:


# %% export="vectors.py"
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


# %% [markdown]
# How does a weight come to a tile in time? If one waits for it, a product takes its reading *plus* its
# arithmetic, where we want the longer of both. One could ask for the next sixteen rows while the present ones are at
# work. Where would they wait?

# %% name="near"
NEAREST = 48  # KB: each core's first cache, on the machine of the records
for size in (smollm2.hidden_size, smollm2.intermediate_size):
    kilobytes = f"{16 * size * 4 / 2**10:.0f} KB"
    print(f"{size:4} inputs, float32: of 16 tokens {kilobytes}, 16 rows {kilobytes}")
print(f"16 rows, 4 times 32 numbers of each: {16 * 4 * 32 * 4 / 2**10:.0f} KB")
print(f"a core's nearest cache: {NEAREST} KB")

# %% [markdown]
# Every row meets the same inputs, so these shall stay: [36](#near) KB. Sixteen whole rows are as much again, and the cache
# is full before the next ones come. There is no room either to widen 16-bit rows into a place of their
# own. So a `sweep` goes along its rows a *stretch* at a time, 32 numbers of each, and has at most four stretches under
# way: [8](#near) KB. (The [96](#near) KB of inputs of the last product in a layer do not fit, whatever the rows do.)
#
# A 16-bit stretch is widened when it is needed. Two neighbours are one word of 32 bits. Its upper half is a
# float32 as it stands, once the lower is cleared; and its lower half is one when it is moved up. So 32
# numbers become two vectors with two instructions, first the even ones, then the odd ones.


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# A processor keeps track of only so many reads. At one more everything waits, the arithmetic too. So
# they are strewn among the arithmetic, which takes sixteen steps for a stretch: two numbers of each row. In
# each step a sweep of sixteen rows asks for one row, three stretches ahead, and at the end of the rows for
# the beginning of the next ones. (Eight rows in 16 bits have fewer lines than there are steps: each line is
# asked for twice.)


# %% export="vectors.py" tags=["hide-input"]
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


# %% [markdown]
# A core takes 96 outputs at a time, by one way of reading or the other:


# %% export="kernels_numba.py"
from minivllm.vectors import LINE_BITS, STRETCH, as_array, dots, sweep, tile

FEW = 8  # tokens
BLOCK = 96  # outputs that a core takes


@cache
def make_multiply(lanes: int) -> Callable[..., None]:
    """The product's kernel for so many lanes."""
    if few := lanes <= FEW:
        read, step = dots, lanes
        shape = 4 if lanes == 1 else max(1, WIDTH // 5), lanes, WIDTH
    else:
        vectors = min(2, lanes // WIDTH)
        read, step = sweep, vectors * WIDTH
        shape = ROWS // vectors, vectors, WIDTH
    rows = shape[0]  # as many sums as registers hold

    def multiply_block(block: Any, x: Any, weight: Any, out: Any) -> None:
        last = min(len(weight), (block + 1) * BLOCK)
        for at in range(block * BLOCK, last, rows):
            first = min(at, len(weight) - rows)  # the last: some of them again
            for lane in range(0, lanes, step):
                read(weight, first, x, lane, out, shape)

    blocks = in_parts(multiply_block)

    def multiply(product: Any, x: Any, out: Any, num_tokens: Any) -> None:
        """out = weight times x, plus bias: [inputs, lanes] -> [outputs, lanes]."""
        weight, bias = product
        given = x.T.copy() if few else x
        blocks(-(-len(weight) // BLOCK), given, weight, out)
        for i in range(len(bias)):
            for lane in range(lanes):
                out[i, lane] += bias[i, 0]

    return compiled(multiply)


# %% [markdown]
# A tile is also what many readers of one context ask for. Sixteen readers of one system prompt, or sixteen
# new tokens of one prompt, three heads each that share a key: 48 queries meet the same key, as 16 tokens
# meet the same weight. The keys of a run are the rows of a weight, and each query is a column. Then the
# weights of the queries meet the values, a second weight, transposed.
#
# Here all is near already, and what counts is how often something is loaded. A row that meets one vector of
# queries loads a number for each product. Three vectors use it three times, and eight rows of them fill the
# registers. In NumPy this `tile` would be
# `out[first:][:8, column:][:, :48] = rows[first:][:8] @ x[:, column:][:, :48]`.


# %% export="vectors.py"
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


# %% [markdown]
# Keys are copied after all, but once for 48 queries. A product of what was copied goes through its tiles:


# %% export="kernels_numba.py"
@cache
def make_gather(head_dim: int) -> Callable[..., None]:
    """Copies a head of some slots."""
    width = math.gcd(head_dim, 16)

    def gather(memory: Any, slots: Any, start: Any, out: Any) -> None:
        """out[i] = the head that begins at `start` in slots[i], as float32."""
        for i in range(len(slots)):
            for j in range(0, head_dim, width):
                store(out, i, j, load(memory, slots[i], start + j, width))

    return compiled(gather)


@cache
def make_tiles(transposed: int) -> Callable[..., None]:
    """A product of small arrays, on one core: weight, or weight transposed, times x."""
    large, small = ((HALF, vectors, WIDTH, transposed) for vectors in (3, 1))

    def multiply_tiles(weight: Any, x: Any, out: Any) -> None:
        columns, step = x.shape[1], 3 * WIDTH
        for row in range(0, len(out), HALF):
            for column in range(0, columns - columns % step, step):
                tile(weight, row, x, column, out, large)
            for column in range(columns - columns % step, columns, WIDTH):
                tile(weight, row, x, column, out, small)

    return compiled(multiply_tiles)


HALF = ROWS // 2  # three vectors of sums for each: the registers are full


# %% [markdown]
# A query has no weight for what comes after its token:


# %% export="kernels_numba.py"
@compiled
def weigh_queries(scores: Any, seen: Any) -> Any:
    """Each column of scores [tokens, queries] becomes weights, as far as it has `seen`.

    They are not divided by their sums yet. The largest scores, and the sums.
    """
    largest = np.full(scores.shape[1], Float(-3.4e38), np.float32)
    total = np.zeros(scores.shape[1], np.float32)
    for row in range(len(scores)):
        i = np.int32(row)
        for query in range(scores.shape[1]):
            score = scores[row, query] if i < seen[query] else Float(-3.4e38)
            largest[query] = larger(largest[query], score)
    for row in range(len(scores)):
        i = np.int32(row)
        for query in range(scores.shape[1]):
            weight = exp(scores[row, query] - largest[query])
            scores[row, query] = weight if i < seen[query] else Float(0)
            total[query] += scores[row, query]
    return largest, total


# %% [markdown]
# A core takes one K/V head of a run: there is enough in it.


# %% export="kernels_numba.py" tags=["hide-input"]
@cache
def make_attend_together(head_dim: int, group: int) -> Callable[..., None]:
    """The kernel for what several tokens read: a run, one K/V head of it at a time."""
    multiply_tiles, scale = make_tiles(0), Float(1 / math.sqrt(head_dim))
    average_tiles, gather = make_tiles(1), make_gather(head_dim)
    deep = -(-head_dim // ROWS) * ROWS

    def attend_together(
        job: Any,
        heads: Any,
        keys: Any,
        values: Any,
        tables: Any,
        runs: Any,
        readers: Any,
        found: Any,
        log_sums: Any,
        ends: Any,
        out: Any,
    ) -> None:
        """As `attend`, for the readers of a run; into `out` if they read no more."""
        num_kv_heads = keys.shape[1] // head_dim
        kv = job % num_kv_heads
        table, start, end, first, last = runs[job // num_kv_heads]
        slots, some = tables[table, start:end], readers[first:last]
        rows = -(-len(slots) // ROWS) * ROWS
        queries = -(-len(some) * group // WIDTH) * WIDTH
        asked, seen = np.zeros((deep, queries), np.float32), np.zeros(queries, np.int32)
        for g in range(group):
            for j in range(head_dim):
                row = (kv * group + g) * head_dim + j
                for i in range(len(some)):
                    asked[j, g * len(some) + i] = heads[row, some[i, 0]] * scale
            for i in range(len(some)):
                seen[g * len(some) + i] = min(some[i, 1], end) - start
        known = np.empty((rows, deep), np.float32)
        known[len(slots) :] = 0
        known[:, head_dim:] = 0
        gather(keys, slots, kv * head_dim, known)
        scores = np.empty((rows, queries), np.float32)
        multiply_tiles(known, asked, scores)
        largest, total = weigh_queries(scores, seen)
        gather(values, slots, kv * head_dim, known)
        average_tiles(known, scores, asked)
        for query in range(queries):
            total[query] = max(total[query], Float(1e-30))  # no reader's
            largest[query] += np.log(total[query])
        for j in range(head_dim):
            for query in range(queries):
                asked[j, query] /= total[query]
        token = some[0, 0]
        alone = ends[token] - (ends[token - 1] if token else 0) == 1
        for g in range(group):
            head, query = kv * group + g, g * len(some)
            if alone:
                for j in range(head_dim):
                    for i in range(len(some)):
                        out[head * head_dim + j, some[i, 0]] = asked[j, query + i]
            else:
                for i in range(len(some)):
                    log_sums[first + i, head] = largest[query + i]
                    for j in range(head_dim):
                        found[first + i, head, j] = asked[j, query + i]

    return in_parts(attend_together)


# %% [markdown]
# In the end the pieces of a token are put together, each weighed by its part of the whole sum. A prompt's token that
# has read all in one run needs none of that: the run has written its result.


# %% export="kernels_numba.py"
@in_parts
def merge(
    head: Any, found: Any, log_sums: Any, merged: Any, order: Any, ends: Any, out: Any
) -> None:
    """out [heads * head_dim, lanes]: a head's pieces, by their sums of weights."""
    head_dim = found.shape[2]
    average = np.empty(head_dim, np.float32)
    for lane in merged:
        pieces = order[ends[lane - 1] if lane else 0 : ends[lane]]
        largest, total = Float(-3.4e38), Float(0)
        for piece in pieces:
            largest = larger(largest, log_sums[piece, head])
        average[:] = 0
        for piece in pieces:
            weight, part = exp(log_sums[piece, head] - largest), found[piece, head]
            total += weight
            for j in range(head_dim):
                average[j] += weight * part[j]
        for j in range(head_dim):
            out[head * head_dim + j, lane] = average[j] / total


# %% [markdown]
# With a prompt of 512 tokens what counts is arithmetic. That is PyTorch's float32 product, for either
# format: 16-bit weights are widened first, product by product. Both ways take the weights as the checkpoint has
# them, so there is one copy, and both know the lanes: weight times [inputs, lanes] is a product of two
# matrices.


# %% export="kernels_numba.py"
def multiply_many(product: Any, x: Any, out: Any, num_tokens: int) -> None:
    """As `make_multiply`'s, by PyTorch."""
    weight, bias = (torch.from_numpy(each) for each in product)
    weight = weight.view(torch.bfloat16) if weight.dtype == torch.uint16 else weight
    given, told = (torch.as_tensor(each)[:, :num_tokens] for each in (x, out))
    torch.mm(weight.float(), given, out=told)
    if len(bias):
        told += bias


def multiply_for(lanes: int) -> Callable[..., None]:
    """The product for so many lanes: (rows, bias), x, out, number of tokens."""
    return make_multiply(lanes) if lanes <= MOST else multiply_many


# %% [markdown]
# Whoever has tokens in rows, as chapter 5's layers have, calls a `ReadProduct`:


# %% export="kernels_numba.py"
NO_BIAS = np.empty((0, 1), np.float32)


class ReadProduct:
    """x -> x times weight, plus bias: read once for few tokens, PyTorch's for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        own = NO_BIAS if bias is None else bias.float()[:, None].numpy()
        self.arrays = as_array(weight), own
        self._room: dict[int, Any] = {}  # new memory is slow at first touch

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] -> [tokens, outputs]."""
        if not len(x):
            return x.new_empty(0, len(self.weight))
        if len(x) > MOST:
            told = torch.empty(len(x), len(self.weight))
            multiply_many(self.arrays, x.float().t(), told.t(), len(x))
            return told.to(x.dtype)
        lanes = lanes_for(len(x))
        if lanes not in self._room:
            self._room[lanes] = np.empty((len(self.weight), lanes), np.float32)
        out = self._room[lanes]
        make_multiply(lanes)(self.arrays, as_lanes(x), out, len(x))
        return as_rows(out, np.arange(len(x)), x.new_empty(len(x), len(self.weight)))


# %% [markdown]
# Up to 32 tokens lanes come in four numbers, because each has kernels of its own. What is left over is 0.


# %% export="kernels_numba.py"
def lanes_for(num_tokens: int) -> int:
    """How many lanes so many tokens take.

    Many take an odd number of vectors: columns whose numbers lie a power of two apart
    would all want the same few places of a cache.
    """
    if num_tokens > MOST:
        return (-(-num_tokens // 16) | 1) * 16
    return 1 if num_tokens == 1 else next(n for n in (8, 16, 32) if n >= num_tokens)


def as_lanes(x: Tensor) -> Any:
    """[tokens, features] -> float32 [features, lanes]; lanes left over are 0."""
    return fill(np.empty((x.shape[1], lanes_for(len(x))), np.float32), x)


def fill(out: Any, x: Tensor) -> Any:
    """Write [tokens, features] into [features, lanes]; lanes left over become 0."""
    torch.from_numpy(out[:, : len(x)]).copy_(x.t())
    out[:, len(x) :] = 0
    return out


def as_rows(columns: Any, chosen: Any, out: Tensor) -> Tensor:
    """Some lanes of [features, lanes] -> [tokens, features]."""
    to_rows(-(-len(columns) // BLOCK), columns, chosen, as_array(out))
    return out


@in_parts
def to_rows(block: Any, columns: Any, chosen: Any, out: Any) -> None:
    """Each chosen lane as a row, in the format of the result."""
    first, last = block * BLOCK, (block + 1) * BLOCK
    some, told = columns[first:last], out[:, first:last]
    for row in range(len(chosen)):
        lane = some[:, chosen[row]]
        for i in range(len(lane)):
            put(told, row, i, lane[i])


# %% [markdown]
# And a weight whose shape fits no tile is packed, as before.


# %% export="kernels_numba.py"
def read_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of a weight that the kernels can read, or else packed."""
    num_outputs, num_inputs = weight.shape
    if num_outputs < ROWS or num_inputs < STRETCH or num_inputs % 16:
        packed = packed_product(weight, bias)
        return lambda x: packed(x.to(weight.dtype))
    return ReadProduct(weight, bias)


# %% [markdown]
# Where the weights lie counts too. A program's addresses are not memory's: the system deals memory out in pages
# (an engine's pages have their name from these), and a processor looks up for each address where its page is.
# It remembers some of these answers. How many pages has a model?

# %% name="pages"
for name, size in (("4 kB", 2**12), ("2 MB", 2**21)):
    print(f"SmolLM2 in float32 is {4 * (layers + head) / size:,.0f} pages of {name}")

# %% [markdown]
# A step asks for each of them once, and with the small ones most questions go to a table in memory. Linux gives
# large pages to a program that asks. NumPy asks, for arrays of 4 MB and more. Most weights of SmolLM2 are smaller,
# so they are laid one after the other into large arrays, each beginning where a line of the cache begins. Keys and values get
# such memory as well.


# %% export="kernels_numba.py"
class LargePages:
    """Memory for tensors, side by side in blocks that may lie in pages of 2 MB.

    A block lives as long as one of its tensors.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: object = "cpu"
    ) -> Tensor:
        """As `torch.empty`, on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        lines = -(-size // LINE) * LINE
        if lines > len(self._left):
            block = np.empty(max(lines, BLOCK_SIZE) + LINE, np.uint8)
            self._left = torch.from_numpy(block[-block.ctypes.data % LINE :])
        taken, self._left = self._left[:size], self._left[lines:]
        return taken.view(dtype).view(*shape)


LINE, BLOCK_SIZE = LINE_BITS // 8, 2**25  # bytes


# %% [markdown]
# ## A layer of kernels
#
# What is left is to call them in order. From Python each call takes some microseconds, for every array that
# is given to a kernel is looked through first. A kernel calls a kernel for next to nothing, so the order is
# compiled too. But who will then say where the time goes? The kernels themselves, by the clock of the team.


# %% export="kernels_numba.py"
from minivllm.vectors import elsewhere, now

PARTS = ("norms", "products", "rotation", "attention", "gates")
NORMS, PRODUCTS, ROTATION, ATTENTION, GATES = range(len(PARTS))


@compiled
def note(spent: Any, part: int, start_s: float) -> Any:
    """Add the time since the start to a part's seconds; what time it is."""
    end_s = now()
    spent[part] += end_s - start_s
    return end_s


@compiled
def clock() -> Any:
    """What time it is."""
    return now()


# %% [markdown]
# Attention begins with writing what the step's own tokens bring:


# %% export="kernels_numba.py"
@by_lanes
def write(
    part: Any, span: Any, heads: Any, first: Any, slots: Any, keys: Any, values: Any
) -> None:
    """Store each lane's key and value, rows of `heads` from `first` on, in its slot."""
    size = keys.shape[1]
    for lane in range(part * span, min((part + 1) * span, len(slots))):
        for j in range(size):
            put(keys, slots[lane], j, heads[first + j, lane])
            put(values, slots[lane], j, heads[first + size + j, lane])


@cache
def make_find(head_dim: int, group: int) -> Callable[..., None]:
    """All of a layer's attention, for one shape of heads."""
    attend = make_attend(head_dim, group)
    attend_together = make_attend_together(head_dim, group)

    def find(heads: Any, memory: Any, plan: Any, found: Any, out: Any) -> None:
        """Store each lane's key and value; out: what it finds in its context."""
        slots, tables, pieces, runs, readers, order, ends, merged = plan
        keys, values = memory
        averages, log_sums = found
        own, num_jobs = len(pieces), keys.shape[1] // head_dim * len(runs)
        write(heads, len(out), slots, keys, values)
        attend(own, heads, keys, values, tables, pieces, averages, log_sums)
        if num_jobs:
            told = averages[own:], log_sums[own:], ends, out
            attend_together(num_jobs, heads, keys, values, tables, runs, readers, *told)
        if len(merged):
            merge(averages.shape[1], averages, log_sums, merged, order, ends, out)

    return compiled(find)


# %% [markdown]
# The order itself is plain Python. A layer is a tuple of its arrays: weights, keys and values.


# %% export="kernels_numba.py"
@cache
def make_layer(lanes: int, head_dim: int, group: int) -> tuple[Any, Any]:
    """A layer in two functions: up to what attention finds, and from there on."""
    multiply, find = multiply_for(lanes), make_find(head_dim, group)

    def look(
        number: int,
        room: Any,
        layer: Any,
        eps: Any,
        plan: Any,
        rotation: Any,
        found: Any,
        spent: Any,
    ) -> None:
        """seen = what attention finds, for so many tokens."""
        stream, delta, normal, heads, seen, _, _ = room
        norm, qkv, bias, head_norm = layer[:4]
        start_s = clock()
        add_norm(stream, delta, norm, eps[0], normal)
        start_s = note(spent, NORMS, start_s)
        multiply((qkv, bias), normal, heads, number)
        start_s = note(spent, PRODUCTS, start_s)
        norm_heads(heads, head_norm, eps[1], head_dim)
        start_s = note(spent, NORMS, start_s)
        rotate(heads, len(seen) + layer[-1].shape[1], rotation[0], rotation[1])
        start_s = note(spent, ROTATION, start_s)
        find(heads, layer[-2:], plan, found, seen)
        note(spent, ATTENTION, start_s)

    def think(number: int, room: Any, layer: Any, eps: Any, spent: Any) -> None:
        """Add what attention found to the stream; delta = what the MLP makes of it."""
        stream, delta, normal, _, seen, both, inner = room
        output, own, norm, gate_and_up, other, down, last = layer[4:-2]
        start_s = clock()
        multiply((output, own), seen, delta, number)
        start_s = note(spent, PRODUCTS, start_s)
        add_norm(stream, delta, norm, eps[0], normal)
        start_s = note(spent, NORMS, start_s)
        multiply((gate_and_up, other), normal, both, number)
        start_s = note(spent, PRODUCTS, start_s)
        gate(both, inner)
        start_s = note(spent, GATES, start_s)
        multiply((down, last), inner, delta, number)
        note(spent, PRODUCTS, start_s)

    return look, think


# %% [markdown]
# For few tokens the loop over the layers is compiled with it, and a step is one call. (To look through all
# layers' arrays would take long again. All layers look alike, so a kernel gets the first one's arrays and
# the addresses of the others.)


# %% export="vectors.py"
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


# %% export="kernels_numba.py"
@compiled
def finish(room: Any, end: Any, spent: Any) -> None:
    """out [chosen, hidden]: the last norm of the lanes that are chosen."""
    chosen, out, weight, eps = end
    start_s = clock()
    add_norm(room[0], room[1], weight, eps, room[2])
    to_rows(-(-len(room[2]) // BLOCK), room[2], chosen, out)
    note(spent, NORMS, start_s)


@cache
def make_layers(lanes: int, head_dim: int, group: int) -> Callable[..., None]:
    """All layers of a step of few tokens."""
    parts = make_layer(lanes, head_dim, group)
    look, think = (compiled(part, inline="always") for part in parts)

    def run_all(
        number: int,
        room: Any,
        first: Any,
        addresses: Any,
        eps: Any,
        plan: Any,
        rotation: Any,
        found: Any,
        spent: Any,
        end: Any,
    ) -> None:
        for i in range(len(addresses)):
            layer = elsewhere(first, addresses[i])
            look(number, room, layer, eps, plan, rotation, found, spent)
            think(number, room, layer, eps, spent)
        finish(room, end, spent)

    return compiled(run_all)


# %% [markdown]
# For many, Python goes from layer to layer with the same two functions, for the products between the kernels
# are PyTorch's then. In both cases no tensor is made between two products: all kernels of a step
# write to the same arrays, layer after layer.


# %% export="kernels_numba.py"
class Room(NamedTuple):
    """Arrays [features, lanes] of a step; each layer writes over the one before."""

    stream: Any
    delta: Any  # not yet added to the stream
    normal: Any
    heads: Any
    seen: Any
    both: Any
    inner: Any


class CompiledLayers:
    """Runs layers by kernels if their weights are for them, or as chapter 5 does."""

    def __init__(self) -> None:
        self._arrays: Kept[PagedAttention, tuple[Layer, Any, Any]] = Kept()
        self._rooms: Kept[Layer, dict[int, Room]] = Kept()
        self._norms: Kept[RMSNorm, Any] = Kept()
        self._spent = np.zeros(len(PARTS))

    def take_seconds(self) -> dict[str, float]:
        """What the parts of the layers took, by name, since this was last asked."""
        found = dict(zip(PARTS, self._spent.tolist(), strict=True))
        self._spent[:] = 0
        return found

    def __call__(
        self,
        layers: Sequence[Layer],
        norm: RMSNorm,
        x: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        angles: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """What `run_layers` gives, but always in float32; `rows` are in order."""
        arrays, addresses = self._arrays_of(layers, memory)
        if not isinstance(plan, StepPlan) or arrays is None:
            return run_layers(layers, norm, x, memory, plan, angles, rows)
        layer, lanes = layers[0], lanes_for(len(x))
        room = self._room_for(layer, x)
        rotation = as_lanes(angles.cos()), as_lanes(angles.sin())
        rest = plan.arrays, rotation, make_found(layer, plan), self._spent
        given, chosen = (eps_of(layer), *rest), rows.numpy()
        out, last = torch.empty(len(rows), x.shape[1]), self._norm_of(norm)
        end = out.numpy(), last, Float(norm.eps)
        if lanes <= MOST:
            run_all = make_layers(lanes, *shape_of(layer))
            run_all(len(x), tuple(room), arrays[0], addresses, *given, (chosen, *end))
            return out
        room, chosen = self._one_by_one(layers, room, arrays, given, chosen, len(x))
        finish(tuple(room), (chosen, *end), self._spent)
        return out


# %% [markdown]
# Behind the last attention most tokens of a prompt have done their part, which was to leave keys and values. The
# lanes of those that nobody asks for are dropped.


# %% export="kernels_numba.py"
class CompiledLayers(CompiledLayers):
    def _one_by_one(
        self,
        layers: Sequence[Layer],
        room: Room,
        arrays: Any,
        given: Any,
        chosen: Any,
        number: int,
    ) -> tuple[Room, Any]:
        """Many tokens; in the end, room for those that are chosen, and their lanes."""
        shape = shape_of(layers[0])
        look, think = make_layer(room.stream.shape[1], *shape)
        for own in arrays:
            look(number, room, own, *given)
            if own is arrays[-1] and len(chosen) < number:
                number = len(chosen)
                room = self._narrowed(room, layers[0], chosen)
                chosen = np.arange(number)
                _, think = make_layer(room.stream.shape[1], *shape)
            think(number, room, own, given[0], self._spent)
        return room, chosen

    def _narrowed(self, room: Room, layer: Layer, chosen: Any) -> Room:
        """Room for some tokens, with their part of the stream and of what was seen."""
        stream, seen = (
            torch.from_numpy(each[:, chosen]).t() for each in (room.stream, room.seen)
        )
        less = self._room_for(layer, stream)
        fill(less.seen, seen)
        return less


# %% [markdown]
# What stays the same from step to step is kept, as long as what it belongs to:


# %% export="kernels_numba.py" tags=["hide-input"]
class CompiledLayers(CompiledLayers):
    def _norm_of(self, norm: RMSNorm) -> Any:
        if norm not in self._norms:
            self._norms[norm] = norm_of((norm, 1))
        return self._norms[norm]

    def _room_for(self, layer: Layer, x: Tensor) -> Room:
        """Room for a stream [tokens, hidden]: again the same for as many lanes.

        Memory is slow when it is first touched. Of large rooms there is only one.
        """
        rooms, lanes = self._rooms.setdefault(layer, {}), lanes_for(len(x))
        if lanes not in rooms:
            for other in [n for n in rooms if min(n, lanes) > MOST]:
                del rooms[other]
            rooms[lanes] = make_room(layer, lanes)
        fill(rooms[lanes].stream, x)
        rooms[lanes].delta[:] = 0
        return rooms[lanes]

    def _arrays_of(
        self, layers: Sequence[Layer], memory: Sequence[PagedAttention]
    ) -> tuple[Any, Any]:
        """Each layer's arrays, and their addresses [layers, arrays]; or None twice."""
        owner, *kept = self._arrays.get(memory[0], (None,))
        if owner is not layers[0]:
            kept = [None, None]
            pairs = zip(layers, memory, strict=True)
            if all(has_kernels(layer) for layer in layers):
                arrays = [(*weights_of(layer), *arrays_of(own)) for layer, own in pairs]
                places = [[each.ctypes.data for each in layer] for layer in arrays]
                kept = [arrays, np.array(places)]
            self._arrays[memory[0]] = (layers[0], *kept)
        return kept[0], kept[1]


# %% [markdown]
# The rest finds in chapter 5's layers what the kernels take:


# %% export="kernels_numba.py" tags=["hide-input"]
def arrays_of(memory: PagedAttention) -> tuple[Any, Any]:
    """Keys and values, [slots, kv_heads * head_dim]."""
    return as_array(memory.keys.flatten(1)), as_array(memory.values.flatten(1))


def shape_of(layer: Layer) -> tuple[int, int]:
    """Size of a head; how many queries share a key."""
    num_heads, num_kv_heads = layer.self_attn.heads
    return layer.self_attn.head_dim, num_heads // num_kv_heads


def products_of(layer: Layer) -> list[Any]:
    """The products of a layer, in order."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.qkv, attention.output, mlp.gate_and_up, mlp.down)
    return [part.multiply for part in parts]


def has_kernels(layer: Layer) -> bool:
    """Whether all its weights are for the kernels."""
    return all(isinstance(product, ReadProduct) for product in products_of(layer))


def weights_of(layer: Layer) -> tuple[Any, ...]:
    """A layer's weights, in the order in which they are used."""
    qkv, output, gate_and_up, down = (each.arrays for each in products_of(layer))
    attention, heads = layer.self_attn, NO_BIAS
    if attention.q_norm is not None and attention.k_norm is not None:
        number, number_of_keys = attention.heads
        heads = norm_of((attention.q_norm, number), (attention.k_norm, number_of_keys))
    first, second = (
        norm_of((each, 1))
        for each in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    return first, *qkv, heads, *output, second, *gate_and_up, *down


def eps_of(layer: Layer) -> tuple[Any, Any]:
    """What keeps norms from dividing by 0: the layer's, the heads'."""
    own = layer.self_attn.q_norm
    return Float(layer.input_layernorm.eps), Float(0 if own is None else own.eps)


def norm_of(*norms: tuple[RMSNorm, int]) -> Any:
    """Weights of norms, each so often, [all, 1]."""
    weights = [norm.weight.detach().float().repeat(often) for norm, often in norms]
    return torch.cat(weights)[:, None].numpy()


def make_room(layer: Layer, lanes: int) -> Room:
    """Room for so many lanes.

    All 0: what lies in lanes without a token may be too small for normal floats, and a
    processor takes a hundred times as long for those.
    """
    attention = layer.self_attn
    seen = attention.heads[0] * attention.head_dim
    heads, both = (
        len(cast(Any, each.multiply).weight)
        for each in (attention.qkv, layer.mlp.gate_and_up)
    )
    hidden = layer.input_layernorm.weight.shape[0]
    rows = (hidden, hidden, hidden, heads, seen, both, both // 2)
    return Room(*(np.zeros((n, lanes), np.float32) for n in rows))


def make_found(layer: Layer, plan: StepPlan) -> tuple[Any, Any]:
    """Room for averages [pieces, heads, head_dim] and logarithms of sums."""
    num_heads = layer.self_attn.heads[0]
    averages = (len(plan.order), num_heads, layer.self_attn.head_dim)
    return np.empty(averages, np.float32), np.empty(averages[:2], np.float32)


# %% [markdown]
# All of it is a `Backend`, which chapter 14's `LLM` takes by itself where it can be used
# (`kernels="auto"`), and `kernels="torch"` leaves out.


# %% export="kernels_numba.py"
def backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The kernels, if they know the device and the format. Raises `ValueError`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("these kernels are for float32 and bfloat16 on a CPU")
    return Backend(CompiledLayers(), arrange, read_product, LargePages().empty)


# %% [markdown]
# ## The same numbers?
#
# Both ways compute two prompts, and then a step in which two requests decode and a third goes on from another's
# pages. (Contexts that are cut, runs that are shared and products of more lanes are in the tests, with drawn
# batches.) In float32 the logits must agree as well as any two orders of adding do. In bfloat16 they
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
        what = "prompts" if batch is prompts else "decodes"
        print(f"{str(dtype)[6:]}, {what}:", "equal" if close < limit else "DIFFERENT")

# %% [markdown]
# ## The record
#
# The same step, in parts, with PyTorch alone and with kernels:

# %% tags=["hide-input"]
colours = {"products": "published", "head": "pinned", "attention": "private"}
rows = []
for (dtype, who, requests), parts in breakdowns.items():
    start, cells = 0.0, []
    whole = 1e3 * sum(parts.values())
    for part, colour in [*colours.items(), ("rest", "plain")]:
        length = 1e3 * parts[part] if part in parts else whole - start
        room = 4 * length - 2 * 6  # of its pixels, with a margin at both ends
        label = part if room >= CHAR * len(part) else ""
        cells.append((start, length, colour, label))
        start += length
    rows.append(
        (f"{dtype}, {requests}, {'PyTorch' if who == 'torch' else 'kernels'}", cells)
    )
draw_rows(
    rows,
    unit=4,
    caption="Milliseconds of a decode step of 1, 8 and 16 requests. Green and blue: weights are read, "
    "by products and head. Orange: contexts are read. The rest is what lies between, Python and the scheduler.",
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
# A norm takes [6](#won) microseconds instead of [45](#won), and adds to the stream besides. Contexts are read
# at [20.2](#won) GB a second instead of [8.9](#won), and the weights of one request in float32 at [30](#won), as fast
# as memory gives them. With sixteen requests half the bytes win less than half: the 16-bit products take
# [16](#won) ms, and the others [20](#won). Every weight is multiplied sixteen times, whatever its format.
# PyTorch's own 16-bit products take [79](#won) ms, more than twice its [34](#won) in float32, for half the bytes:
# remember that when bfloat16 is held against transformers below.
#
# How far is a step from what its bytes need, at 25 GB a second?

# %% name="bound"
for dtype, size in (("float32", 4), ("bfloat16", 2)):
    for requests in (1, 8, 16):
        read = size * (layers + head + requests * 494 * smollm2.kv_bytes_per_token(1))
        step = sum(breakdowns[dtype, "auto", requests].values())
        least = read / READS
        print(
            f"{dtype:8} {requests:2} requests: {1e3 * step:.0f} ms, "
            f"bytes alone {1e3 * least:.0f} ms, {step / least:.1f} times"
        )
most = breakdowns["float32", "auto", 16]
excess = {
    "products": most["products"] - 4 * layers / READS,
    "head": most["head"] - 4 * head / READS,
    "contexts": most["attention"] - CONTEXTS / READS,
}
print(
    "above their bytes:", ", ".join(f"{n} {1e3 * s:.0f} ms" for n, s in excess.items())
)

# %% [markdown]
# One float32 request is a little below it, for its weights came at [30](#won) GB a second. With sixteen requests
# the step takes [1.3](#bound) times its bytes in float32, and [2.0](#bound) in bfloat16: half the bytes, and the
# same arithmetic. And beside transformers, with the same weights?

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
            fraction = parts[part] / sum(parts.values())
            print(f"{dtype}, 8 requests: {part} {fraction:.1%} of a step")

# %% [markdown]
# The ratios are medians of steps that alternate in one process: above 1 the other side takes longer.
# (*Mixed lengths* are sixteen requests of different prompts and answers, against one padded batch.) Against
# transformers least is won where a prompt is computed in float32. There both sides call the same product of
# the same library; what is won lies between the products, and in a last layer whose MLP computes one token
# instead of 512. Scheduling and cache are the Python of chapters 3 to 7: a small part, for all they decide.
# The Python around the kernels is a larger one: it makes the plan, looks up the embeddings, lays them into
# lanes.
#
# *Shared prefix* is sixteen requests that begin with the same 480 tokens, against sixteen copies. Prefix
# reuse is said to save prefill. Here it saves decode time too, because the scheduler gave the requests the
# same *pages*, and not only equal ones. How much can it be? What sharing takes away is the reading of what
# another request has read:

# %% name="most"
for row in record["rows"]:
    if row["load"] == "shared prefix":
        size = {"float32": 4, "bfloat16": 2}[row["dtype"]]
        again = 15 * 480 * smollm2.kv_bytes_per_token(size) / READS
        step = row["other_s"]["median"]
        print(
            f"{row['dtype']:8} unshared {1e3 * step:.0f} ms, read again {1e3 * again:.1f} ms: "
            f"{step / (step - again):.2f} times without, measured {row['ratio']['median']:.2f}"
        )

# %% [markdown]
# In bfloat16 contexts have half the bytes, and the products of sixteen tokens hardly less work: there is
# less to save.
#
# ## What still goes wrong
#
# The record was made on a machine that others use too: the ratios of one row can differ by a tenth and more
# from one reading to the next, and so will yours. A step of many requests takes longer than its bytes, and
# the excess is spread: with sixteen in float32 [3](#bound) ms lie in the products, as much in the
# contexts, [1](#bound) in the head, and the rest in what lies between. Some processors have instructions
# that multiply pairs of 16-bit numbers, and matrices of them, which these kernels do not use. Weights of 8
# or 4 bits stay in the file, and are widened when they are loaded. On a GPU contexts are still gathered.
# And the first step after an installation waits for the compiler, and so does the first of each format and
# number of lanes.
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

answer_2 = [end - start for start, end in cut(0, 193, 128)]

# %%
assert cut(0, 192, 128) == [(0, 192)] and answer_2 == [128, 65]

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
