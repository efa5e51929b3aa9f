"""Kernels against what they stand for: PyTorch's ways, in chapter 5's classes."""

import gc
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast import CPU, NUM_SLOTS, check, decode, draw_chunk, draw_tables
from tiny_models import tiny

import minivllm.attention
from minivllm import LLM, SamplingParams
from minivllm.linear import packed_product
from minivllm.llm import choose_backend
from minivllm.model import Ops, RMSNorm
from minivllm.options import CHOICES
from minivllm.runner import Backend

numba = pytest.importorskip("numba", reason="the kernels need numba")
kernels = pytest.importorskip("minivllm.kernels_numba")
Dispatcher = pytest.importorskip("numba.core.dispatcher").Dispatcher

FORMATS = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the largest number
OURS = {dtype: kernels.backend(CPU, dtype) for dtype in FORMATS}


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    largest = max(1.0, float(wanted.abs().max()))
    return bool((found.float() - wanted.float()).abs().max() <= CLOSE[dtype] * largest)


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), half=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_small_ones(dtype, rows, half, seed):
    """Each gives PyTorch's numbers, and writes only where it says that it does."""
    torch.manual_seed(seed)
    ops, plain = OURS[dtype].ops, Ops()
    x, delta = torch.randn(2, rows, 2 * half).mul(3).to(dtype)
    norm = RMSNorm(2 * half, 1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 2)
    ours, theirs = x.clone(), x.clone()
    with torch.inference_mode():
        assert close(
            ops.add_norm(ours, delta, norm), plain.add_norm(theirs, delta, norm), dtype
        )
        assert torch.equal(ours, theirs)
        assert torch.equal(
            ops.add_norm(ours, None, norm), plain.add_norm(theirs, None, norm)
        )
        assert close(ops.gate(x), plain.gate(x), dtype)
        heads = torch.randn(rows, 5, 2 * half).to(dtype)
        angles = 50 * torch.randn(rows, half)
        wanted = plain.rotate(heads, 3, plain.turns(angles, torch.float32))
        kept = heads[:, 3:].clone()
        found = ops.rotate(heads, 3, ops.turns(angles, dtype))
    assert close(found, wanted, dtype) and torch.equal(heads[:, 3:], kept)


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


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    inputs=st.integers(1, 12).map(lambda n: 4 * n),
    outputs=st.integers(1, 300),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_in_blocks(tokens, inputs, outputs, biased, seed):
    """Few tokens and many, outputs that fill no block, with a bias and without."""
    torch.manual_seed(seed)
    weight, x = torch.randn(outputs, inputs), torch.randn(tokens, inputs)
    weight, x = weight.bfloat16(), x.bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    found = kernels.blocked_product(weight, bias)(x)
    wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert found.dtype == x.dtype and close(found, wanted, torch.bfloat16)


def test_a_weight_that_fits_no_block_is_packed(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "packed_product", lambda *given: asked.append(given))
    for weight in (torch.ones(8, 8), torch.ones(8, 6).bfloat16()):
        kernels.blocked_product(weight, None)
    assert len(asked) == 2 and packed_product is not kernels.packed_product


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
    """Chunks, single tokens, shared runs, pieces of every length."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    chunks = [draw_chunk(data, table, page) for table in draw_tables(data, page)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minivllm.attention, "MIN_SAVED", min_saved)
        patch.setattr(kernels, "PIECE", piece)
        chunks = data.draw(st.permutations(chunks))
        check(chunks, page, group, dtype, OURS[dtype])


@pytest.mark.parametrize("end", [1, 2, 63, 64, 65, 128, 191, 192, 193, 500])
def test_pieces_cover_a_context_once(end):
    """From its start to its end, none of them more than half a piece too short."""
    chunk = decode(range(NUM_SLOTS // 16), end)
    plan = minivllm.attention.plan_batch([chunk], 16, 0, CPU).chunks[0]
    for start in {0, min(32, end - 1)}:
        pieces = kernels.cut(3, plan, start)
        assert pieces[0][2] == start and pieces[-1][3] == end
        assert all(one[3] == other[2] for one, other in pairwise(pieces))
        assert all(piece[:2] == (0, 3) for piece in pieces)
        sizes = [last - first for *_, first, last in pieces]
        assert sizes == [*[128] * (len(sizes) - 1), sizes[-1]]
        assert 0 < sizes[-1] <= 192 and (len(sizes) == 1 or sizes[-1] > 64)


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
    assert isinstance(choose_backend("auto", CPU, torch.float32).ops, kernels.NumbaOps)
    assert type(choose_backend("torch", CPU, torch.float32).ops) is Ops
    assert type(choose_backend("auto", CPU, torch.float16).ops) is Ops
    with pytest.raises(ValueError, match=r"'numba' cannot be used here.*float32"):
        choose_backend("numba", CPU, torch.float16)
    monkeypatch.setitem(__import__("sys").modules, "minivllm.kernels_numba", None)
    assert type(choose_backend("auto", CPU, torch.float32).ops) is Ops
    with pytest.raises(ValueError, match="'numba' cannot be used here"):
        choose_backend("numba", CPU, torch.float32)
    assert isinstance(choose_backend("torch", CPU, torch.float32), Backend)
