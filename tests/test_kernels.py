"""Kernels against what they stand for: PyTorch's ways, in chapter 5's classes."""

import gc
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast import CPU, check, decode, draw_chunk, draw_tables
from tiny_models import tiny

import minivllm.attention
from minivllm import LLM, SamplingParams, model
from minivllm.batch import Chunk
from minivllm.linear import packed_product
from minivllm.llm import choose_backend
from minivllm.model import Decoder, ModelConfig, RMSNorm, run_layers
from minivllm.options import CHOICES
from minivllm.request import encode_ids
from minivllm.runner import Backend, ModelRunner

numba = pytest.importorskip("numba", reason="the kernels need numba")
kernels = pytest.importorskip("minivllm.kernels_numba")
vectors = pytest.importorskip("minivllm.vectors")
Dispatcher = pytest.importorskip("numba.core.dispatcher").Dispatcher

FORMATS = (torch.float32, torch.bfloat16)
CONFIG = ModelConfig(99, 48, 64, 3, 6, 2, 8, max_context=512)
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the largest number
OURS = {dtype: kernels.backend(CPU, dtype) for dtype in FORMATS}


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    if found.shape != wanted.shape or not wanted.numel():
        return found.shape == wanted.shape
    largest = max(1.0, float(wanted.abs().max()))
    return bool((found.float() - wanted.float()).abs().max() <= CLOSE[dtype] * largest)


def lanes(x: torch.Tensor) -> np.ndarray:
    return kernels.as_lanes(x)


def rows(columns: np.ndarray, number: int) -> torch.Tensor:
    return torch.from_numpy(columns)[:, :number].t()


@settings(max_examples=40, deadline=None)
@given(rows_=st.integers(1, 300), half=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_small_ones(rows_, half, seed):
    """Each gives PyTorch's numbers, and writes only where it says that it does."""
    torch.manual_seed(seed)
    x, delta = torch.randn(2, rows_, 2 * half).mul(3)
    norm = RMSNorm(2 * half, 1e-5)
    norm.weight.data.uniform_(0.5, 2)
    with torch.inference_mode():
        ours, told = lanes(x), np.empty_like(lanes(x))
        kernels.add_norm(
            ours, lanes(delta), kernels.norm_of((norm, 1)), np.float32(norm.eps), told
        )
        assert close(rows(ours, rows_), x + delta, torch.float32)
        assert close(rows(told, rows_), norm(x + delta), torch.float32)
        gated = np.empty((half, ours.shape[1]), np.float32)
        kernels.gate(lanes(x), gated)
        assert close(rows(gated, rows_), model.gated(x), torch.float32)
        heads, angles = torch.randn(rows_, 5, 2 * half), 50 * torch.randn(rows_, half)
        rotated = lanes(heads.flatten(1))
        kernels.rotate(rotated, 6 * half, lanes(angles.cos()), lanes(angles.sin()))
        wanted = model.rotate(heads[:, :3], *model.rotation(angles[:, None]))
        wanted = torch.cat((wanted, heads[:, 3:]), dim=1)
        assert close(rows(rotated, rows_), wanted.flatten(1), torch.float32)
        normed = lanes(heads.flatten(1))
        eps = np.float32(norm.eps)
        kernels.norm_heads(normed, kernels.norm_of((norm, 3)), eps, 2 * half)
        wanted = torch.cat((norm(heads[:, :3]), heads[:, 3:]), dim=1)
        assert close(rows(normed, rows_), wanted.flatten(1), torch.float32)


def test_an_exponential_of_anything_that_a_gate_or_a_score_can_be():
    """Also far below, where it may be 0 and must not be anything else."""

    @kernels.compiled
    def exp_all(given, out):
        for i in range(len(given)):
            out[i] = kernels.exp(given[i])

    x = np.concatenate([np.linspace(-87, 88, 10_001), [-1e30, -math.inf, 0]])
    found = np.empty(len(x), np.float32)
    exp_all(x.astype(np.float32), found)
    wanted = np.exp(np.maximum(x, -87).astype(np.float32).astype(np.float64))
    far = np.abs(np.maximum(x, -87))  # the further, the fewer bits are left behind it
    assert (np.abs(found / wanted - 1) < 1e-7 * (3 + far)).all()
    assert found[-3] < 1e-37 and found[-1] == 1


def test_a_gate_far_from_zero():
    """Closed it is 0, or as good as that; open it lets through what comes."""
    far = torch.tensor([[-1e30, -1e4, -300.0, -89.5, -89.0, -88.0, 88.0, 1e4, 1e30]])
    both = torch.cat((far, torch.ones_like(far)), dim=1)
    found = np.empty((far.shape[1], 1), np.float32)
    kernels.gate(lanes(both), found)
    wanted = model.gated(both)
    assert (
        np.abs(found[:, 0] - wanted[0].numpy()) <= 1e-6 * far[0].abs().numpy()
    ).all()


def test_lanes_without_a_token_are_no_tiny_numbers():
    """Denormal leftovers there are right in the end, and thirty times as slow."""
    decoder = Decoder(CONFIG)
    decoder.pack(kernels.read_product)
    room = kernels.make_room(decoder.layers[0], 8)
    assert len(room) == 7 and all(x.shape[1] == 8 for x in room)
    assert not any(x.any() for x in room)
    for number in (7, 3):
        kernels.fill(room.stream, torch.ones(number, 48))
        assert (room.stream[:, :number] == 1).all()
        assert not room.stream[:, number:].any()


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    inputs=st.integers(1, 12).map(lambda n: 16 * n),
    outputs=st.integers(kernels.ROWS, 300),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product(dtype, tokens, inputs, outputs, biased, seed):
    """Few tokens and many, outputs that fill no tile, with a bias and without."""
    torch.manual_seed(seed)
    weight, x = (torch.randn(n, inputs).to(dtype) for n in (outputs, tokens))
    bias = torch.randn(outputs).to(dtype) if biased else None
    found = kernels.read_product(weight, bias)(x)
    wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert found.dtype == x.dtype and found.is_contiguous()
    assert close(found, wanted, dtype)


def test_a_weight_that_fits_no_tile_is_packed(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "packed_product", lambda *given: asked.append(given))
    for weight in (torch.ones(kernels.ROWS - 1, 16), torch.ones(300, 24).bfloat16()):
        kernels.read_product(weight, None)
    assert len(asked) == 2 and packed_product is not kernels.packed_product


def attend(layer, query, key, value, plan):
    """A step's attention, by the kernels."""
    heads = lanes(torch.cat((query, key, value), dim=1).flatten(1))
    memory = [kernels.as_array(x.flatten(1)) for x in (layer.keys, layer.values)]
    num_heads, head_dim = query.shape[1:]
    sizes = (len(plan.order), num_heads, head_dim)
    room = [np.full(size, np.nan, np.float32) for size in (sizes, sizes[:2])]
    out = np.full((num_heads * head_dim, heads.shape[1]), np.nan, np.float32)
    find = kernels.make_find(head_dim, num_heads // key.shape[1])
    find(heads, tuple(memory), plan.arrays, tuple(room), out)
    return rows(out, len(query)).reshape(query.shape)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    page=st.sampled_from([1, 4, 16]),
    group=st.integers(1, 3),
    piece=st.sampled_from([2, 7, 128]),
    min_saved=st.sampled_from([1, 20, 256]),
)
def test_any_mixture_equals_dense_attention(dtype, data, page, group, piece, min_saved):
    """Steps of single tokens, and others; shared runs, pieces of every length."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    most = data.draw(st.sampled_from([1, 1, 1, 9]))
    chunks = [draw_chunk(data, table, page, most) for table in draw_tables(data, page)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minivllm.attention, "MIN_SAVED", min_saved)
        patch.setattr(kernels, "PIECE", piece)
        patch.setattr(kernels, "SHARED", 2 * piece)
        patch.setattr(kernels, "LONGER", 3 * piece)
        patch.setattr(kernels, "READERS", data.draw(st.sampled_from([1, 3, 16])))
        chunks = data.draw(st.permutations(chunks))
        check(chunks, page, group, dtype, kernels.arrange, attend)


@pytest.mark.parametrize("end", [1, 2, 63, 64, 65, 128, 191, 192, 193, 500])
def test_pieces_cover_a_context_once(end):
    """From its start to its end, none of them more than half a piece too short."""
    for start in {0, min(32, end - 1)}:
        pieces = kernels.cut(start, end, 128)
        assert pieces[0][0] == start and pieces[-1][1] == end
        assert all(one[1] == other[0] for one, other in pairwise(pieces))
        sizes = [last - first for first, last in pieces]
        assert sizes == [*[128] * (len(sizes) - 1), sizes[-1]]
        assert 0 < sizes[-1] <= 192 and (len(sizes) == 1 or sizes[-1] > 64)


def test_a_shared_prefix_is_read_once():
    """480 tokens that 16 rows share: read in two pieces, and 14 more by each row."""
    prefix = range(30)
    chunks = [decode([*prefix, 30 + i], 494) for i in range(16)]
    plan = check(chunks, 16, 3, torch.float32, kernels.arrange, attend)
    sizes = [end - start for _, start, end, *_ in plan.runs]
    assert sizes == [256, 224] and len(plan.readers) == 2 * 16
    assert [end - start for *_, start, end in plan.pieces] == [14] * 16


@pytest.mark.parametrize("num_tokens", [1, 3, 9, 17, 50])
@pytest.mark.parametrize("kind", ["plain", "biases", "head norms"])
def test_all_layers_at_once(num_tokens, kind):
    """The stream after a step of so many tokens is that of chapter 5.

    The last four are a prompt; what nobody asks for is left out of the last layer.
    """
    torch.manual_seed(num_tokens)
    special = {"qkv_bias": kind == "biases", "qk_norm": kind == "head norms"}
    decoder = Decoder(replace(CONFIG, **special))
    for parameter in decoder.parameters():
        parameter.data.uniform_(-0.5, 0.5)
    decoder.pack(kernels.read_product)
    prompt = (
        []
        if num_tokens < 5
        else [Chunk("P", encode_ids([1, 2, 3, 4]), 2, [51], 0, True)]
    )
    chunks = [decode([i], 3) for i in range(num_tokens - 4 * len(prompt))] + prompt
    memory = [
        minivllm.attention.PagedAttention(*torch.randn(2, 53 * 16, 2, 8)) for _ in "abc"
    ]
    plan = minivllm.attention.plan_batch(chunks, 16, 52, CPU)
    asked = torch.tensor([*range(num_tokens)][:: 1 if num_tokens % 2 else 3])
    x, angles = torch.randn(num_tokens, 48), torch.randn(num_tokens, 4)
    with torch.inference_mode():
        known = memory, plan, angles, asked
        wanted = run_layers(decoder.layers, decoder.norm, x.clone(), *known)
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in memory]
        own = kernels.arrange(plan, 16, memory[0].keys)
        assert isinstance(own, kernels.StepPlan)
        assert all(kernels.has_kernels(layer) for layer in decoder.layers)
        known = memory, own, angles, asked
        found = OURS[torch.float32].run(decoder.layers, decoder.norm, x, *known)
        assert close(found, wanted, torch.float32)
        for layer, (keys, values) in zip(memory, kept, strict=True):
            assert close(layer.keys, keys, torch.float32)
            assert close(layer.values, values, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_tokens_with_and_without(dtype, tiny_folders):
    """Prompts of different lengths that share and do not, greedy, every family."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[*range(1, 30)], [*range(1, 20), 3], [7], [*range(1, 30)]]
    for folder in tiny_folders:
        told = []
        for kind in ("torch", "numba"):
            options = {"num_pages": 64, "page_size": 4, "dtype": dtype}
            with LLM(folder, device="cpu", kernels=kind, **options) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                told.append([output.outputs[0].token_ids for output in outputs])
        if dtype == "float32":
            assert told[0] == told[1]
        assert [len(ids) for ids in told[1]] == [12] * 4


def test_a_new_length_compiles_nothing(tiny_folders):
    """g11: 50 lengths, alone and together, on what the first few have compiled."""
    options = {"num_pages": 64, "page_size": 4, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(tiny_folders[0], device="cpu", kernels="numba", **options) as llm:
        llm.generate([[5, 6, 7], [5, 6, 8]], params, use_tqdm=False)
        before = num_compiled()
        for length in range(1, 51):
            llm.generate([[*range(length)], [9]], params, use_tqdm=False)
        assert num_compiled() == before > 0


def num_compiled() -> int:
    """Kernels in this process, one for each kind of arguments."""
    kinds = (x for x in gc.get_objects() if issubclass(type(x), Dispatcher))
    return sum(len(kernel.signatures) for kernel in kinds)


@pytest.fixture(scope="module")
def tiny_folders():
    names = ("llama, three heads a group", "qwen2, biases", "qwen3, head norms")
    return [str(tiny(name).folder) for name in names]


def test_the_choice_of_kernels(monkeypatch):
    """ "auto" takes what works; a name that does not is refused, with the reason."""
    assert CHOICES["kernels"] == ("auto", "torch", "numba")
    assert isinstance(
        choose_backend("auto", CPU, torch.float32).run, kernels.CompiledLayers
    )
    assert choose_backend("torch", CPU, torch.float32).run is run_layers
    assert choose_backend("auto", CPU, torch.float16).run is run_layers
    with pytest.raises(ValueError, match=r"'numba' cannot be used here.*float32"):
        choose_backend("numba", CPU, torch.float16)
    monkeypatch.setitem(__import__("sys").modules, "minivllm.kernels_numba", None)
    assert choose_backend("auto", CPU, torch.float32).run is run_layers
    with pytest.raises(ValueError, match="'numba' cannot be used here"):
        choose_backend("numba", CPU, torch.float32)
    assert isinstance(choose_backend("torch", CPU, torch.float32), Backend)


@pytest.mark.parametrize("team", [True, False])
def test_parts_are_shared_out(team, monkeypatch):
    """Each part is done once, by a team or without one; a failure is not lost."""
    monkeypatch.setattr(vectors, "HAS_TEAM", team and vectors.HAS_TEAM)

    @vectors.in_parts
    def count(i, counts, broken):
        if i == broken:
            raise MemoryError
        counts[i] += i

    for number in (0, 1, 2, 7, 100):
        counts = np.ones(number, np.int64)
        count(number, counts, -1)
        assert counts.tolist() == [*range(1, number + 1)]
    with pytest.raises(MemoryError):
        count(100, np.ones(100, np.int64), 37)


def test_kernels_keep_no_memory_alive():
    """One backend may serve many runners; what belongs to a dead one is let go."""
    ours = kernels.backend(CPU, torch.float32)
    runner = ModelRunner(Decoder(CONFIG), 16, 16, backend=ours)
    runner.run([decode([3], 1)])
    memory = weakref.ref(runner.memory[0].keys)
    del runner
    gc.collect()
    assert memory() is None and not ours.run._arrays
    assert not ours.run._rooms and not ours.run._norms


COMPILE = """
import numpy as np
from minivllm import kernels_numba as kernels
x, weight = np.ones((16, 1), np.float32), np.ones((64, 16), np.float32)
out = np.zeros((64, 1), np.float32)
kernels.make_multiply(1)((weight, kernels.NO_BIAS), x, out, 1)
assert (out == 16).all()
"""


def test_what_is_compiled_is_found_again(tmp_path):
    """By a second process, also where one kernel uses another."""
    kept = []
    for _ in range(2):
        run = [sys.executable, "-c", COMPILE]
        subprocess.run(run, check=True, env={**os.environ, "NUMBA_CACHE_DIR": tmp_path})
        kept.append(sorted(path.name for path in tmp_path.rglob("*.nb[ic]")))
    assert len(kept[0]) > 2 and kept[0] == kept[1]


def test_kernels_are_saved_by_one_at_a_time(tmp_path):
    """Two processes that read Numba's index at once would write to one file."""
    index = tmp_path / "index"
    index.write_text("0")

    def save():
        known = int(index.read_text())
        time.sleep(0.01)
        index.write_text(str(known + 1))

    savers = [vectors.one_at_a_time(save, tmp_path) for _ in range(8)]
    threads = [threading.Thread(target=saver) for saver in savers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.read_text() == "8"


def adding(n):
    return lambda x: x + n


def test_a_label_is_of_all_that_code_says():
    """Kept code is found by it: two that differ in anything must not share one."""
    kinds = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: x.real + 1,
        lambda x: x.imag + 1,
        lambda x: (lambda y: y + 1)(x),
        lambda x: (lambda y: y + 2)(x),
        *map(adding, (1, 2)),
    ]
    labels = [vectors.label_of(each) for each in kinds]
    assert len(set(labels)) == len(labels)
    assert vectors.label_of(kinds[5]) == labels[5]


def test_a_label_knows_numbers_that_come_from_elsewhere(monkeypatch):
    """Kept code has them in it, wherever they were imported from."""
    labels = set()
    for value in (2, 3, 2.5, np.float32(2.5), (1, 2)):
        monkeypatch.setitem(globals(), "IMPORTED", value)
        labels.add(vectors.label_of(lambda x: x * IMPORTED))
    assert len(labels) == 5


IMPORTED = 0


LABELS = """
from minivllm import kernels_numba, vectors
found = {**vars(vectors), **vars(kernels_numba)}
made = [kernels_numba.make_multiply(8), kernels_numba.make_layers(8, 64, 3)]
kinds = [x for x in [*found.values(), *made] if hasattr(x, "py_func")]
print(*sorted(vectors.label_of(x.py_func) for x in kinds), sep="\\n")
"""


def test_a_label_is_the_same_in_each_process():
    told = [
        subprocess.run(
            [sys.executable, "-c", LABELS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(told[0].split()) > 10
