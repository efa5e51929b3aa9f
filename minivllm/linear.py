# Exported from chapters/05_model.py (8420d8f4): edit the chapter.
"""Linear layers, joined and laid out for the processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

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

    def place(self, empty: Callable[[Sequence[int]], Tensor]) -> None:
        """Give the layers' weights new memory side by side, to be filled."""
        sizes = [layer.out_features for layer in self.layers]
        weight = empty((sum(sizes), self.layers[0].in_features))
        for layer, rows in zip(self.layers, torch.split(weight, sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)

    def pack(self, make: Maker) -> None:
        """Join the layers' weights, and give up the plain ones; once is enough."""
        if self.layers[0].weight is None:
            return
        weight = _joined([layer.weight.detach() for layer in self.layers])
        biases = [
            layer.bias.detach() for layer in self.layers if layer.bias is not None
        ]
        self.multiply = make(weight, torch.cat(biases) if biases else None)
        for layer in self.layers:
            layer.weight = layer.bias = None  # type: ignore[assignment]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows: as they lie, if side by side, or else a copy."""
    first, storage = parts[0], {part.untyped_storage().data_ptr() for part in parts}
    ends = accumulate((part.nbytes for part in parts), initial=first.data_ptr())
    beside = all(part.data_ptr() == end for part, end in zip(parts, ends, strict=False))
    if beside and len(storage) == 1 and all(part.is_contiguous() for part in parts):
        shape = (sum(map(len, parts)), first.shape[1])
        return first.as_strided(shape, first.stride())
    return torch.cat(list(parts))


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
