# Exported from chapters/05_model.py (71627099): edit the chapter.
"""One decoder for Llama, Qwen2 and Qwen3, on flat batches of tokens.

Parameters carry the names that Hugging Face checkpoints use, so that loading is a
matter of copying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention import PagedAttention, Plan
from minivllm.linear import Maker, Product, packed_product


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `rope_scaling` is Llama 3's table, or None."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    norm_eps: float = 1e-6
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
            self._check(name, int)
        for name in ("num_heads", "num_kv_heads", "head_dim", "max_context"):
            self._check(name, int)
        for name in ("rope_theta", "norm_eps"):
            self._check(name, float)
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            shape = f"{self.num_heads}, {self.num_kv_heads}, {self.head_dim}"
            raise ValueError(f"heads, K/V heads and head_dim do not fit: {shape}")

    def _check(self, name: str, kind: type[int] | type[float]) -> None:
        value = getattr(self, name)
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        if not fits or not 0 < value < math.inf:
            raise ValueError(
                f"{name} must be a positive {kind.__name__}, not {value!r}"
            )

    def kv_bytes_per_token(self, bytes_each: int) -> int:
        """A key and a value for each K/V head in each layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_each


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angles per position, float32 [head_dim / 2], with Llama 3's scaling if set."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    plain = 1.0 / config.rope_theta ** (steps / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    factor, low, high = (
        float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = int(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (blend + (1 - blend) / factor)


def rotation(angles: Tensor) -> tuple[Tensor, Tensor]:
    """What `rotate` multiplies by: angles [..., dim / 2] -> two of [..., dim]."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of numbers of x [tokens, heads, dim]: each half with the other."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class RMSNorm(nn.Module):
    """Scale to unit mean square, in float32, and multiply by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections around `PagedAttention`, for flat tokens [tokens, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        wide, narrow = (
            config.num_heads * self.head_dim,
            config.num_kv_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(hidden, wide, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, narrow, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, narrow, bias=config.qkv_bias)
        self.o_proj = nn.Linear(wide, hidden, bias=False)
        self.qkv = Product(self.q_proj, self.k_proj, self.v_proj)
        self.output = Product(self.o_proj)
        self.q_norm, self.k_norm = _head_norm(config), _head_norm(config)
        self.heads = (config.num_heads, config.num_kv_heads)

    def forward(
        self,
        x: Tensor,
        memory: PagedAttention,
        plan: Plan,
        turns: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend from the new tokens to all tokens of their requests."""
        by_head = self.qkv(x).view(len(x), -1, self.head_dim)
        (num_asking, num_keys), turned = self.heads, sum(self.heads)
        if self.q_norm is not None and self.k_norm is not None:
            parts = [num_asking, num_keys, num_keys]
            query, key, value = torch.split(by_head, parts, dim=1)
            by_head = torch.cat((self.q_norm(query), self.k_norm(key), value), dim=1)
        asks = rotate(by_head[:, :turned], *turns)
        query, key = asks[:, :num_asking], asks[:, num_asking:]
        out = memory.forward(query, key, by_head[:, turned:], plan)
        return self.output(out.view(len(x), -1))


def _head_norm(config: ModelConfig) -> RMSNorm | None:
    return RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None


class MLP(nn.Module):
    """The gated feed-forward network of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.gate_and_up = Product(self.gate_proj, self.up_proj)
        self.down = Product(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Treat every token by itself."""
        return self.down(gated(self.gate_and_up(x)))


def gated(both: Tensor) -> Tensor:
    """[tokens, 2 * wide], gate and up side by side -> [tokens, wide]."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class Layer(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        memory: PagedAttention,
        plan: Plan,
        turns: tuple[Tensor, Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """The stream x [tokens, hidden] behind the layer; of these rows, if given.

        x itself is changed on the way.
        """
        x += self.self_attn(self.input_layernorm(x), memory, plan, turns)
        x = x if rows is None else x[rows]
        x += self.mlp(self.post_attention_layernorm(x))
        return x


def run_layers(
    layers: Sequence[Layer],
    norm: RMSNorm,
    x: Tensor,
    memory: Sequence[PagedAttention],
    plan: Plan,
    angles: Tensor,
    rows: Tensor,
) -> Tensor:
    """All layers, and the last norm: the stream [tokens, hidden] -> [rows, hidden].

    `angles` are [tokens, head_dim / 2].
    """
    cos, sin = (turn.to(x.dtype) for turn in rotation(angles[:, None]))
    for layer, layer_memory in zip(layers, memory, strict=True):
        wanted = rows if layer is layers[-1] else None
        x = layer(x, layer_memory, plan, (cos, sin), wanted)
    normal: Tensor = norm(x)
    return normal


Run = Callable[..., Tensor]  # of what `run_layers` takes


class Decoder(nn.Module):
    """Token ids in, logits of the wanted rows out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        rows = torch.randn(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(len(rows), rows.shape[1], _weight=rows)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head = Product(self.lm_head)
        self.frequencies = rope_frequencies(config)  # never a parameter, never 16 bit

    def hidden(
        self,
        token_ids: Tensor,
        memory: Sequence[PagedAttention],
        plan: Plan,
        rows: Tensor,
        run: Run = run_layers,
    ) -> Tensor:
        """What the head makes logits of: rows of the batch, [rows, hidden]."""
        angles = plan.positions[:, None] * self.frequencies.to(token_ids.device)
        x = self.embed_tokens(token_ids)
        return run(self.layers, self.norm, x, memory, plan, angles, rows)

    def forward(self, *given: Any, **more: Any) -> Tensor:
        """Logits [rows, vocab], float32; takes what `hidden` takes."""
        return self.head(self.hidden(*given, **more)).float()

    def products(self) -> Iterator[Product]:
        """All of them, of the layers and the head."""
        parts = (part for module in self.modules() for part in vars(module).values())
        yield from (part for part in parts if isinstance(part, Product))

    def place(self, empty: Callable[[Sequence[int]], Tensor]) -> None:
        """Give every parameter memory, to be filled; a tied head shares one."""
        for product in self.products():
            product.place(empty)
        if self.config.tied_head:
            self.embed_tokens.weight = self.lm_head.weight
        for module in self.modules():
            for name, part in module.named_parameters(recurse=False):
                if part.is_meta:
                    placed = nn.Parameter(empty(part.shape), requires_grad=False)
                    setattr(module, name, placed)

    def pack(self, make: Maker = packed_product) -> None:
        """Lay all weights of products out for speed; the plain ones are given up."""
        for product in self.products():
            product.pack(make)
        rows = getattr(self.head.multiply, "weight", None)
        if self.config.tied_head and rows is not None:
            self.embed_tokens.weight = nn.Parameter(rows, requires_grad=False)
