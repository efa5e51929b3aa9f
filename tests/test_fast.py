"""The fast ways of a step, each against the plain one: attention and linear layers."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import minivllm.attention
from minivllm.attention import (
    PagedAttention,
    Plan,
    plan_batch,
    read_together,
    shared_runs,
)
from minivllm.batch import Chunk
from minivllm.linear import Product, can_pack, packed_product
from minivllm.request import encode_ids

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KV_HEADS, HEAD_DIM, NUM_SLOTS = 2, 8, 2_000


def draw_tables(data: st.DataObject, page: int) -> list[list[int]]:
    """Page tables that grow out of one another, like those of a prefix tree."""
    free, tables = iter(range(1, NUM_SLOTS // page)), [[0]]
    for _ in range(data.draw(st.integers(1, 7))):
        parent = data.draw(st.sampled_from(tables))
        kept = parent[: data.draw(st.integers(0, len(parent)))]
        more = data.draw(st.integers(1, 200 // page))
        tables.append([*kept, *(next(free) for _ in range(more))])
    return tables


def draw_chunk(
    data: st.DataObject, pages: Sequence[int], page: int, most: int = 999
) -> Chunk:
    """One token, or several, whose last one lies in the table's last page."""
    end = (len(pages) - 1) * page + data.draw(st.integers(1, page))
    size = min(most, data.draw(st.sampled_from([1, 1, 1, min(end, 3), end])))
    shared = data.draw(st.integers(0, (end - size) // page))
    ids = encode_ids([0] * size)
    return Chunk("0", ids, end - size, pages, shared, samples=True)


def slots_of(chunk: Chunk, page: int, seen: int) -> list[int]:
    return [chunk.pages[i // page] * page + i % page for i in range(seen)]


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last tokens [rows, heads, head_dim] look at all keys [tokens, ...] up to
    their own; in float64."""
    rows, heads, _ = query.shape
    query, keys, values = (x.double() for x in (query, keys, values))
    keys, values = (
        x.repeat_interleave(heads // KV_HEADS, dim=1) for x in (keys, values)
    )
    scores = torch.einsum("rhd,nhd->hrn", query, keys) / math.sqrt(HEAD_DIM)
    later = torch.ones(scores.shape[1:]).triu(len(keys) - rows + 1).bool()
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("hrn,nhd->rhd", weights, values)


def check(
    chunks: Sequence[Chunk],
    page: int,
    group: int,
    dtype: torch.dtype,
    arrange: Callable[[Plan, int, Tensor], Plan] = read_together,
    attend: Callable[..., Tensor] = PagedAttention.forward,
) -> Plan:
    """Attend to a memory in which all that nobody may look at is not a number."""
    size = (NUM_SLOTS + page, KV_HEADS, HEAD_DIM)
    layer = PagedAttention(*(torch.full(size, math.nan, dtype=dtype) for _ in "kv"))
    for slot in {s for c in chunks for s in slots_of(c, page, c.end)}:
        layer.keys[slot], layer.values[slot] = torch.randn(2, *size[1:])
    sizes = [len(chunk.token_ids) for chunk in chunks]
    rows = sum(sizes)
    query = torch.randn(rows, KV_HEADS * group, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, rows, KV_HEADS, HEAD_DIM).to(dtype)
    plan = plan_batch(chunks, page, NUM_SLOTS // page, CPU)
    plan = arrange(plan, page, layer.keys)
    out = attend(layer, query, key, value, plan)
    for chunk, asked, found in zip(
        chunks, query.split(sizes), out.split(sizes), strict=True
    ):
        slots = slots_of(chunk, page, chunk.end)
        wanted = dense(asked, layer.keys[slots], layer.values[slots])
        assert (found - wanted).abs().max() <= TOLERANCE[dtype]
    return plan


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    page=st.sampled_from([1, 4, 16]),
    group=st.integers(1, 3),
    min_saved=st.sampled_from([1, 20, 256]),
)
def test_any_mixture_equals_dense_attention(dtype, fused, data, page, group, min_saved):
    """Chunks and single tokens; tables that share beginnings or not; grouped heads."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    chunks = [draw_chunk(data, table, page) for table in draw_tables(data, page)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minivllm.attention, "MIN_SAVED", min_saved)
        if not fused:
            patch.setattr(minivllm.attention, "has_fused_attention", lambda d: False)
        check(data.draw(st.permutations(chunks)), page, group, dtype)


def decode(pages: Sequence[int], end: int) -> Chunk:
    return Chunk("0", encode_ids([0]), end - 1, pages, 0, samples=True)


def test_a_shared_prefix_is_read_once():
    """30 shared pages and one more of each: 480 slots, and 16 times what is left."""
    prefix = range(30)
    chunks = [decode([*prefix, 30 + i], 494) for i in range(16)]
    plan = check(chunks, 16, 3, torch.float32)
    assert [len(read.slots) for read in plan.reads] == [480, 16 * 14]
    assert [len(read.rows) for read in plan.reads] == [16, 16]


def test_equal_tables_keep_a_token_apart():
    """Two full hits of one prompt share all but the last page: that is read twice."""
    chunks = [decode(range(20), 320), decode(range(20), 320)]
    plan = check(chunks, 16, 1, torch.float32)
    assert [len(read.slots) for read in plan.reads] == [19 * 16, 2 * 16]


def test_lengths_that_differ_much_are_not_padded():
    chunks = [decode([i], 5 + i) for i in range(8)]
    chunks += [decode(range(10 + 40 * i, 50 + 40 * i), 640) for i in range(2)]
    plan = check(chunks, 16, 3, torch.float32)
    assert [len(read.slots) for read in plan.reads] == [8 * 12, 2 * 640]


def test_runs_are_the_edges_of_the_tables_tree():
    """Four share two pages, two of them 20 more: an edge of little use is not read."""
    stem, branch = (0, 1), tuple(range(10, 30))
    tables = [
        (*stem, *branch, 50),
        (*stem, 60),
        (*stem, *branch, 51),
        (*stem, 61),
        (7,),
    ]
    assert shared_runs(tables, 16) == [([0, 2], 0, 22)]
    tables += [(*stem, 70 + i) for i in range(5)]
    assert shared_runs(tables, 16) == [
        ([0, 1, 2, 3, 5, 6, 7, 8, 9], 0, 2),
        ([0, 2], 2, 22),
    ]


def make_layers(*sizes: int, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    layers = [nn.Linear(48, size, bias=bias) for size in sizes]
    for layer in layers:
        layer.requires_grad_(False)
    return layers


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 300])
def test_a_packed_product_equals_its_layers(rows, packs, bias, dtype, monkeypatch):
    layers = [layer.to(dtype) for layer in make_layers(32, 16, 80, bias=bias)]
    if not packs:
        monkeypatch.setattr("minivllm.linear.can_pack", lambda weight: False)
    x = torch.randn(rows, 96)[:, ::2].to(dtype)
    product = Product(*layers)
    with torch.inference_mode():
        wanted = torch.cat([layer(x) for layer in layers], dim=-1)
        assert torch.equal(product(x), wanted)
        product.pack(packed_product)
        product.pack(packed_product)
        error = (product(x) - wanted).abs()
    assert rows == 0 or error.max() <= TOLERANCE[dtype]
    assert all(layer.weight is None and layer.bias is None for layer in layers)


def test_a_packed_head_leaves_the_embedding():
    embedding = nn.Embedding(80, 48).requires_grad_(False)
    (head,) = make_layers(80, bias=False)
    head.weight = embedding.weight
    kept = embedding.weight.clone()
    Product(head).pack(packed_product)
    assert torch.equal(embedding(torch.arange(80)), kept)


def test_only_a_cpu_packs():
    assert not can_pack(torch.empty(8, 8, device="meta"))
    assert not can_pack(torch.empty(8, 8, dtype=torch.float64))
