"""The chunks of a long prompt on nodes that each compute some of its tokens: context parallelism. Pure.

Nodes take turns: chunk k of M belongs to node (k - M) mod P, so the last chunk is on the last of P nodes. Attention
over the tokens before a chunk makes late chunks slower. Chunks therefore become shorter with depth, so that all take
equally long (sched/chunks.py), and with a multiple of P chunks every node has the same causal work. Zigzag order, which
gives every node an early and a late part of each piece, would balance equal parts too. But then all nodes wait for one
another in every layer. In this order a chunk waits only for chunks before it:

    begin_k = max(end of the node's chunk before, begin_(k-1) + t_(k-1) / L + hop)
    end_k   = max(begin_k + t_k, end_(k-1) + t_k / L + hop, begin_(k-1) + t_(k-1) / L + L hop + t_k / L)

with t_k of the whole model, L layers, and `hop` the time in which the KV of a chunk's layer reaches another node: layer
l of chunk k needs layer l of chunk k - 1, and the layers of a chunk go one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from sched.chunks import LEAST_CHUNK_TOKENS, Coefficients, chunk_sizes, stage_seconds

TRIES = 3
"""Plans compared: the fewest chunks, and twice and four times as many."""


def owner(chunk: int, chunks: int, nodes: int) -> int:
    """The node that computes this one of `chunks` chunks."""
    return (chunk - chunks) % nodes


def latest_start(tokens: int, nodes: int, align: int) -> int:
    """The longest prefix, in tokens, that leaves a chunk for every node. Raises ValueError if there is none."""
    start = ((tokens - 2) // align - (nodes - 1)) * align
    if start < 0:
        raise ValueError(f"{tokens} tokens are too few for {nodes} nodes that each compute a block of {align} tokens")
    return start


def stripe_sizes(
    tokens: int, done: int, nodes: int, layers: int, cost: Coefficients, most: int, align: int = 1
) -> list[int]:
    """The sizes of chunks with the least makespan on `nodes` equal nodes, each at most `most` tokens, all but the last
    one multiples of `align`. Every node has at least one. Raises ValueError if `done` exceeds latest_start()."""
    if done > latest_start(tokens, nodes, align):
        raise ValueError(f"the {tokens - done} tokens behind {done} are too few for {nodes} nodes")
    best: list[int] = []
    best_s = float("inf")
    fewest = chunk_sizes(tokens, done, max(align, most // align * align), cost, align=align)
    rounds = -(-len(fewest) // nodes)
    for _ in range(TRIES):
        sizes = _in_rounds(tokens, done, nodes, rounds, cost, most, align)
        seconds = stripes_s(stage_seconds(sizes, done, cost, 1.0), nodes, layers)
        if seconds < best_s:
            best, best_s = sizes, seconds
        if sizes[0] // 2 < max(align, LEAST_CHUNK_TOKENS):
            break
        rounds *= 2
    return best


def _in_rounds(tokens: int, done: int, nodes: int, rounds: int, cost: Coefficients, most: int, align: int) -> list[int]:
    """Chunks that are as short as they can be if no node has more than `rounds` of them."""
    low, high = 1, max(1, most // align)
    while low < high:
        middle = (low + high) // 2
        if len(chunk_sizes(tokens, done, middle * align, cost, align=align)) <= nodes * rounds:
            high = middle
        else:
            low = middle + 1
    sizes = chunk_sizes(tokens, done, high * align, cost, align=align)
    while len(sizes) < nodes:  # blocks are too coarse to divide them evenly
        high -= 1
        sizes = chunk_sizes(tokens, done, high * align, cost, align=align)
    return sizes


def stripes_s(seconds: Sequence[float], nodes: int, layers: int, hop_s: float = 0.0) -> float:
    """Seconds from the begin of the first chunk to the end of the last one; chunk k alone takes `seconds[k]`."""
    return max((end for _, end in played(seconds, nodes, layers, hop_s)), default=0.0)


def played(seconds: Sequence[float], nodes: int, layers: int, hop_s: float = 0.0) -> list[tuple[float, float]]:
    """(begin, end) of each chunk on its node."""
    free = [0.0] * nodes
    found: list[tuple[float, float]] = []
    for chunk, whole_s in enumerate(seconds):
        node, layer_s = owner(chunk, len(seconds), nodes), whole_s / layers
        begin, end = free[node], free[node] + whole_s
        if found:
            before_begin, before_end = found[-1]
            first = before_begin + seconds[chunk - 1] / layers + hop_s
            begin = max(begin, first)
            end = max(begin + whole_s, before_end + hop_s + layer_s, first + (layers - 1) * hop_s + layer_s)
        free[node] = end
        found.append((begin, end))
    return found
