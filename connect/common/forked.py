"""A forked child forgets the connections, event loops and lent memory of its parent.

Both processes would write to one connection and to one slot, so the answer of one could reach the other, and a value
would be lost. In a child, an object that is watched here is as if it had never been opened.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Opened(Protocol):
    """An object with parts that its process alone may use."""

    def let_go(self) -> object:
        """In a child: be as before it was opened, and close nothing. Returns the parts."""
        ...


_watched: WeakSet[Opened] = WeakSet()
_parents: list[object] = []
"""The parts stay: their destructors would close them for the parent, too."""


def watch(one: Opened) -> None:
    """It lets go of its parts in each child that is forked from now on."""
    _watched.add(one)


def _in_child() -> None:
    for one in list(_watched):
        _parents.append(one.let_go())


os.register_at_fork(after_in_child=_in_child)
