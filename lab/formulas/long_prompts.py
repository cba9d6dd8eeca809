"""One long prompt on several nodes, by formula: tensor, context and pipeline parallel. Pure.

S tokens, H the width, L layers, P nodes of one model each, two bytes per element, T the time of the prompt on one node
without the fixed time of its steps (sched/cost.py):

    way        bytes that the busiest node receives           TTFT
    tensor     4 (P - 1) / P S H L                            T / P + bytes / NIC: layers wait for both all-reduces
    context    (P - 1) / P S * KV bytes of a token            max(T / P, bytes / NIC): the ring hides what it can
    pipeline   2 S H                                          sum t_k + (P - 1) max t_k + (P - 1) hops

An all-reduce of n bytes as reduce-scatter and all-gather brings 2 (P - 1) / P n bytes to every node; a layer has two
(attention and MLP). Context parallel splits the causal attention evenly, as a zigzag order does. These are limits that
favour the rivals: no way pays for skew, launches or contention.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.simulator.models.step_models import Geometry, StepModel
from sched.chunks import makespan, plan, stage_seconds

ELEMENT_BYTES = 2
ALIGN_TOKENS = 64
WAYS = ("tensor", "context", "pipeline")


@dataclass(frozen=True, slots=True)
class Estimate:
    """One way to compute one prompt."""

    way: str
    nodes: int
    ttft_s: float
    received_bytes: float  # by the node that receives most
    node_s: float  # all nodes together, while they compute or wait inside a step for the others
    wait_s: float  # the longest step: what a short prompt on such a node waits for


def estimates(model: StepModel, shape: Geometry, tokens: int, nodes: int) -> list[Estimate]:
    """One per way, in the order of WAYS."""
    return [
        _tensor(model, shape, tokens, nodes),
        _context(model, shape, tokens, nodes),
        _pipeline(model, shape, tokens, nodes),
    ]


def _alone_s(model: StepModel, tokens: int) -> float:
    return model.prompt_s(tokens, 0)


def _longest_chunk_s(model: StepModel, tokens: int) -> float:
    """On one node: the last whole chunk has the most context."""
    new = min(model.chunk_tokens, tokens)
    return model.prefill_s(new, tokens - new)


def _tensor(model: StepModel, shape: Geometry, tokens: int, nodes: int) -> Estimate:
    received = 4 * (nodes - 1) / nodes * tokens * shape.hidden * shape.layers * ELEMENT_BYTES
    total_s = _alone_s(model, tokens) / nodes + received / model.nic_bytes_s
    share = total_s / _alone_s(model, tokens)
    return Estimate("tensor", nodes, total_s, received, nodes * total_s, share * _longest_chunk_s(model, tokens))


def _context(model: StepModel, shape: Geometry, tokens: int, nodes: int) -> Estimate:
    received = (nodes - 1) / nodes * tokens * shape.token_bytes
    total_s = max(_alone_s(model, tokens) / nodes, received / model.nic_bytes_s)
    share = total_s / _alone_s(model, tokens)
    return Estimate("context", nodes, total_s, received, nodes * total_s, share * _longest_chunk_s(model, tokens))


def _pipeline(model: StepModel, shape: Geometry, tokens: int, nodes: int) -> Estimate:
    sizes = plan(tokens, 0, nodes, model.prefill, model.chunk_tokens, ALIGN_TOKENS)
    seconds = stage_seconds(sizes, 0, model.prefill, 1 / nodes)
    token_bytes = shape.hidden * ELEMENT_BYTES
    hop_s = model.nic_latency_s + sizes[-1] * token_bytes / model.nic_bytes_s
    total_s = makespan(seconds, nodes) + (nodes - 1) * hop_s
    received = float(tokens * token_bytes) if nodes > 1 else 0.0
    return Estimate("pipeline", nodes, total_s, received, nodes * sum(seconds), max(seconds))
