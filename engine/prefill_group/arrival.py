"""How much of a prompt's KV the nodes of a group have delivered to the decode node. Pure.

Every node delivers its own layers, or its own tokens. A block is whole when all nodes have delivered theirs, so the
decode node is the only one that has whole blocks: it names and publishes them.
"""

from __future__ import annotations

from collections.abc import Sequence


class Arrival:
    """One prompt of `num_tokens` tokens, from the group on `nodes`."""

    def __init__(self, nodes: Sequence[str], num_tokens: int) -> None:
        self._landed = dict.fromkeys(nodes, 0)
        self._num_tokens = num_tokens

    def landed(self, node: str, tokens: int) -> None:
        """All that `node` computes of the first `tokens` tokens is here. Other nodes do not count."""
        if node in self._landed:
            self._landed[node] = max(self._landed[node], min(tokens, self._num_tokens))

    @property
    def tokens(self) -> int:
        """Leading tokens with all layers."""
        return min(self._landed.values())

    @property
    def complete(self) -> bool:
        return self.tokens == self._num_tokens

    def late(self) -> list[str]:
        """The nodes that have not delivered everything."""
        return [node for node, tokens in self._landed.items() if tokens < self._num_tokens]
