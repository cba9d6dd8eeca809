"""Decode beyond memory: what does not fit is read again in every step, ahead of the layers that need it.

one context         a request whose KV exceeds the arena of its node, by the rules of sched/beyond.py: old blocks
                    are read through a window of three pieces, layer by layer (engine/beyond/window.py)
block of batches    weights and KV of many prompts beyond the GPU: while a batch computes a layer, the next
                    layer's weights and the next batch's KV are read (FlexGen, arXiv 2303.06865, section 4.2)
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.simulator.models.step_models import StepModel
from sched.beyond import Room

PIECES = 3
"""Of engine/beyond/window.py."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes/s: of DRAM, which is read where the blocks lie, and of what is read through the window; seconds until the
    first byte of a piece."""

    near_bytes_s: float
    far_bytes_s: float
    latency_s: float = 1e-4


def context_step_s(model: StepModel, layers: int, room: Room, tokens: int, tiers: Tiers) -> float:
    """Seconds of a decode step of one request with `tokens` tokens. Reading begins with the step; a piece is filled as
    soon as the one three before it has been attended to."""
    cold, size = room.cold_of(tokens), room.block_size
    near, far = (nbytes // room.block_bytes for nbytes in room.bytes_of(tokens))
    base, slope = model.decode_line(1)
    resident_s = (base + slope * (tokens - cold * size) + near * room.block_bytes / tiers.near_bytes_s) / layers
    near_attention_s, block_s = slope * near * size / layers, slope * size / layers
    slots = max(1, room.window_blocks // PIECES) * layers
    pieces = [min(slots, far - first) for first in range(0, far, slots)]
    filled, used, now = 0.0, [0.0] * PIECES, 0.0
    for _ in range(layers):
        now += resident_s + near_attention_s
        for blocks in pieces:
            begin = max(filled, used[0])
            filled = begin + tiers.latency_s + blocks * room.block_bytes / layers / tiers.far_bytes_s
            now = max(now, filled) + blocks * block_s
            used = [*used[1:], now]
    return now


# --- a block of batches


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU with DRAM and a disk. Bytes, FLOPs, seconds; `flops` as products reach it."""

    flops: float
    gpu_bytes: float
    gpu_bytes_s: float
    dram_bytes: float
    pcie_bytes_s: float
    read_bytes_s: float  # of the disk
    write_bytes_s: float


@dataclass(frozen=True, slots=True)
class Opt:
    """A decoder of OPT's shape: 16-bit weights of 12 hidden^2 per layer, and as many heads of K and V as of q."""

    layers: int
    hidden: int

    @property
    def layer_bytes(self) -> float:
        return 24.0 * self.hidden**2

    @property
    def token_bytes(self) -> float:
        """KV of a token in one layer."""
        return 4.0 * self.hidden


@dataclass(frozen=True, slots=True)
class Lies:
    """The part of something that lies in each place: GPU, DRAM, disk."""

    gpu: float
    dram: float
    disk: float


def lies(nbytes: float, gpu_bytes: float, dram_bytes: float) -> Lies:
    """As much as possible in the faster places."""
    gpu = min(1.0, max(0.0, gpu_bytes) / nbytes)
    dram = min(1.0 - gpu, max(0.0, dram_bytes) / nbytes)
    return Lies(gpu, dram, 1.0 - gpu - dram)


@dataclass(frozen=True, slots=True)
class BlockOfBatches:
    """`batches` batches of `size` prompts, whose weights are read once per layer and step for all of them."""

    machine: Machine
    model: Opt
    size: int
    batches: int
    prompt: int
    output: int

    @property
    def prompts(self) -> int:
        return self.size * self.batches

    def places(self) -> tuple[Lies, Lies]:
        """Of weights and KV. The GPU also has the layer that it computes and the one that comes next, and the KV of two
        batches in one layer."""
        machine, model = self.machine, self.model
        whole_kv = model.layers * model.token_bytes * self.prompts * (self.prompt + self.output)
        whole_weights = model.layers * model.layer_bytes
        if whole_weights + whole_kv <= machine.gpu_bytes:
            return Lies(1.0, 0.0, 0.0), Lies(1.0, 0.0, 0.0)
        buffers = 2 * (model.layer_bytes + model.token_bytes * self.size * (self.prompt + self.output))
        weights = lies(whole_weights, machine.gpu_bytes - buffers, machine.dram_bytes)
        left = machine.dram_bytes - weights.dram * whole_weights
        if whole_kv <= left:
            return weights, Lies(0.0, 1.0, 0.0)
        return weights, Lies(0.0, 0.0, 1.0)

    def seconds(self) -> float:
        """From the first prompt to the last token."""
        model, (weights, kv) = self.model, self.places()
        steps = self.output - 1
        context = self.prompt + self.output / 2
        gen_s = self._layer_s(weights, kv, 1, self.size * context * model.token_bytes, 0.0)
        pre_s = self._layer_s(weights, kv, self.prompt, 0.0, self.size * self.prompt * model.token_bytes)
        return model.layers * (pre_s + steps * gen_s)

    @property
    def tokens_s(self) -> float:
        """Generated tokens over all of the time, as FlexGen counts."""
        return self.prompts * self.output / self.seconds()

    def _layer_s(self, weights: Lies, kv: Lies, tokens: int, read: float, written: float) -> float:
        """Seconds of a layer for all batches; `tokens` of each prompt; bytes of KV that a batch reads and writes. The
        ways work at the same time; the slowest decides."""
        machine, model = self.machine, self.model
        share = model.layer_bytes / self.batches  # of the next layer's weights, during one batch
        products = 2.0 * (model.layer_bytes / 2) * self.size * tokens
        compute_s = max(products / machine.flops, (model.layer_bytes + read) / machine.gpu_bytes_s)
        to_gpu_s = ((weights.dram + weights.disk) * share + (kv.dram + kv.disk) * read) / machine.pcie_bytes_s
        from_gpu_s = (kv.dram + kv.disk) * written / machine.pcie_bytes_s
        disk_s = (weights.disk * share + kv.disk * read) / machine.read_bytes_s
        stored_s = kv.disk * written / machine.write_bytes_s
        return self.batches * max(compute_s, to_gpu_s, from_gpu_s, disk_s, stored_s)
