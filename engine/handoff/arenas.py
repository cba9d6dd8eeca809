"""Finds arenas that hold more of a prompt than this node's arena. It uses the digests of all nodes and this node's own
record of the prompts it handed over. Pure.

The next turn of a chat starts with the last prompt and its answer. The prompt is in the arena of this node, which
computed it; the answer is on the node that decoded it. Digests show this after a second or two; this node remembers
immediately where it sent the prompt.

If the layers of the model are in groups, an arena helps up to the last border at which it has, with what is here, what
every group needs (cache/pool/borders.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from cache.block import BlockKey
from cache.pool.borders import Borders
from sched.gossip.holders import Holders
from sched.placement.match import ANCHORS

HANDED_OVER_MAX = 4096
"""Prompts remembered."""


class Arenas:
    """The arenas that node `me` knows. `holders()` returns the digests; `alive(node)`: whether to ask the node;
    borders: None = the model has one group."""

    def __init__(
        self,
        me: str,
        holders: Callable[[], Holders],
        alive: Callable[[str], bool],
        borders: Borders | None = None,
    ) -> None:
        self._me = me
        self._holders = holders
        self._alive = alive
        self._borders = borders
        self._handed_over: OrderedDict[BlockKey, str] = OrderedDict()  # last full block of a prompt -> its decode node

    def handed_over(self, key: BlockKey, node: str) -> None:
        """Record that `node` decodes the prompt whose last full block has this key."""
        self._handed_over[key] = node
        self._handed_over.move_to_end(key)
        if len(self._handed_over) > HANDED_OVER_MAX:
            self._handed_over.popitem(last=False)

    def beyond(self, keys: Sequence[BlockKey], first: int, pooled: int = 0) -> dict[str, int]:
        """Number of leading blocks of keys[first:] that each node probably holds. This node holds the first `first` of
        `keys`, and the pool the next `pooled`. The node that decodes the prompt ending at `first` has published its
        blocks to the pool if there is one; otherwise it may hold all the rest."""
        found: dict[str, int] = {}
        if first < len(keys):
            holders = self._holders()
            hits = holders.best_hits(keys[first:]).tolist()
            if self._borders is not None and any(hits):
                hits = _servable(self._borders, holders, keys, first, hits)
            found = {node: depth for node, depth in zip(holders.nodes, hits, strict=True) if node and depth}
            guesses = self._borders is None or not self._borders.has_states  # which has one where, only a digest says
            if guesses and first and (node := self._handed_over.get(keys[first - 1])) is not None:
                found[node] = max(found.get(node, 0), pooled or len(keys) - first)
        return {node: depth for node, depth in found.items() if node != self._me and self._alive(node)}


def _servable(borders: Borders, holders: Holders, keys: Sequence[BlockKey], first: int, hits: list[int]) -> list[int]:
    """By index of the holders: blocks of keys[first:] with which this node, which has keys[:first], can go on. hits:
    those that they have of group 0. The work is bounded by the borders that are tried, plus one step per node."""
    among = sum(1 << index for index, depth in enumerate(hits) if depth)
    deepest = first + max(hits)
    tried = borders.below(deepest, max(1, -(-deepest // ANCHORS)), [first + depth for depth in hits if depth])
    wanted = borders.wanted(keys, [border for border in tried if border > first], first)
    reached = [0] * len(hits)
    for border, mask in holders.reached(wanted, among):
        while mask:  # each node is in one mask at most
            lowest = mask & -mask
            reached[lowest.bit_length() - 1] = border - first
            mask ^= lowest
    return reached
