"""The messages from the scheduler's half of the connector to the worker's half: what one step loads and saves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.block import BlockKey


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one request: keys[i] goes to the engine's block block_ids[i]."""

    request_id: str
    keys: Sequence[BlockKey]
    block_ids: Sequence[int]
    background: bool  # between steps, while the request waits; otherwise in the step, layer by layer


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of one request that are complete after the step: keys[i] names the engine's block block_ids[i]."""

    keys: Sequence[BlockKey]
    block_ids: Sequence[int]
    position: int  # of keys[0] in its prompt


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the connector does in one step."""

    loads: Sequence[Load] = ()
    saves: Sequence[Save] = ()
    failures_known: int = 0
    """Steps with failed loads that the scheduler has heard of. If the worker had more, the requests of this step were
    scheduled in the belief that those loads had succeeded: what they compute must not be saved."""
    computes: bool = True  # whether the engine computes anything in this step


def rank_keys(keys: Sequence[BlockKey], rank: int, ranks: int) -> list[BlockKey]:
    """The keys of one tensor-parallel rank's share of the blocks."""
    if ranks == 1:
        return list(keys)
    mask = int.from_bytes(rank.to_bytes(4, "little") + ranks.to_bytes(4, "little") + bytes(8), "little")
    return [(int.from_bytes(key, "little") ^ mask).to_bytes(16, "little") for key in keys]
