"""Where a running request is while it moves between decode nodes, as its acceptor sees it. Pure.

The source announces the move behind its last token, and says at its end whether it happened. Between the two the
acceptor cannot know which of the two nodes computes the request:

    the source is lost         the attempt fails, and the acceptor places the request again
    the destination is lost    the source says what happened: it goes on itself, or the attempt fails
    the destination speaks     the move has happened, whatever the source says later
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Places:
    """The nodes of one attempt."""

    watched: set[str]  # their loss ends the attempt
    nodes: set[str]  # they know the attempt, and get its abort
    moving: tuple[str, str] | None = None  # (source, destination) of a move that is not settled
    lost: str | None = None  # the destination, if it was lost meanwhile
    reached: set[str] = field(default_factory=set)  # by moves

    def handed_over(self, prefill: str, group: Iterable[str] = ()) -> None:
        """The prompt's KV has left its prefill node, to which the request may have moved since, and the other nodes of
        its `group`; these may still report."""
        self.watched -= {*group, prefill} - self.reached
        if prefill not in self.reached:
            self.nodes.discard(prefill)

    def announced(self, source: str, to: str) -> None:
        """`source` moves the request to `to`."""
        self.heard(source)
        self.moving, self.lost = (source, to), None
        self.nodes.add(to)
        self.reached.add(to)

    def heard(self, node: str) -> None:
        """A token came from `node`, or it moves the request further."""
        if self.moving is not None and node == self.moving[1]:
            self.moved(*self.moving)

    def moved(self, source: str, to: str) -> str | None:
        """The move has happened. Returns the destination if it was lost before this was known: the attempt fails."""
        self.watched.discard(source)
        self.nodes.discard(source)
        if self.moving != (source, to):
            return None  # settled already
        lost, self.moving, self.lost = self.lost, None, None
        self.watched.add(to)
        return lost

    def stayed(self, source: str) -> None:
        """The move did not happen; `source` has told the destination."""
        if self.moving is not None and self.moving[0] == source:
            self.nodes.discard(self.moving[1])
            self.moving = self.lost = None

    def failed(self, node: str) -> bool:
        """`node` says that the attempt failed there. Returns whether it does: not if the request runs elsewhere, after
        a move whose end `node` could not know."""
        return node in self.watched or (self.moving is not None and node == self.moving[1])

    def gone(self, node: str) -> bool:
        """`node` is lost. Returns whether the attempt fails."""
        if self.moving is not None and node == self.moving[1]:
            self.lost = node
            return False
        return node in self.watched
