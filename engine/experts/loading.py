"""A share of the experts gets its weights: from ranks that have them, the others from the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.weight_cache import WeightCache
from engine.checkpoint.weights import Reader, open_weights, read_all, type_of
from engine.config.config import Config
from engine.experts.plan import Duty, Plan
from engine.experts.share import Share, kinds
from net.transfer.common.memory import Region

LOADING = "loading"
"""What a rank says from time to time while it loads. Then it says None, or why it could not."""
TELL_S = 1.0
"""Between two of these signs, at least."""


@dataclass(frozen=True, slots=True)
class Start:
    """All that a rank of this host is told before the first message."""

    duty: Duty
    config: Config
    source: ModelSource
    memfds: tuple[int, ...]  # of the shares of all ranks of this host
    desk: int
    bell: int


def fill(
    duty: Duty,
    source: ModelSource,
    shares: Mapping[int, Share],
    cache: WeightCache | None = None,
    progress: Callable[..., None] = lambda *read: None,
) -> int:
    """Fill the share of duty.rank. `shares`: of the ranks of this host. Returns the number of experts that came from
    other ranks. `progress` is called after every copy and every weight. Raises ModelError."""
    plan, placement, own = duty.plan, duty.placement, shares[duty.rank]
    wanted: dict[str, tuple[int, int, str]] = {}
    copied = 0
    for layer, slot, expert in duty.experts:
        there = [at for at in placement.holders(layer, expert) if at[0] in duty.living and at[0] != duty.rank]
        if there:
            own.copy(layer, slot, shares[there[0][0]], there[0][1])
            copied += 1
            progress()
            continue
        for kind in kinds(plan):
            wanted[weight_name(plan, layer, expert, kind)] = layer, slot, kind

    def take(reader: Reader, name: str) -> None:
        layer, slot, kind = wanted[name]
        own.put(layer, slot, kind, reader.read(name))

    if wanted:
        dtype = getattr(torch, plan.layout.dtype)
        read_all(source, open_weights(source, dtype, cache), take, dtype, progress, wanted.__contains__)
    return copied


def lone_expert(plan: Plan, reader: Reader, layer: int, expert: int) -> Share:
    """A share with this expert and no other. Raises ModelError, OSError."""
    one = replace(plan, layers=(plan.layers[layer],), ranks=1, slots=1, remote=0, added=0)
    share = Share(Region.private("an expert for another rank", one.share_bytes), one)
    for kind in kinds(plan):
        share.put(0, 0, kind, reader.read(weight_name(plan, layer, expert, kind)))
    return share


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The experts of a model on disk."""

    plan: Plan
    source: ModelSource

    def read(self, layer: int, expert: int) -> Share:
        """As `lone_expert`."""
        with open_weights(self.source, getattr(torch, self.plan.layout.dtype), None) as reader:
            return lone_expert(self.plan, reader, layer, expert)


def telling(tell: Callable[[], None]) -> Callable[..., None]:
    """A `progress` that calls `tell` from time to time. A process that hangs says nothing."""
    told = time.monotonic()

    def progress(*read: int) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_S:
            tell()
            told = time.monotonic()

    return progress


def weight_name(plan: Plan, layer: int, expert: int, kind: str) -> str:
    """In the checkpoint; `layer` counts layers with experts."""
    return f"layers.{plan.layers[layer]}.experts.{expert}.{kind}"


def load_rest(
    source: ModelSource,
    dtype: torch.dtype,
    cache: WeightCache | None,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Tensor]:
    """The weights of rank 0 that are no experts of ranks, in `dtype`. Raises ModelError."""

    def take(reader: Reader, name: str) -> Tensor:
        return reader.read(name).to(type_of(name, dtype)).contiguous()

    opened = open_weights(source, dtype, cache)
    return read_all(source, opened, take, dtype, progress, lambda name: not is_expert(name))


def is_expert(name: str) -> bool:
    """Whether a weight (engine/checkpoint/weights.py) is one of the experts that ranks share."""
    return ".experts." in name
