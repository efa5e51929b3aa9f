# Exported from chapters/05_model.py (e236faf1): edit the chapter.
"""Linear layers, joined and laid out for the processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Multiply = Callable[[Tensor], Tensor]
Maker = Callable[[Tensor, Tensor | None], Multiply]  # of a weight and a bias


class Product:
    """Linear layers that read the same input; their outputs side by side.

    The layers keep the names of the checkpoint. `pack` takes their weights from them.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.multiply: Multiply = self._one_by_one

    def __call__(self, x: Tensor) -> Tensor:
        """All outputs [tokens, sum of the layers' outputs]."""
        return self.multiply(x)

    def _one_by_one(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)

    def pack(self, make: Maker) -> None:
        """Join the layers' weights, and give up the plain ones; once is enough."""
        if self.layers[0].weight is None:
            return
        weight = _joined([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        self.multiply = make(weight, _joined(biases) if biases else None)
        for layer in self.layers:
            layer.weight = layer.bias = None  # type: ignore[assignment]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; a single one as it is, for others may use it too."""
    return torch.cat(list(parts)).detach() if len(parts) > 1 else parts[0].detach()


def packed_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """x -> x times weight, plus bias: packed by oneDNN where it can do that."""
    if not can_pack(weight):
        return partial(F.linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN is there, and fast with such numbers on this processor."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    ops = torch.ops.mkldnn
    if weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
