"""Finds arenas that hold more of a prompt than this node's arena. It uses the digests of all nodes and this node's own
record of the prompts it handed over. Pure.

The next turn of a chat starts with the last prompt and its answer. The prompt is in the arena of this node, which
computed it; the answer is on the node that decoded it. Digests show this after a second or two; this node remembers
immediately where it sent the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from cache.block import BlockKey
from sched.gossip.holders import Holders

HANDED_OVER_MAX = 4096
"""Prompts remembered."""


class Arenas:
    """The arenas that node `me` knows. `holders()` returns the digests; `alive(node)`: whether to ask the node."""

    def __init__(self, me: str, holders: Callable[[], Holders], alive: Callable[[str], bool]) -> None:
        self._me = me
        self._holders = holders
        self._alive = alive
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
            found = {node: depth for node, depth in zip(holders.nodes, hits, strict=True) if node and depth}
            if first and (node := self._handed_over.get(keys[first - 1])) is not None:
                found[node] = max(found.get(node, 0), pooled or len(keys) - first)
        return {node: depth for node, depth in found.items() if node != self._me and self._alive(node)}
