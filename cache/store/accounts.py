"""Accounts: the bytes that one client's calls of the pooled store have moved, by source."""

from __future__ import annotations

import logging
from collections import Counter

from cache.results import GetResult
from cache.store.calls import Shunned
from cache.store.job import StoreCall

log = logging.getLogger(__name__)

GET_COUNTS = ("gets", "get_blocks", "get_bytes", "get_misses", "corrupt", "given_up")
PUT_COUNTS = ("puts", "put_blocks", "put_bytes", "put_no_room")


class Accounts:
    """`counts` by name: those above, removed, home_failures."""

    def __init__(self) -> None:
        self.counts = Counter(dict.fromkeys((*GET_COUNTS, *PUT_COUNTS, "removed", "home_failures"), 0))

    def got(self, job: StoreCall) -> GetResult:
        """Count a finished get; returns the leading run of the blocks that arrived."""
        count = len(job.keys)
        run = count
        if len(job.arrived) < count:
            run = next(i for i in range(count) if i not in job.arrived)
        nbytes = job.nbytes(range(run))
        totals = self.counts  # one by one: Counter.update takes as long as a lookup in the index
        totals["gets"] += 1
        totals["get_blocks"] += run
        totals["get_bytes"] += nbytes
        totals["get_misses"] += count - len(job.arrived)
        result = GetResult(run, nbytes, lengths=job.lengths)
        origins = [job.arrived[i] for i in range(run)]
        for (home, transport, tier), blocks in (Counter(origins) if run > 1 else dict.fromkeys(origins, 1)).items():
            for counts, name in ((result.sources, home), (result.transports, transport), (result.tiers, tier)):
                counts[name] = counts.get(name, 0) + blocks
        return result

    def put(self, job: StoreCall) -> StoreCall:
        """Count a finished put. A block that the pool already had counts as present, even if some home got a new
        copy."""
        job.stored -= job.present
        nbytes = job.nbytes(list(job.stored))
        self.counts.update(puts=1, put_blocks=len(job.stored), put_bytes=nbytes, put_no_room=len(job.refused))
        return job

    def failed(self, home: str, error: Exception) -> None:
        """Count a home's failure."""
        self.counts["home_failures"] += 1
        log.log(logging.DEBUG if isinstance(error, Shunned) else logging.INFO, "home %s: %r", home, error)
