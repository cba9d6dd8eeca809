"""Share: the experts of one rank, in memory that the other ranks of the host can read.

    gate_up         [layers, slots, 2 * expert size, H]
    down            [layers, slots, H, expert size]
    gate_up_bias    [layers, slots, 2 * expert size], of models with biases (gpt-oss)
    down_bias       [layers, slots, H]

The products read this memory as it is: torch's grouped product of all slots, without a copy. The kernels of
engine/model/ops/cpu.py are faster, but read packed weights. Here the bytes must stay as a checkpoint has them: other
ranks copy them while experts move, also ranks elsewhere, whose CPUs pack otherwise, and a packed copy of each expert
would double the memory. A slot changes its expert when its bytes are replaced, between two rounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.experts.plan import Plan
from engine.model.ops.interface import SHARPNESS
from net.transfer.common.memory import Region

MATRICES = ("gate", "up", "down")


def kinds(plan: Plan) -> tuple[str, ...]:
    """The weights of an expert, as the end of their names."""
    return (*MATRICES, *(f"{name}_bias" for name in MATRICES)) if plan.biased else MATRICES


class Share:
    """`region`: of Plan.share_bytes, this process's own or another rank's."""

    def __init__(self, region: Region, plan: Plan) -> None:
        self._region, self._plan = region, plan
        dtype = getattr(torch, plan.layout.dtype)
        every = torch.frombuffer(region.memory, dtype=dtype)
        shapes: list[tuple[int, ...]] = [(2 * plan.expert_size, plan.hidden), (plan.hidden, plan.expert_size)]
        shapes += [shape[:1] for shape in shapes] if plan.biased else []
        self._parts: list[Tensor] = []
        for shape in shapes:
            whole = len(plan.layers), plan.slots, *shape
            self._parts.append(every[: math.prod(whole)].view(whole))
            every = every[math.prod(whole) :]
        self.gate_up, self.down = self._parts[:2]
        # torch's grouped product needs rows and matrices that begin at multiples of 16 bytes.
        matrices = self.gate_up, self.down
        self._grouped = not any(part.element_size() * part.shape[-1] % 16 or part.data_ptr() % 16 for part in matrices)
        self._staged: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def slots(self) -> int:
        """Experts in each layer."""
        return self._plan.slots

    def put(self, layer: int, slot: int, kind: str, weight: Tensor) -> None:
        """`weight` [out, in] or [out] of any float type; kind: of `kinds`."""
        size, matrix = self._plan.expert_size, kind.removesuffix("_bias")
        part = self._parts[(matrix == "down") + 2 * (matrix != kind)][layer, slot]
        if matrix != "down":
            begin = size if matrix == "up" else 0
            part = part[begin : begin + size]
        part.copy_(weight)

    def copy(self, layer: int, slot: int, other: Share, other_slot: int) -> None:
        """Take an expert from another rank."""
        for ours, theirs in zip(self._parts, other._parts, strict=True):
            ours[layer, slot].copy_(theirs[layer, other_slot])

    def bytes_of(self, layer: int, slot: int) -> list[memoryview]:
        """The memory of an expert's weights: the parts of the share, in order."""
        return [_bytes(part[layer, slot]) for part in self._parts]

    def take(self, layer: int, slot: int, lone: Share) -> None:
        """The expert of a share that has one."""
        for ours, theirs in zip(self._parts, lone._parts, strict=True):
            ours[layer, slot].copy_(theirs[0, 0])

    def room(self, layer: int, slot: int) -> list[memoryview]:
        """Memory for the parts of an expert, to be used from `commit` on."""
        self._staged[layer, slot] = [torch.empty_like(part[layer, slot]) for part in self._parts]
        return [_bytes(part) for part in self._staged[layer, slot]]

    def staged(self, layer: int, slot: int) -> list[memoryview]:
        """The memory that `room` gave for this expert; nothing if it gave none."""
        return [_bytes(part) for part in self._staged.get((layer, slot), ())]

    def stage(self, layer: int, slot: int, other: Share, other_slot: int) -> None:
        """As `copy`, to be used from `commit` on."""
        self._staged[layer, slot] = [part[layer, other_slot].clone() for part in other._parts]

    def commit(self) -> None:
        for (layer, slot), weights in self._staged.items():
            for part, weight in zip(self._parts, weights, strict=True):
                part[layer, slot].copy_(weight)
        self._staged.clear()

    def drop_staged(self) -> None:
        self._staged.clear()

    def experts(self, layer: int, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, H], sorted by slot -> [rows, H]. `ends` [slots] int32: the row behind the last one of each slot."""
        if not self._grouped:
            parts = x.tensor_split(ends[:-1].tolist())
            return torch.cat([self.expert(layer, slot, part) for slot, part in enumerate(parts) if len(part)])
        inner = F.grouped_mm(x, self.gate_up[layer].transpose(1, 2), offs=ends)
        if not self._plan.biased:
            return F.grouped_mm(self._acted(*inner.chunk(2, dim=-1)), self.down[layer].transpose(1, 2), offs=ends)
        slots = torch.arange(len(ends)).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
        of_inner, of_out = (part[layer][slots] for part in self._parts[2:])
        acted = self._acted(*(inner + of_inner).chunk(2, dim=-1))
        return F.grouped_mm(acted, self.down[layer].transpose(1, 2), offs=ends) + of_out

    def expert(self, layer: int, slot: int, x: Tensor) -> Tensor:
        """x [rows, H] -> [rows, H], of one slot."""
        inner = F.linear(x, self.gate_up[layer, slot], self._bias(2, layer, slot))
        return F.linear(self._acted(*inner.chunk(2, dim=-1)), self.down[layer, slot], self._bias(3, layer, slot))

    def _bias(self, part: int, layer: int, slot: int) -> Tensor | None:
        return self._parts[part][layer, slot] if self._plan.biased else None

    def _acted(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._plan.activation == "clamped":
            limit = self._plan.gate_limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * torch.sigmoid(gate * SHARPNESS))
        return up * (F.silu(gate) if self._plan.activation == "silu" else F.gelu(gate, approximate="tanh"))


def _bytes(part: Tensor) -> memoryview:
    found: memoryview = part.reshape(-1).view(torch.uint8).numpy().data
    return found
