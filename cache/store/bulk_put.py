"""BulkPut: sends blocks to one home together with the request to store them, directly into its slots
(net/transfer/tcp/bulk_call.py).

Their checksums follow them and are computed while the blocks are on their way. Those of few bytes are sent with the
request: computing them takes less time than another frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache.arena import UNCHECKED
from cache.bulk_messages import PUT, Put, PutEnd
from cache.messages import Taken
from cache.offer import Offer
from cache.protocol import join_keys
from cache.store.job import StoreCall
from net.bodies import answered, encode
from net.transfer.tcp.bulk_call import BulkCall, Views, joined
from net.transfer.tcp.pushing import SMALL_FRAME_BYTES


class BulkPut(BulkCall):
    """A put of the blocks at `positions` of a job. Without `checks` no checksum is computed."""

    def __init__(self, job: StoreCall, positions: Sequence[int], offer: Offer, checks: bool) -> None:
        lengths = [job.length(position) for position in positions]
        keys, nbytes = join_keys([job.keys[position] for position in positions]), sum(lengths)
        self._job, self._positions, self._checks = job, positions, checks
        whole = nbytes <= SMALL_FRAME_BYTES
        put = Put(keys, lengths if job.lengths else (), offer, self._sums() if whole else ())
        super().__init__(PUT, encode(put), nbytes)
        self.sends, self.is_whole = nbytes, whole
        self._runs = [(job.offsets[position], length) for position, length in zip(positions, lengths, strict=True)]

    def data(self) -> Views:
        memory = self._job.region.memory
        return Views(joined([memory[offset : offset + length] for offset, length in self._runs]))

    def tail(self) -> dict[str, Any]:
        return encode(PutEnd(self._sums()))

    def _sums(self) -> list[int]:
        job = self._job
        missing = [position for position in self._positions if position not in job.sums]
        job.sums.update(zip(missing, job.sums_of(missing) if self._checks else [UNCHECKED] * len(missing), strict=True))
        return [job.sums[position] for position in self._positions]

    def taken(self) -> Taken:
        """The home's answer. Raises RemoteError."""
        return answered(Taken, self.answer).check(len(self._positions))
