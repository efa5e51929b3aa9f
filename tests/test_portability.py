"""The plain path runs on any device: nothing that MPS lacks, no wait in a forward pass.

A whole generation, loading included, is watched operator by operator on the CPU. Which
operators have a kernel for MPS is read from PyTorch's own table of them, the
native_functions.yaml that every PyTorch carries.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from tiny_models import MODELS, Tiny, tiny
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minivllm.attention
import minivllm.linear
import minivllm.model
import minivllm.runner
from minivllm import LLM, SamplingParams
from minivllm.batch import Chunk
from minivllm.events import EventLog
from minivllm.model import Decoder
from minivllm.request import encode_ids
from minivllm.runner import ModelRunner

# What the model, the K/V memory, the plan of a batch and the greedy sampler may use.
ALLOWED = {
    "make and move": "arange arange.start zeros zeros_like empty_like new_empty "
    "new_full clone copy_ _to_copy lift_fresh detach_",
    "look at it otherwise": "view _unsafe_view t transpose.int unsqueeze expand "
    "select.int slice.Tensor split.Tensor split_with_sizes",
    "each number": "add.Tensor add_.Tensor add_.Scalar sub.Tensor mul.Tensor "
    "div.Tensor neg cos sin exp rsqrt pow.Tensor_Scalar silu sigmoid addcmul "
    "lerp.Tensor logaddexp le.Tensor ge.Tensor isnan masked_fill.Scalar",
    "rows of numbers": "mean.dim logsumexp argmax cat roll",
    "products": "mm addmm bmm scaled_dot_product_attention",
    "by index": "embedding gather index.Tensor index_select index_select.out "
    "index_copy_",
}
LISTED = set(" ".join(ALLOWED.values()).split())
# MPS has a branch of its own for it (grouped heads included, since 2.7; right results
# also for short queries behind long contexts and for boolean masks, since 2.12).
FUSED = "scaled_dot_product_attention"
WAITS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "nonzero",
)


@pytest.fixture(autouse=True)
def plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a CPU can do beyond others: what runs on every device."""
    monkeypatch.setattr(minivllm.linear, "can_pack", lambda weight: False)
    fused = "has_fused_attention"
    monkeypatch.setattr(minivllm.attention, fused, lambda device: False)
    monkeypatch.setattr(minivllm.runner, "has_numpy", lambda device: False)


class Watch(TorchDispatchMode):
    """Counts the operators that reach a device, and keeps what is not portable."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.doubles: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name != FUSED:
            with self:  # a composite operator is what it is composed of
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        self.operators[name] += 1
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.doubles.append(name)
        return made


class Waits(TorchFunctionMode):
    """Counts the calls that wait for a device, because they bring numbers back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        given = [*args[1:], *(kwargs or {}).values()]
        to_host = name == "to" and any(isinstance(x, str) and x == "cpu" for x in given)
        if name in WAITS or to_host:  # the runner's own .to(device) goes the other way
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = [list(range(3, 20)), list(range(3, 15)), [7, 8, 9]]


def load(model: Tiny, **options: object) -> tuple[LLM, EventLog]:
    log = EventLog()
    chosen = {"num_pages": 32, "page_size": 4, "max_batch_tokens": 11}
    chosen |= {"kernels": "torch"} | options
    return LLM(model.folder, observer=log, **chosen), log


def generate(llm: LLM) -> None:
    """Prefill in chunks, decode in company, hit."""
    for _ in range(2):
        llm.generate(PROMPTS, PARAMS)
    assert llm.stats()["hits"] > 0


def operators_of_a_generation(model: Tiny) -> set[str]:
    llm, _ = load(model)
    with Watch() as watch:
        generate(llm)
    return set(watch.operators)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_what_mps_has(name: str, dtype: str) -> None:
    """g9: no float64 from the file to the token, and no operator beyond the list."""
    with Watch() as watch:
        llm, _ = load(tiny(name), dtype=dtype)
    assert watch.operators and not watch.doubles
    with Watch() as watch:
        generate(llm)
    assert not watch.doubles
    assert set(watch.operators) - LISTED == set()


def mps_kernels() -> Iterator[tuple[str, bool]]:
    """Each operator, and whether MPS can run it: by a kernel or by composition."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    table = yaml.safe_load(path.read_text("utf-8"))
    entries = {entry["func"].split("(")[0]: entry for entry in table}
    for name, entry in entries.items():
        found = dict(entry.get("dispatch", {}))
        found |= entries.get(entry.get("structured_delegate"), {}).get("dispatch", {})
        keys = {key.strip() for several in found for key in several.split(",")}
        composed = {"CompositeExplicitAutograd", "CompositeImplicitAutograd"}
        yield name, not found or bool(keys & {"MPS", *composed})


def test_the_list_is_what_pytorch_says() -> None:
    """Every operator of the list has an MPS kernel or is made of others."""
    there = dict(mps_kernels())
    assert not there["_scaled_dot_product_flash_attention_for_cpu"]
    for name in LISTED:
        assert there[name], f"{name} has no kernel for MPS"
    assert there["_scaled_dot_product_attention_math_for_mps"]


def forward_without_numbers(model: Tiny) -> torch.Tensor:
    """A mixed batch on PyTorch's meta device, which has shapes and no numbers.

    Whatever asks for a number, a copy to the host or a data-dependent shape, raises.
    """
    runner = ModelRunner(model.decoder.to("meta"), num_pages=8, page_size=4)
    ids = encode_ids(range(21))
    return runner.logits(
        [
            Chunk("0", ids[:9], 0, [1, 2, 3], 0, samples=False),
            Chunk("1", ids[8:9], 8, [4, 5, 6], 0, samples=True),
            Chunk("2", ids[7:8], 7, [1, 2], 2, samples=True),
        ]
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_never_waits_for_the_device(name: str) -> None:
    assert forward_without_numbers(tiny(name)).shape == (2, 101)


@pytest.mark.parametrize("name", ["llama 3 rope", "qwen3, head norms"])
def test_only_the_sampled_ids_come_back(name: str) -> None:
    """One wait in each step that samples, for all its requests together."""
    llm, log = load(tiny(name))
    with Waits() as waits:
        generate(llm)
    sizes = {len(e.details["chunks"]) for e in log.of("schedule")}
    known = {str(i): len(ids) for i, ids in enumerate([*PROMPTS, *PROMPTS])}
    sampling = [
        any(start + size >= known[name] for name, start, size in e.details["chunks"])
        for e in log.of("schedule")
    ]
    assert max(sizes) > 1 and not all(sampling)
    assert waits.calls == {"tolist": sum(sampling)}


# ---- The observers notice ------------------------------------------------------------


def test_a_double_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles in float64 are the usual way to fail on MPS."""
    plain = minivllm.model.rope_frequencies
    monkeypatch.setattr(minivllm.model, "rope_frequencies", lambda c: plain(c).double())
    llm, _ = load(tiny("qwen2, biases"))
    with Watch() as watch:
        generate(llm)
    assert "cos" in watch.doubles


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x * x.max().item(),
        lambda x: x if x.isnan().any() else x + 0,
        lambda x: x[x[:, 0].nonzero()[:, 0]],
        lambda x: x.cpu().to(x.device),
    ],
)
def test_a_wait_in_the_forward_is_noticed(wait, monkeypatch) -> None:
    sound = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, *args: wait(sound(self, *args))
    )
    with pytest.raises((RuntimeError, NotImplementedError)):
        forward_without_numbers(tiny("qwen2, biases"))


def test_a_foreign_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Decoder.forward

    def forward(self, *args):
        return sound(self, *args).cumsum(-1)

    monkeypatch.setattr(Decoder, "forward", forward)
    assert operators_of_a_generation(tiny("qwen2, biases")) - LISTED == {"cumsum"}
