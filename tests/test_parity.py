"""The same numbers as transformers, however the work is cut, placed and shared.

Each check below is one way in which a request can reach its logits. They are run on
every tiny model; at the end, faults are planted and the right check must notice.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MODELS, VOCAB, Tiny, tiny
from torch import Tensor

import minivllm.model
import minivllm.runner
from minivllm import LLM, SamplingParams
from minivllm.attention import ChunkPlan, PagedAttention, Plan, plan_batch
from minivllm.batch import Chunk
from minivllm.model import ModelConfig, rope_frequencies
from minivllm.request import encode_ids
from minivllm.runner import ModelRunner

TOLERANCE = 1e-4  # float32, other orders of addition; a15
PAGE = 4
LONG = encode_ids([(7 * i + 1) % VOCAB for i in range(21)])
OTHER = encode_ids([*LONG[:9], *((11 * i + 3) % VOCAB for i in range(9))])
SHORT = encode_ids([(5 * i + 2) % VOCAB for i in range(8)])
MINE, THEIRS = [5, 0, 9, 3, 7, 1], [4, 10, 15, 12, 14, 13]


def make_runner(model: Tiny) -> ModelRunner:
    """Fresh memory may hold what an earlier runner left: the right answer, even."""
    runner = ModelRunner(model.decoder, num_pages=16, page_size=PAGE)
    for memory in runner.memory:
        memory.keys[:] = memory.values[:] = 99.0
    return runner


def part(
    ids: Sequence[int], start: int, end: int, pages: Sequence[int], num_shared: int = 0
) -> Chunk:
    """A chunk that always samples, so that its last row is compared."""
    return Chunk("0", encode_ids(ids[start:end]), start, pages, num_shared, True)


def agree(
    runner: ModelRunner, model: Tiny, *parts: tuple[Chunk, Sequence[int]]
) -> None:
    """Run chunks in one batch, and compare each with its whole sequence's logits."""
    found = runner.logits([chunk for chunk, _ in parts])
    for row, (chunk, ids) in zip(found, parts, strict=True):
        difference = (row - model.logits(ids)[chunk.end - 1]).abs().max()
        assert difference < TOLERANCE, f"{chunk.start} to {chunk.end}: {difference}"


# ---- The ways to the same logits -----------------------------------------------------


def in_one_go(model: Tiny) -> None:
    agree(make_runner(model), model, (part(LONG, 0, 21, MINE), LONG))


def in_chunks(model: Tiny, size: int) -> None:
    """Size 1 is a prompt that is decoded token by token."""
    runner = make_runner(model)
    cuts = [*range(0, len(LONG), size), len(LONG)]
    for start, end in pairwise(cuts):
        agree(runner, model, (part(LONG, start, end, MINE), LONG))


def after_a_cached_prefix(model: Tiny) -> None:
    """a15: two pages were computed by another request; the rest in chunks."""
    runner = make_runner(model)
    runner.run([part(LONG, 0, 21, MINE)])
    for start, end in [(8, 13), (13, 17), (17, 18)]:
        chunk = part(OTHER, start, end, [*MINE[:2], 8, 4, 2], num_shared=2)
        agree(runner, model, (chunk, OTHER))


def in_a_mixed_batch(model: Tiny) -> None:
    """a16: a hit, a chunk in the middle of a prompt, a decode and a cold prompt."""
    runner = make_runner(model)
    runner.run([part(LONG, 0, 20, MINE), part(SHORT, 0, 3, THEIRS)])
    agree(
        runner,
        model,
        (part(LONG, 20, 21, MINE), LONG),
        (part(SHORT, 3, 7, THEIRS), SHORT),
        (part(OTHER, 8, 18, [*MINE[:2], 8, 2, 6], num_shared=2), OTHER),
    )


def written_in_the_same_pass(model: Tiny) -> None:
    """V06: the reader's pages are written by its neighbour, in this forward pass."""
    agree(
        make_runner(model),
        model,
        (part(OTHER, 8, 18, [*MINE[:2], 8, 2, 6], num_shared=2), OTHER),
        (part(LONG, 0, 21, MINE), LONG),
    )


def after_a_full_hit(model: Tiny) -> None:
    """All tokens are cached: the last is computed again, and nothing shared moves.

    Marks in memory tell whether it was written: equal values would not.
    """
    runner = make_runner(model)
    runner.run([part(SHORT, 0, 8, [3, 1])])
    again = part(SHORT, 7, 8, [3, 1], num_shared=2)
    agree(runner, model, (again, SHORT))
    kept = runner.scratch_page * PAGE
    for memory in runner.memory:
        memory.keys[:kept] = memory.values[:kept] = 7.0
    runner.logits([again])
    for memory in runner.memory:
        assert (memory.keys[:kept] == 7.0).all(), "a shared page was written"
        assert (memory.values[:kept] == 7.0).all(), "a shared page was written"


CHECKS: dict[str, Callable[[Tiny], None]] = {
    "in one go": in_one_go,
    **{f"in chunks of {n}": partial(in_chunks, size=n) for n in (1, 2, 5, 16)},
    "after a cached prefix": after_a_cached_prefix,
    "in a mixed batch": in_a_mixed_batch,
    "written in the same pass": written_in_the_same_pass,
    "after a full hit": after_a_full_hit,
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str) -> None:
    model = tiny(name)
    for check in CHECKS.values():
        check(model)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(MODELS)), page=st.integers(1, 6))
def test_any_schedule(data: st.DataObject, name: str, page: int) -> None:
    """Chunks, companions, tables and shared prefixes as they fall: equal logits."""
    model = SCHEDULED[name]
    prompts = [LONG, OTHER, SHORT]
    tables = data.draw(st.permutations(range(3 * (21 // page + 1))))
    width = len(tables) // 3
    runner = ModelRunner(model.decoder, len(tables), page)
    own = [list(tables[i * width : (i + 1) * width]) for i in range(3)]
    done, shared = [0, 0, 0], [0, 0, 0]
    while any(done[i] < len(ids) for i, ids in enumerate(prompts)):
        batch, ends = [], list(done)
        for i in data.draw(st.permutations(range(3))):
            if done[i] == len(prompts[i]):
                continue
            if i == 1 and done[1] == 0:  # LONG and OTHER begin with the same 9 tokens
                most = min(9, ends[0]) // page  # written by now, or in this very pass
                shared[1] = data.draw(st.integers(0, most))
                own[1] = [*own[0][: shared[1]], *own[1][shared[1] :]]
                done[1] = ends[1] = shared[1] * page
            ends[i] = data.draw(st.integers(done[i] + 1, len(prompts[i])))
            chunk = part(prompts[i], done[i], ends[i], own[i], shared[i])
            batch.append((chunk, prompts[i]))
        agree(runner, model, *batch)
        done = ends


SCHEDULED = {name: tiny(name) for name in MODELS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bit_is_as_exact_as_transformers(name: str, dtype: torch.dtype) -> None:
    """Against the float32 logits: no further away than twice transformers' distance."""
    model = tiny(name)
    exact = model.logits(LONG)
    narrow = deepcopy(model.reference).to(dtype)
    with torch.inference_mode():
        theirs = narrow(torch.tensor([list(LONG)])).logits[0].float()
    runner = ModelRunner(model.decoder.to(dtype), num_pages=16, page_size=PAGE)
    runner.run([part(LONG, 0, 9, MINE)])
    ours = [runner.logits([part(LONG, i, i + 1, MINE)])[0] for i in range(9, 21)]
    allowed = 2 * (theirs - exact)[9:].abs().max()
    assert 0 < (torch.stack(ours) - exact[9:]).abs().max() < allowed


# ---- Greedy tokens, through the engine -----------------------------------------------


def continue_greedily(model: Tiny, ids: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation, up to the first choice that is not clear."""
    known = list(ids)
    for _ in range(num_tokens):
        best = model.logits(known)[-1].topk(2)
        if best.values[0] - best.values[1] < 1e-3:
            break
        known.append(int(best.indices[0]))
    return known[len(ids) :]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    """Cold, hit, full hit and a13's shorter prompt; three indexes, four chunk sizes."""
    model = tiny(name)
    prompts = [list(ids) for ids in (LONG, OTHER, SHORT, LONG[:13], LONG[:16])]
    expected = [continue_greedily(model, ids, 8) for ids in prompts]
    assert sum(map(len, expected)) > 30, "too few clear choices to compare"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for index, tokens in [("radix", 3), ("hash", 7), ("none", 64), ("radix", 64)]:
        options = {"index": index, "max_batch_tokens": tokens, "page_size": PAGE}
        llm = LLM(model.folder, num_pages=64, **options)
        for again in (False, True):
            outputs = llm.generate(prompts, params)
            for output, wanted in zip(outputs, expected, strict=True):
                assert output.outputs[0].token_ids[: len(wanted)] == wanted
            if again and index != "none":  # the aligned prompts: all but one token
                cached = [output.num_cached_tokens for output in outputs]
                assert cached == [20, 16, 7, 12, 15]


# ---- Rotation ------------------------------------------------------------------------

G6 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
G6 |= {"original_max_position_embeddings": 8192}


def test_llama3_rope_scaling() -> None:
    """g6: theta 5e5, 128-wide heads, factor 8, 1 and 4, 8192; five digits."""
    shape = {"head_dim": 128, "max_context": 1, "rope_theta": 5e5}
    plain = rope_frequencies(ModelConfig(1, 1, 1, 1, 1, 1, **shape))
    scaled = rope_frequencies(ModelConfig(1, 1, 1, 1, 1, 1, rope_scaling=G6, **shape))
    ratio = [round(r, 5) for r in (scaled / plain).tolist()]
    assert ratio[:29] == [1.0] * 29 and ratio[35:] == [0.125] * 29
    assert (ratio[29], ratio[31]) == (0.82817, 0.49351)
    assert all(a > b for a, b in pairwise(ratio[28:36]))


# ---- Faults, planted -----------------------------------------------------------------

Patch = pytest.MonkeyPatch


def change_plans(patch: Patch, change: Callable[[Plan, Sequence[Chunk], int], Plan]):
    def plan(chunks, page_size, scratch_page, device):
        made = plan_batch(chunks, page_size, scratch_page, device)
        return change(made, chunks, scratch_page * page_size)

    patch.setattr(minivllm.runner, "plan_batch", plan)


def change_chunks(patch: Patch, change: Callable[[Sequence[Chunk]], list[Chunk]]):
    def plan(chunks, page_size, scratch_page, device):
        return plan_batch(change(chunks), page_size, scratch_page, device)

    patch.setattr(minivllm.runner, "plan_batch", plan)


def first_token_never_stored(patch: Patch) -> None:
    """h13: position 0 is written elsewhere."""

    def change(plan: Plan, chunks: Sequence[Chunk], scratch: int) -> Plan:
        elsewhere = plan.write_slots.masked_fill(plan.positions == 0, scratch)
        return replace(plan, write_slots=elsewhere)

    change_plans(patch, change)


def tables_swapped(patch: Patch) -> None:
    """Two requests of a batch have each other's table, in all steps but the first."""

    def change(chunks: Sequence[Chunk]) -> list[Chunk]:
        one, two, *rest = chunks
        if one.start == 0:
            return list(chunks)
        return [replace(one, pages=two.pages), replace(two, pages=one.pages), *rest]

    change_chunks(patch, change)


def read_before_written(patch: Patch) -> None:
    sound = PagedAttention.forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
        nowhere = torch.full_like(plan.write_slots, len(self.keys) - 1)
        out = sound(self, query, key, value, replace(plan, write_slots=nowhere))
        self.keys.index_copy_(0, plan.write_slots, key)
        self.values.index_copy_(0, plan.write_slots, value)
        return out

    patch.setattr(PagedAttention, "forward", forward)


def full_hit_written_to_the_shared_page(patch: Patch) -> None:
    change_chunks(patch, lambda chunks: [replace(c, num_shared=0) for c in chunks])


def positions_off_by_one(patch: Patch) -> None:
    """Only behind a cached prefix: a shift of all positions alike changes nothing."""

    def change(plan: Plan, chunks: Sequence[Chunk], scratch: int) -> Plan:
        late = [int(c.num_shared > 0) for c in chunks for _ in c.token_ids]
        return replace(plan, positions=plan.positions + torch.tensor(late))

    change_plans(patch, change)


def rope_scaling_ignored(patch: Patch) -> None:
    def plain(config: ModelConfig) -> Tensor:
        return rope_frequencies(replace(config, rope_scaling=None))

    patch.setattr(minivllm.model, "rope_frequencies", plain)


def mask_counts_from_the_chunk(patch: Patch) -> None:
    """The causal mask forgets where a chunk begins."""

    def mask(chunk: ChunkPlan) -> Tensor:
        rows = torch.arange(chunk.rows.stop - chunk.rows.start)[:, None]
        return torch.arange(chunk.length)[None, :] <= rows

    patch.setattr(ChunkPlan, "mask", property(mask))


def heads_dealt_in_turns(patch: Patch) -> None:
    """Query head h reads K/V head h modulo their number, not h divided by a group."""
    sound = torch.nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, keys: Tensor, values: Tensor, **options) -> Tensor:
        times = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat(1, times, 1, 1), values.repeat(1, times, 1, 1)
        return sound(query, keys, values, **options)

    functional = SimpleNamespace(scaled_dot_product_attention=attend)
    patch.setattr(minivllm.attention, "F", functional)  # transformers has the real one


FAULTS = [  # the fault, a check that must notice it, and on which model
    (first_token_never_stored, "in chunks of 1", "qwen2, biases"),
    (first_token_never_stored, "after a cached prefix", "qwen2, biases"),
    (tables_swapped, "in a mixed batch", "llama, three heads a group"),
    (read_before_written, "written in the same pass", "qwen3, head norms"),
    (read_before_written, "in chunks of 1", "qwen3, head norms"),
    (full_hit_written_to_the_shared_page, "after a full hit", "qwen2, biases"),
    (positions_off_by_one, "after a cached prefix", "llama, three heads a group"),
    (rope_scaling_ignored, "in one go", "llama 3 rope"),
    (mask_counts_from_the_chunk, "in chunks of 5", "llama, three heads a group"),
    (heads_dealt_in_turns, "in one go", "llama, three heads a group"),
]


@pytest.mark.parametrize(("fault", "check", "name"), FAULTS)
def test_a_planted_fault_is_noticed(
    fault: Callable[[Patch], None], check: str, name: str, monkeypatch: Patch
) -> None:
    CHECKS[check](tiny(name))
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check](tiny(name))


def test_logits_that_are_not_numbers_end_the_pass() -> None:
    """Greedy or drawn, a NaN becomes an error and never a token."""
    model = tiny("llama, three heads a group")
    model.decoder.norm.weight.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not numbers"):
        make_runner(model).run([part(SHORT, 0, 8, [3, 1])])
    llm = LLM(model.folder, num_pages=16)
    llm.engine.runner.model = model.decoder
    for temperature in (0.0, 1.0):
        (output,) = llm.generate([SHORT], SamplingParams(temperature=temperature))
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].token_ids == []
