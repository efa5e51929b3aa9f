# Exported from chapters/16_traffic.py (6d254858): edit the chapter.
"""What a step costs, from what it moves and what it multiplies."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.batch import Chunk
from minivllm.bench_reuse import backend_of, decoder_of, spread_of
from minivllm.request import encode_ids
from minivllm.simulation import TimedRunner, VirtualClock, least_squares


class Load(NamedTuple):
    """What a step carries: new tokens, and what their attention meets.

    `num_pairs` counts a token and one that it attends to, `num_read` the tokens whose
    K/V are read, once for each request.
    """

    num_tokens: int
    num_pairs: int
    num_read: int


def load_of(chunks: Sequence[Chunk]) -> Load:
    """Count what a batch carries."""
    num_tokens = num_pairs = num_read = 0
    for chunk in chunks:
        n = len(chunk.token_ids)
        num_tokens += n
        num_pairs += n * chunk.start + n * (n + 1) // 2
        num_read += chunk.start + n
    return Load(num_tokens, num_pairs, num_read)


@dataclass(frozen=True)
class Roofline:
    """A step moves bytes and multiplies numbers; each takes its time, in seconds.

    `weights_s`: reading the weights, once a step. `read_s`: the K/V of one token.
    `token_s`: the products for one new token, `pair_s` the attention of one token to
    another. `fixed_s`: what no load changes. If the two sides overlap, a step takes as
    long as the longer one (the roofline of Williams et al., 2009), else both.
    """

    fixed_s: float
    weights_s: float
    read_s: float
    token_s: float
    pair_s: float
    overlaps: bool = False

    def moving_s(self, load: Load) -> float:
        """Seconds for what has to be read."""
        return self.weights_s + load.num_read * self.read_s

    def computing_s(self, load: Load) -> float:
        """Seconds for what has to be multiplied."""
        return load.num_tokens * self.token_s + load.num_pairs * self.pair_s

    def load_s(self, load: Load) -> float:
        """Seconds for one forward pass."""
        sides = self.moving_s(load), self.computing_s(load)
        return self.fixed_s + (max(sides) if self.overlaps else sum(sides))

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds for one forward pass over these chunks."""
        return self.load_s(load_of(chunks))


def data_sheet(
    num_parameters: float,
    num_layers: int,
    hidden_size: int,
    kv_bytes_per_token: int,
    flops_per_s: float,
    bytes_per_s: float,
) -> Roofline:
    """The roof itself: a model in 16 bits at a chip's full speed, and nothing else."""
    return Roofline(
        fixed_s=0.0,
        weights_s=2 * num_parameters / bytes_per_s,
        read_s=kv_bytes_per_token / bytes_per_s,
        token_s=2 * num_parameters / flops_per_s,
        pair_s=4 * num_layers * hidden_size / flops_per_s,
        overlaps=True,
    )


COSTS = {  # Llama 3 on H100 SXM: 989 TFLOP/s in bfloat16, 3.35 TB/s, by their sheets
    "70b-8xh100": data_sheet(70.6e9, 80, 8192, 327_680, 8 * 989e12, 8 * 3.35e12),
    "8b-h100": data_sheet(8.03e9, 32, 4096, 131_072, 989e12, 3.35e12),
}


def read_cost(name: str) -> Roofline:
    """One of `COSTS`, or the cost model in a file that `bench calibrate` wrote.

    Raises `ValueError`, naming the file and what is wrong with it.
    """
    if name in COSTS:
        return COSTS[name]
    try:
        given = json.loads(Path(name).read_text("utf-8"))["roofline"]
        cost = Roofline(**given)
    except OSError:
        known = ", ".join(COSTS)
        raise ValueError(f"no cost model {name}: a file, or {known}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{name} holds no cost model: {error!r}") from None
    numbers = [getattr(cost, each.name) for each in fields(cost)]
    if not all(isinstance(x, int | float) and 0 <= x < 1e9 for x in numbers):
        raise ValueError(f"{name}: a cost is a number of seconds, 0 or more")
    if cost.fixed_s + cost.weights_s <= 0:
        raise ValueError(
            f"{name}: fixed_s + weights_s must be above 0: steps take time"
        )
    return cost


Steps = Sequence[tuple[Load, float]]  # what was carried, and the seconds it took


def fit_roofline(steps: Steps) -> Roofline:
    """The roofline with the smallest relative errors: of its two forms the better one.

    Raises `ValueError` if the steps do not determine either.
    """
    forms = [_fit_sum(steps)]
    try:
        forms.append(_fit_longer(steps))
    except ValueError:
        pass  # a form that these steps cannot tell
    return min(forms, key=lambda cost: sum(e * e for e in errors(cost, steps)))


def errors(cost: Roofline, steps: Steps) -> list[float]:
    """By which share of its time each step is over- or underestimated."""
    return [cost.load_s(load) / seconds - 1 for load, seconds in steps]


def _fit_sum(steps: Steps) -> Roofline:
    """Both sides, one after the other. What is fixed counts as weights."""
    rows = [(1, load.num_read, load.num_tokens, load.num_pairs) for load, _ in steps]
    weights, read, token, pair = _solve(rows, steps)
    return Roofline(0.0, weights, read, token, pair)


def _fit_longer(steps: Steps) -> Roofline:
    """The longer side: guess which it is for each step, fit, and guess again."""
    computes = [load.num_tokens > 64 for load, _ in steps]
    for _ in range(20):
        rows = [
            (1, 0, 0, load.num_tokens, load.num_pairs)
            if busy
            else (1, 1, load.num_read, 0, 0)
            for busy, (load, _) in zip(computes, steps, strict=True)
        ]
        fixed, weights, read, token, pair = _solve(rows, steps)
        cost = Roofline(fixed, weights, read, token, pair, overlaps=True)
        before = computes
        computes = [cost.computing_s(x) > cost.moving_s(x) for x, _ in steps]
        if computes == before:
            break
    return cost


def _solve(rows: Sequence[Sequence[float]], steps: Steps) -> list[float]:
    """Least squares of the relative errors; what would be negative is 0."""
    scaled = [
        [x / seconds for x in row]
        for row, (_, seconds) in zip(rows, steps, strict=True)
    ]
    kept = list(range(len(rows[0]))) if rows else []
    while True:
        known = [[row[i] for i in kept] for row in scaled]
        found = dict(zip(kept, least_squares(known, [1.0] * len(rows)), strict=True))
        least = min(kept, key=lambda i: found[i])
        if found[least] >= 0:
            return [found.get(i, 0.0) for i in range(len(rows[0]))]
        kept.remove(least)


if TYPE_CHECKING:  # not otherwise: the simulator needs no torch
    from minivllm.llm import LLM

Shape = tuple[tuple[int, int], ...]  # chunks: new tokens, and tokens before them


def shapes_to_fit() -> list[Shape]:
    """Prompts, continued prompts, decodes of several sizes, and mixtures."""
    prompts = [((n, 0),) for n in (8, 16, 32, 64, 128, 256, 512)]
    prompts += [((n, s),) for n, s in ((64, 448), (256, 256), (128, 896), (256, 1024))]
    decodes = [((1, c),) * b for b in (1, 2, 4, 8, 16) for c in (64, 512, 1024)]
    mixed = [((n, 0), *((1, 256),) * b) for n, b in ((128, 4), (256, 8))]
    return [*prompts, *decodes, *mixed, ((13, 480),) * 7, ((64, 0),) * 4]


def shapes_held_out() -> list[Shape]:
    """Other sizes of the same kinds, for the errors."""
    prompts = [((n, 0),) for n in (24, 96, 384)] + [((192, 512),)]
    decodes = [((1, c),) * b for b, c in ((1, 256), (3, 256), (6, 768), (12, 128))]
    mixed = [((64, 0), *((1, 128),) * 6), ((384, 0), *((1, 900),) * 2)]
    return [*prompts, *decodes, *mixed, ((32, 256),) * 4]


def chunks_of(shape: Shape, page_size: int) -> list[Chunk]:
    """A batch of that shape, each chunk in pages of its own."""
    chunks, page = [], 0
    for i, (n, start) in enumerate(shape):
        end = page - (-(start + n) // page_size)
        ids = encode_ids([7]) * n
        chunks.append(Chunk(str(i), ids, start, range(page, end), 0, True))
        page = end
    return chunks


def measure_steps(
    llm: "LLM", shapes: Sequence[Shape], repeats: int, page_size: int = 16
) -> list[tuple[Load, list[float]]]:
    """The seconds of a step of each shape, `repeats` times in turn, after a warm-up."""
    from minivllm.runner import ModelRunner  # torch begins here

    batches = [chunks_of(shape, page_size) for shape in shapes]
    num_pages = max(sum(len(c.pages) for c in batch) for batch in batches)
    decoder, backend = decoder_of(llm), backend_of(llm)
    runner = ModelRunner(decoder, num_pages, page_size, backend=backend)
    for layer in runner.memory:  # time does not depend on the numbers, but on NaNs
        layer.keys.normal_()
        layer.values.normal_()
    seconds: list[list[float]] = [[] for _ in batches]
    for _ in range(1 + repeats):
        timed = TimedRunner(runner, VirtualClock())
        for batch, times in zip(batches, seconds, strict=True):
            timed.run(batch)
            times.append(timed.steps[-1][1])
    return [(load_of(b), t[1:]) for b, t in zip(batches, seconds, strict=True)]


@dataclass(frozen=True)
class StepRow:
    """A measured step: what it carried, its seconds, and what the fit says."""

    shape: Shape
    fitted: bool
    load: Load
    step_s: dict[str, Any]
    model_s: float
    error: float


def calibrate_llm(llm: "LLM", repeats: int) -> tuple[Roofline, list[StepRow]]:
    """Measure steps, fit the roofline to some of them; rows for all."""
    context = llm.engine.limits.max_context
    fit, held = (
        [shape for shape in shapes if all(sum(chunk) < context for chunk in shape)]
        for shapes in (shapes_to_fit(), shapes_held_out())
    )
    measured = measure_steps(llm, [*fit, *held], repeats)
    steps = [(load, median(times)) for load, times in measured]
    cost = fit_roofline(steps[: len(fit)])
    rows = []
    for i, (shape, (load, times)) in enumerate(
        zip([*fit, *held], measured, strict=True)
    ):
        model_s, spread = cost.load_s(load), spread_of(times)
        error = model_s / spread["median"] - 1
        rows.append(StepRow(shape, i < len(fit), load, spread, model_s, error))
    return cost, rows
