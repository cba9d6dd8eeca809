"""How much of a prompt's KV the stages of a pipeline have delivered to the decode node. Pure.

Every stage delivers its own layers. A block is whole when all stages have delivered theirs, so the decode node is the
only one that has whole blocks: it names and publishes them.
"""

from __future__ import annotations

from collections.abc import Sequence


class Arrival:
    """One prompt of `num_tokens` tokens, from the stages on `nodes`."""

    def __init__(self, nodes: Sequence[str], num_tokens: int) -> None:
        self._landed = dict.fromkeys(nodes, 0)
        self._num_tokens = num_tokens

    def landed(self, node: str, tokens: int) -> None:
        """The layers of `node` are here for the first `tokens` tokens. Other nodes do not count."""
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
