"""How busy this node is: what it answers to a probe, and whether a prompt that was sent on older news may stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from net.channel import RemoteError
from net.load_words import LoadWords
from net.shm import boot_id
from sched.load_word import CLAIM_UNIT_S
from sched.state import NodeRecord

REDIRECT_SHARE, REDIRECT_S = 0.25, 0.1
"""A prompt is sent elsewhere if its first token would come later than promised by more than this."""


class OwnLoad:
    """Of an engine node."""

    def __init__(self, node_id: str, record: Callable[[], NodeRecord], words: LoadWords) -> None:
        self._node_id, self._record, self._words = node_id, record, words

    async def answer(self) -> dict[str, Any]:
        """To a probe."""
        load = (await self._words.probe([self._node_id]))[self._node_id]
        return {
            "record": self._record().pack().hex(),
            "claimed": load.claimed,
            "outstanding": load.outstanding,
            "unix_s": time.time(),
            "boot_id": boot_id(),
        }

    def keep(self, promise: dict[str, Any]) -> None:
        """The prompt of a claim is here. Raises RemoteError (redirect) if this node has become much busier than its
        acceptor knew when it chose; not for ever: a prompt brings the number of times that this may still happen."""
        if promise["claim"]:
            self._words.arrived(promise["claim"])
        late = self._record().work_s + self._words.outstanding * CLAIM_UNIT_S - promise["wait_s"]
        if promise["redirects_left"] and late > REDIRECT_SHARE * promise["ttft_s"] + REDIRECT_S:
            raise RemoteError(f"{late:.2f} s more work on {self._node_id} than was known", code="redirect")
