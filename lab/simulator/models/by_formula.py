"""The step model of a published model on given hardware, by formula: the groups of its KV, and its weights.

    prefill chunk   a0 + max(read of the weights, a1 n) + a2 n (n + 2 ctx)
    decode step     max(read of the weights, p B) + d0 + d1 B + k sum(ctx)

    a1   products with the active weights, attention to full windows, states      FLOPs of a token / flops
    a2   attention of full and latent groups: n (n + 2 ctx) / 2 pairs             FLOPs of a pair / 2 / flops
    p    products with the active weights                                         FLOPs of a token / flops
    d1   KV of a request that does not grow: its windows, its states twice        see below
    k    KV of a token of context in full and latent groups                       see below

d1 and k are the longer of two times: the bytes at hbm_bytes_s, the FLOPs of attention at flops. A decode step with
latent rows is near the border (reference/models-and-quantization.md A3). A request shorter than a window counts as one
with a full window. The weights of a step are those that its tokens use: with E experts, k of them for a token, B tokens
read 1 - (1 - k / E)^B of the experts. Placement knows only a0, a1, a2.
"""

from __future__ import annotations

from cache.groups import Groups, PoolRule
from lab.geometry.architecture import Architecture, Part
from lab.simulator.models.expert_ranks import ExpertRanks, with_ranks
from lab.simulator.models.step_models import H200, Hardware, StepModel

CHUNK_TOKENS = 8192

A800 = Hardware(312e12 * 0.6, 2.04e12 * 0.8, 80e9, 87e9 / 8)
H20 = Hardware(148e12 * 0.6, 4.0e12 * 0.8, 96e9, 50e9, 1e-3)
"""148 TFLOP/s in 16 bits, 96 GB of HBM3, 4.0 TB/s, as willitrunai.com/gpus/h20-96gb has them (NVIDIA has no public data
sheet of it); the shares of them that a step reaches, and the NIC, as H200's."""


def times(one: Hardware, count: int) -> Hardware:
    """A node of `count` such GPUs, which share a step: 2 ms for launches and collectives."""
    sizes = (one.flops, one.hbm_bytes_s, one.memory_bytes, one.nic_bytes_s)
    return Hardware(*(count * size for size in sizes))


HARDWARE = {
    "h200": H200,
    "a800": A800,
    "4xa800": times(A800, 4),
    "8xa800": times(A800, 8),
    "8xh200": times(H200, 8),
    "16xh200": times(H200, 16),
    "8xh20": times(H20, 8),
    "16xh20": times(H20, 16),
    "32xh20": times(H20, 32),
}
"""Nodes by the value of --hardware; 16 GPUs are two machines that serve as one node, 32 are four."""


def by_formula(model: Architecture, hardware: str, rule: PoolRule, ranks: ExpertRanks | None = None) -> StepModel:
    """hardware: a key of HARDWARE. `ranks`: how the GPUs of a node share the experts; None: evenly, and at no cost.
    Raises ValueError."""
    if hardware not in HARDWARE:
        raise ValueError(f"--hardware: {hardware!r} is not one of {', '.join(HARDWARE)}")
    node, weights, kv = HARDWARE[hardware], model.weights, Groups(tuple(part.group for part in model.parts), rule)
    room = node.memory_bytes - weights.nbytes
    if room <= 0:
        raise ValueError(
            f"--hardware: {weights.nbytes / 1e9:.0f} GB of weights of {model.name} do not fit into the "
            f"{node.memory_bytes / 1e9:.0f} GB of {hardware}"
        )
    if not kv.token_bytes:
        raise ValueError(f"--model-geometry: no group of {model.name} grows with the prompt, which is not supported")
    growing = [part for part in model.parts if part.group.grows]
    products = 2 * weights.active
    fixed = sum(part.group.layers * _fixed_flops(part) for part in model.parts)
    pair = sum(part.group.layers * part.prefill_flops for part in growing)
    read = weights.shared * weights.shared_bytes + weights.experts * weights.expert_bytes
    made = StepModel(
        name=f"{model.name} on {hardware}",
        prefill=(node.overhead_s, (products + fixed) / node.flops, pair / 2 / node.flops),
        decode=(
            read / node.hbm_bytes_s,
            products / node.flops,
            node.overhead_s,
            sum(_fixed_s(part, node) for part in model.parts),
            sum(_token_s(part, node) for part in growing),
        ),
        token_bytes=kv.token_bytes,
        kv_tokens=int(0.9 * room / kv.token_bytes),
        chunk_tokens=CHUNK_TOKENS,
        nic_bytes_s=node.nic_bytes_s,
        kv=kv,
        expert_s=weights.experts * weights.expert_bytes / node.hbm_bytes_s,
        expert_share=weights.expert_share,
    )
    return made if ranks is None else with_ranks(made, weights, node.memory_bytes, ranks)


def _fixed_flops(part: Part) -> float:
    """FLOPs of a token of a prompt in one layer, apart from pairs of full and latent groups."""
    if part.group.grows:
        return 0.0
    return part.prefill_flops * max(1, part.group.window)


def _fixed_s(part: Part, node: Hardware) -> float:
    """Seconds of a decode step for the windows or states of one request."""
    if part.group.grows:
        return 0.0
    flops = part.group.layers * part.decode_flops * max(1, part.group.window)
    return max(part.group.step_bytes(part.group.window) / node.hbm_bytes_s, flops / node.flops)


def _token_s(part: Part, node: Hardware) -> float:
    """Seconds of a decode step for one token of context in a group that grows."""
    return max(part.group.step_bytes(1) / node.hbm_bytes_s, part.group.layers * part.decode_flops / node.flops)
