"""A share of the experts gets its weights: from ranks of its host that have them, the others from the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
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
    given: frozenset[tuple[int, int]] = frozenset()  # layers and slots that the node has filled


def fill(
    duty: Duty,
    source: ModelSource,
    shares: Mapping[int, Share],
    cache: WeightCache | None = None,
    progress: Callable[..., None] = lambda *read: None,
    given: Collection[tuple[int, int]] = (),
) -> None:
    """Fill the share of duty.rank. `shares`: of the ranks of this host. `given`: layers and slots that are filled.
    `progress` is called after every copy and every weight. Raises ModelError."""
    plan, own = duty.plan, shares[duty.rank]
    wanted: dict[str, tuple[int, int, str]] = {}
    for layer, slot, expert in duty.experts:
        if (layer, slot) in given:
            continue
        if (there := duty.copy_here(layer, expert)) is not None:
            own.copy(layer, slot, shares[there[0]], there[1])
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


def lone_share(plan: Plan, layer: int) -> Share:
    """With room for one expert of this layer."""
    one = replace(plan, layers=(plan.layers[layer],), ranks=1, slots=1, remote=0, added=0)
    return Share(Region.private("an expert for another rank", one.share_bytes), one)


def lone_expert(plan: Plan, reader: Reader, layer: int, expert: int) -> Share:
    """A share with this expert and no other. Raises ModelError, OSError."""
    share = lone_share(plan, layer)
    for kind in kinds(plan):
        share.put(0, 0, kind, reader.read(weight_name(plan, layer, expert, kind)))
    return share


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
