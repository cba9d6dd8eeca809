"""Products with quantized weights on a GPU: codes stay in its memory, and the kernels make floats of them in registers.

Quantized    attention/triton/products/group_product.py
Scaled       attention/triton/products/byte_product.py
Mixed        one product for each part, into its columns of the result
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.triton.products.byte_product import byte_product
from attention.triton.products.group_planes import Planes, planes_of
from attention.triton.products.group_product import group_product
from attention.triton.products.group_weights import group_rows
from engine.model.ops.interface import Linear
from engine.model.ops.quantized import Mixed, Quantized, Scaled


class QuantizedLinear:
    """x [T, in] -> [T, out] of x's type. Keeps the weight on its device, and nothing wider."""

    def __init__(self, weight: Quantized | Scaled | Mixed, bias: Tensor | None = None, *, fp8_rows: bool) -> None:
        """fp8_rows: the device multiplies fp8."""
        self.outputs, self.order, self.bias, self.fp8_rows = weight.shape[0], weight.order, bias, fp8_rows
        parts = weight.parts if isinstance(weight, Mixed) else (weight,)
        self.parts = [prepared(part) for part in parts]

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, x.dtype)

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The same in `dtype`."""
        y = torch.empty((len(x), self.outputs), dtype=dtype, device=x.device)
        if not len(x):
            return y
        if self.order is not None:
            x = x.index_select(1, self.order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        first = 0
        for part in self.parts:
            end = first + (part.outputs if isinstance(part, Planes) else part.shape[0])
            bias = None if self.bias is None else self.bias[first:end]
            if isinstance(part, Planes):
                group_product(x, part, bias, y[:, first:end])
            else:
                byte_product(x, part.kind, part.codes, part.scales, bias, y[:, first:end], fp8_rows=self.fp8_rows)
            first = end
        return y


class QuantizedVocabulary:
    """See ops.Vocabulary. The inputs of an embedding are in order: no format sorts them."""

    def __init__(self, weight: Quantized | Scaled, *, fp8_rows: bool) -> None:
        self.head, self.dtype = QuantizedLinear(weight, fp8_rows=fp8_rows), weight.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        (matrix,) = self.head.parts
        if isinstance(matrix, Planes):
            return group_rows(token_ids, matrix, self.dtype)
        return Scaled(matrix.kind, matrix.codes[token_ids], matrix.scales[token_ids], self.dtype).widened()

    def logits(self, x: Tensor) -> Tensor:
        return self.head.product(x, torch.float32)


class Groups:
    """See Ops.grouped_linear. Waits for the device once: the ends of the groups decide which products are launched."""

    def __init__(self, groups: Sequence[Linear], outputs: int) -> None:
        self.groups, self.outputs = groups, outputs

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        y = torch.empty((len(x), self.outputs), dtype=x.dtype, device=x.device)
        begin = 0
        for group, end in zip(self.groups, ends.tolist(), strict=True):
            if end > begin:
                y[begin:end] = group(x[begin:end])
            begin = end
        return y


def prepared(weight: Quantized | Scaled) -> Planes | Scaled:
    """As the kernels read it, on the same device."""
    return planes_of(weight.kind, weight.blocks, weight.shape[1]) if isinstance(weight, Quantized) else weight
