"""Share: the experts of one rank, in memory that the other ranks of the host can read.

    gate_up   [layers, slots, 2 * expert size, H]
    down      [layers, slots, H, expert size]

The products read this memory as it is. A slot changes its expert when its bytes are replaced, between two rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.experts.plan import Plan
from net.transfer.common.memory import Region

KINDS = ("gate", "up", "down")
"""The weights of an expert."""


class Share:
    """`region`: of Plan.share_bytes, this process's own or another rank's."""

    def __init__(self, region: Region, plan: Plan) -> None:
        self._region, self._plan = region, plan
        dtype = getattr(torch, plan.layout.dtype)
        every = torch.frombuffer(region.memory, dtype=dtype)
        split = 2 * plan.hidden * plan.expert_size * len(plan.layers) * plan.slots
        shape = len(plan.layers), plan.slots
        self.gate_up: Tensor = every[:split].view(*shape, 2 * plan.expert_size, plan.hidden)
        self.down: Tensor = every[split:].view(*shape, plan.hidden, plan.expert_size)
        self._staged: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def put(self, layer: int, slot: int, kind: str, weight: Tensor) -> None:
        """`weight` [out, in] of any float type; kind: gate, up or down."""
        size = self._plan.expert_size
        if kind == "down":
            self.down[layer, slot].copy_(weight)
        else:
            begin = size if kind == "up" else 0
            self.gate_up[layer, slot, begin : begin + size].copy_(weight)

    def copy(self, layer: int, slot: int, other: Share, other_slot: int) -> None:
        """Take an expert from another rank."""
        self.gate_up[layer, slot].copy_(other.gate_up[layer, other_slot])
        self.down[layer, slot].copy_(other.down[layer, other_slot])

    def bytes_of(self, layer: int, slot: int) -> list[memoryview]:
        """The memory of an expert's weights: the parts of the share, in order."""
        return [_bytes(part[layer, slot]) for part in (self.gate_up, self.down)]

    def stage(self, layer: int, slot: int, other: Share, other_slot: int) -> None:
        """The same, to be used from `commit` on."""
        weights = other.gate_up[layer, other_slot].clone(), other.down[layer, other_slot].clone()
        self._staged[layer, slot] = weights

    def commit(self) -> None:
        for (layer, slot), (gate_up, down) in self._staged.items():
            self.gate_up[layer, slot].copy_(gate_up)
            self.down[layer, slot].copy_(down)
        self._staged.clear()

    def drop_staged(self) -> None:
        self._staged.clear()

    def expert(self, layer: int, slot: int, x: Tensor) -> Tensor:
        """x [rows, H] -> [rows, H]."""
        gate, up = F.linear(x, self.gate_up[layer, slot]).chunk(2, dim=-1)
        acted = F.silu(gate) if self._plan.activation == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(acted * up, self.down[layer, slot])


def _bytes(part: Tensor) -> memoryview:
    found: memoryview = part.reshape(-1).view(torch.uint8).numpy().data
    return found
