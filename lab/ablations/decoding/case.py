"""Cases of decode beyond memory: one context on one node, and a block of batches on one GPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from lab.simulator.models.beyond import BlockOfBatches, Tiers, context_step_s
from lab.simulator.models.noise import Noise
from lab.simulator.models.step_models import LLAMA3_70B, PAPER_NODE
from sched.beyond import ColdSteps, Room, forecast, no_room, room_of, too_slow
from sched.classes import CLASSES

BLOCK_TOKENS = 16
CALIBRATED = (1 / 8, 1 / 2, 1)
"""Parts of the room that the steps at the start read, as in engine/beyond/host.py."""
TOKENS = 64
"""Of an answer."""
NOISE = 0.05
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class ContextCase:
    """One request on one node of LLaMA3-70B on 8 A800: the hot blocks of its KV stay, all others are read in each
    step."""

    label: str
    resident: float  # share of the KV that stays in the arena
    gbyte_s: float  # of the tier

    @property
    def series(self) -> str:
        return f"{self.gbyte_s:g} GB/s"

    @property
    def x(self) -> float | None:
        return self.resident

    @property
    def source(self) -> str:
        return "generated: one request"

    def settings(self) -> dict[str, object]:
        return {"model": PAPER_NODE.name, "step_noise": NOISE}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        return self.as_dict()

    @property
    def tokens(self) -> int:
        """Of the context."""
        return int((self.room(1).chunk_tokens - TOKENS) / self.resident)

    def room(self, far_blocks: int) -> Room:
        """Of one request, by the rules of production."""
        block_bytes = BLOCK_TOKENS * PAPER_NODE.token_bytes
        arena = PAPER_NODE.kv_tokens // BLOCK_TOKENS
        room = room_of(arena, (1, far_blocks), BLOCK_TOKENS, block_bytes, PAPER_NODE.chunk_tokens)
        assert room is not None, "the arena of this node is large enough"
        return replace(room, hot_apart=True)

    def simulate(self, seed: int) -> dict[str, Any]:
        """Calibrates, forecasts, decides, and decodes."""
        room = self.room(-(-(self.tokens + TOKENS) // BLOCK_TOKENS))
        assert no_room(self.tokens, TOKENS, room, "the node") is None
        noise = Noise(seed, self.label, NOISE)

        def step_s(tokens: int) -> float:
            tiers = Tiers(near_bytes_s=25e9, far_bytes_s=self.gbyte_s * 1e9)
            return context_step_s(PAPER_NODE, LLAMA3_70B.layers, room, tokens, tiers) * noise.factor()

        steps = ColdSteps()
        for part in CALIBRATED:
            tokens = (room.hot_blocks + int(part * room.cold_blocks)) * BLOCK_TOKENS
            near, far = room.bytes_of(tokens)
            steps.observe(near + room.hot_bytes(tokens), far, step_s(tokens))
        promised = forecast(self.tokens, TOKENS, 0, room, steps, PAPER_NODE.prompt_s(self.tokens, 0))
        token_s = fmean(step_s(self.tokens + made) for made in range(TOKENS))
        read_s = promised.cold_bytes / (self.gbyte_s * 1e9)
        own_s = PAPER_NODE.decode_s(1, self.tokens)
        bearing = [one for one in CLASSES.values() if too_slow(promised, one.name, one.tbt_s, "the node") is None]
        return {
            "requests": 1,
            "finished": 1,
            "refused": 0,
            "tokens_s": 1 / token_s,
            "of_limit": max(read_s, own_s) / token_s,
            "forecast_off": abs(promised.token_s / token_s - 1) if promised.cold_blocks else math.nan,
            "classes": len(bearing),
            "of_fitting": own_s / token_s,
            "cost": 1e6 * token_s / HOUR_S,
            "node_hours": TOKENS * token_s / HOUR_S,
        }


@dataclass(frozen=True, slots=True)
class BlockCase:
    """Many prompts of an OPT model on FlexGen's machine."""

    label: str
    block: BlockOfBatches

    @property
    def series(self) -> str:
        return "FlexGen's machine"

    @property
    def x(self) -> float | None:
        return None

    @property
    def source(self) -> str:
        return "generated: prompts of 512 tokens, answers of 32"

    def settings(self) -> dict[str, object]:
        return {}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        return self.as_dict()

    def simulate(self, seed: int) -> dict[str, Any]:
        """No chance is in it."""
        tokens_s = self.block.tokens_s
        return {
            "requests": self.block.prompts,
            "finished": self.block.prompts,
            "refused": 0,
            "tokens_s": tokens_s,
            "cost": 1e6 / tokens_s / HOUR_S,
            "node_hours": self.block.seconds() / HOUR_S,
        }
