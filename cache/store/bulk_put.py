"""BulkPut: sends blocks to one home together with the request to store them, directly into its slots
(net/transfer/tcp/bulk_call.py).

Their checksums follow them and are computed while the blocks are on their way.
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


class BulkPut(BulkCall):
    """A put of the blocks at `positions` of a job. Without `checks` no checksum is computed."""

    def __init__(self, job: StoreCall, positions: Sequence[int], offer: Offer, checks: bool) -> None:
        lengths = [job.length(position) for position in positions]
        keys = join_keys([job.keys[position] for position in positions])
        super().__init__(PUT, encode(Put(keys, lengths if job.lengths else (), offer)), sum(lengths))
        self.sends = self.expected
        self._job, self._positions, self._checks = job, positions, checks
        self._runs = [(job.offsets[position], length) for position, length in zip(positions, lengths, strict=True)]

    def data(self) -> Views:
        memory = self._job.region.memory
        return Views(joined([memory[offset : offset + length] for offset, length in self._runs]))

    def tail(self) -> dict[str, Any]:
        job = self._job
        missing = [position for position in self._positions if position not in job.sums]
        job.sums.update(zip(missing, job.sums_of(missing) if self._checks else [UNCHECKED] * len(missing), strict=True))
        return encode(PutEnd([job.sums[position] for position in self._positions]))

    def taken(self) -> Taken:
        """The home's answer. Raises RemoteError."""
        return answered(Taken, self.answer).check(len(self._positions))
