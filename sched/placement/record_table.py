"""The table of a view: its columns, and their values from load records. Pure.

An acceptor makes a table for every request, so this reads the records as numbers of one type, which numpy does several
times faster than by the names of fields. It uses no `take` and no index of places: these give up the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sched.gossip.load_word import LACK_MAX, LACK_SHIFT
from sched.gossip.record import RECORD, RECORD_BYTES
from sched.gossip.state import Records

SLOW = 1.5
"""A node is slow if its measured / predicted step time exceeds this (reference/scheduling.md section 6)."""

COLUMNS = (
    "a0", "a1", "a2", "open_at", "work_until", "closed_decode", "waiting", "running", "queued_tokens", "free_blocks",
    "total_blocks", "step_s", "step_soon_s", "step_alone_s", "decode_s", "age_s", "tolled",
)  # fmt: skip
"""Rows of a view's table; each is also an attribute of the view."""

Table = npt.NDArray[np.float64]

FIELDS = {
    "<f4": {
        "a0": "prefill_a0",
        "a1": "prefill_a1",
        "a2": "prefill_a2",
        "work_until": "work_s",
        "step_s": "decode_step_s",
        "age_s": "age_s",
    },
    "<u4": {"queued_tokens": "queued_tokens", "total_blocks": "blocks_total", "free_blocks": "blocks_used"},
    "<u2": {"running": "running", "waiting": "waiting_interactive"},
}
"""Type -> column -> field of a record."""


def _rows(*columns: str) -> list[int]:
    return [COLUMNS.index(column) for column in columns]


def _places(of_type: str, fields: Iterable[str]) -> list[int]:
    """Of these fields among the numbers of this type in a record."""
    return [RECORD.fields[field][1] // np.dtype(of_type).itemsize for field in fields]  # type: ignore[index]


_COPIES = [
    (
        of_type,
        RECORD_BYTES // np.dtype(of_type).itemsize,
        list(zip(_rows(*fields), _places(of_type, fields.values()), strict=True)),
    )
    for of_type, fields in FIELDS.items()
]
_SECONDS = _rows("a0", "a1", "a2", "work_until", "step_s")
_WAITING, _RUNNING, _FREE, _TOTAL, _STEP, _SOON, _ALONE = _rows(
    "waiting", "running", "free_blocks", "total_blocks", "step_s", "step_soon_s", "step_alone_s"
)


def table_of(records: Records) -> Table:
    """[len(COLUMNS), len(records)], with times from now on. If a node's steps take much longer than its models predict,
    all its estimates are scaled up until the models have adapted. So they are if some of its ranks with experts are
    masked: the others do their work, by 1 / (share of living ranks). A node that lacks experts altogether counts as one
    with a sixteenth of its ranks: it is chosen if there is no better one. `records` is contiguous."""
    table = np.zeros((len(COLUMNS), len(records)))
    for of_type, width, copies in _COPIES:
        numbers = records.view(of_type).reshape(len(records), width)
        for row, place in copies:
            table[row] = numbers[:, place]
    waiting = table[_WAITING]
    waiting += records["waiting_standard"]
    waiting += records["waiting_batch"]
    residual = records["residual"].astype(np.float64)
    if (slow := residual > SLOW).any():
        for row in _SECONDS:
            table[row] *= np.where(slow, residual, 1.0)
    lack = records["flags"] >> np.uint16(LACK_SHIFT)
    if lack.any():
        for row in _SECONDS:
            table[row] *= (LACK_MAX + 1) / (LACK_MAX + 1 - lack)
    free = table[_FREE]  # the used ones until now
    np.subtract(table[_TOTAL], free, out=free)
    np.maximum(free, 0.0, out=free)
    table[_SOON] = table[_STEP]
    table[_ALONE] = np.where(table[_RUNNING] > 0, 0.0, table[_STEP])
    return table
