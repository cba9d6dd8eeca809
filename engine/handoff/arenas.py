"""Whose arena has more of a prompt than this node's: what the digests of all nodes tell, and what this node knows by
itself, because it handed the prompt in front of it over. Pure.

The next turn of a chat is the prompt of the last one, then its answer. The prompt is here, in the arena of the node
that computed it; the answer is where it was decoded. Digests tell that within a second or two. That this prompt went to
that node is known at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from cache.block import BlockKey
from sched.gossip.holders import Holders

HANDED_OVER_MAX = 4096
"""Prompts remembered."""


class Arenas:
    """As node `me` knows them. `holders()`: the digests; `alive(node)`: whether it is worth asking."""

    def __init__(self, me: str, holders: Callable[[], Holders], alive: Callable[[str], bool]) -> None:
        self._me = me
        self._holders = holders
        self._alive = alive
        self._handed_over: OrderedDict[BlockKey, str] = OrderedDict()  # last full block of a prompt -> who decodes it

    def handed_over(self, key: BlockKey, node: str) -> None:
        """The prompt whose last full block has this key is decoded by `node`."""
        self._handed_over[key] = node
        self._handed_over.move_to_end(key)
        if len(self._handed_over) > HANDED_OVER_MAX:
            self._handed_over.popitem(last=False)

    def beyond(self, keys: Sequence[BlockKey], first: int, pooled: int = 0) -> dict[str, int]:
        """Leading blocks of keys[first:] by node that probably has them; `first` of `keys` are here, and the pool has
        `pooled` behind those. Who decodes the prompt that ends there has put what it made into the pool, if there is
        one; else it may have all of the rest."""
        found: dict[str, int] = {}
        if first < len(keys):
            holders = self._holders()
            hits = holders.best_hits(keys[first:]).tolist()
            found = {node: depth for node, depth in zip(holders.nodes, hits, strict=True) if node and depth}
            if first and (node := self._handed_over.get(keys[first - 1])) is not None:
                found[node] = max(found.get(node, 0), pooled or len(keys) - first)
        return {node: depth for node, depth in found.items() if node != self._me and self._alive(node)}
