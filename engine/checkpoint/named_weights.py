"""Weights as tensors that a program put into the pool, each under a prefix and the name that checkpoints have for it:

    store.put_tensor("step-40/model.layers.0.self_attn.q_proj.weight", tensor)      mooncake.store, prefix "step-40/"

Every weight of the model must be there, whole, in the model's shape and in one of DTYPES. Tensors under other names are
not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b

import torch
from torch import Tensor
from xxhash import xxh3_128

from cache.named.tensor_format import TensorHead
from cache.named.tensors import FoundTensor, NamedTensors
from engine.checkpoint.loop_calls import LoopCalls
from engine.checkpoint.pooled_weights import bytes_of
from engine.checkpoint.safetensors_weights import checkpoint_names
from engine.checkpoint.weights import shapes
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

DTYPES = ("float32", "bfloat16", "float16")
NAMED = 3
"""Tensors that an error names; it counts the others."""


class UnfitTensors(ModelError):
    """Tensors are missing, or are not those of the model."""


class NamedWeights:
    """A weights.Reader, for threads other than the loop's. `found`: our name of each weight -> its tensor."""

    def __init__(self, tensors: NamedTensors, calls: LoopCalls, found: Mapping[str, FoundTensor]) -> None:
        self._tensors, self._calls, self._found = tensors, calls, found
        self._sums: dict[str, bytes] = {}

    @classmethod
    def find(cls, tensors: NamedTensors, calls: LoopCalls, prefix: str, config: ModelConfig) -> NamedWeights:
        """Reads only heads. Raises UnfitTensors with everything that is wrong."""
        wanted = shapes(config)
        names = {ours: [prefix + one for one in all_] for ours, all_ in named(wanted, config).items()}
        there = calls.wait(tensors.find([one for some in names.values() for one in some]))
        found = {ours: next((one for one in some if one in there), "") for ours, some in names.items()}
        wrong = []
        if missing := [names[ours][0] for ours, one in found.items() if not one]:
            wrong.append(f"{_some(missing, len(wanted))} missing")
        heads = {ours: there[one] for ours, one in found.items() if one}
        if other := [found[ours] for ours, one in heads.items() if one is None or one.head.shard is not None]:
            wrong.append(f"{_some(other, len(wanted))} no whole tensor")
        fits = {ours: one for ours, one in heads.items() if one is not None and one.head.shard is None}
        if misshapen := [
            f"{found[ours]} {list(one.head.shape)} instead of {list(wanted[ours])}"
            for ours, one in fits.items()
            if one.head.shape != wanted[ours]
        ]:
            wrong.append(f"{_some(misshapen, len(wanted))} of another shape")
        if mistyped := [
            f"{found[ours]} {one.head.dtype}" for ours, one in fits.items() if one.head.dtype not in DTYPES
        ]:
            wrong.append(f"{_some(mistyped, len(wanted))} of another type than {', '.join(DTYPES)}")
        if wrong:
            raise UnfitTensors(f"the tensors under {prefix!r} are not the model's: {'; '.join(wrong)}")
        return cls(tensors, calls, fits)

    def opened(self) -> AbstractContextManager[NamedWeights]:
        return nullcontext(self)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: one.head.shape for name, one in self._found.items()}

    def read(self, name: str) -> Tensor:
        """Raises ModelError if the tensor was removed or replaced since `find`."""
        tensor = self._found[name]
        head = tensor.head
        out = torch.empty(math.prod(head.shape), dtype=getattr(torch, head.dtype))
        memory = bytes_of(out)
        if not self._calls.wait(self._tensors.read(tensor, memory)):
            raise ModelError(f"{tensor.value.name} was removed or replaced while it was read, or the pool evicted it")
        self._sums[name] = xxh3_128(memory).digest()
        return out.view(head.shape)

    def key(self) -> bytes:
        """16 bytes that identify the content of all weights; call it after each was read."""
        return content_key({name: (one.head, self._sums[name]) for name, one in self._found.items()})


def content_key(weights: Mapping[str, tuple[TensorHead, bytes]]) -> bytes:
    """16 bytes of weights by our names, as (head, digest of the elements)."""
    hasher = blake2b(digest_size=16, person=b"mooncake-content")
    for name in sorted(weights):
        head, digest = weights[name]
        hasher.update(f"{name}|{head.dtype}|{list(head.shape)}|{digest.hex()}\n".encode())
    return hasher.digest()


def named(wanted: Mapping[str, object], config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our name of each weight -> the names that checkpoints have for it."""
    if config.together:
        raise UnfitTensors("checkpoints of this model keep all experts in one tensor, which is not read from the pool")
    if config.fused:
        raise UnfitTensors("checkpoints of this model keep gate and up in one tensor, which is not read from the pool")
    if config.gated or config.interleaved:
        raise UnfitTensors("checkpoints of this model have rows in another order, which are not read from the pool")
    return checkpoint_names(wanted, config)


def _some(names: list[str], total: int) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} of {total} ({', '.join(names[:NAMED])}{more}) {'is' if len(names) == 1 else 'are'}"
