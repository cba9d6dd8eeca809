"""The node record: the load of one node in 92 bytes of fixed layout, one row of a numpy array. Pure.

The first 60 bytes are the load word that peers also read one-sided (sched/gossip/load_word.py), without its checksum,
because packets have their own. The rest are predictions, fields for which the load word has no room, and the age.

Times in a record are relative: seconds left or passed when it was written. The holder of a record ages it by its own
steady clock from the moment of arrival, and passes it on aged, so clocks of different nodes are never compared; the
error is the record's time on the wire.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Self

import numpy as np

LOAD_WORD = [
    ("version", "<u4"),
    ("node_low", "<u4"),
    ("incarnation", "<u4"),
    ("written_ms", "<u4"),
    ("work_s", "<f4"),
    ("queued_tokens", "<u4"),
    ("settled", "<u8"),
    ("decode_step_s", "<f4"),
    ("blocks_used", "<u4"),
    ("blocks_total", "<u4"),
    ("running", "<u2"),
    ("max_running", "<u2"),
    ("waiting_interactive", "<u2"),
    ("waiting_standard", "<u2"),
    ("waiting_batch", "<u2"),
    ("flags", "<u2"),
    ("dram_fill", "u1"),
    ("ssd_fill", "u1"),
    ("digest_epoch", "<u2"),
]
_BEYOND = [
    ("age_s", "<f4"),
    ("node_high", "<u4"),
    ("prefill_a0", "<f4"),
    ("prefill_a1", "<f4"),
    ("prefill_a2", "<f4"),
    ("blocks_soon", "<u4"),
    ("running_soon", "<u2"),
    ("residual", "<f2"),
    ("nic_in", "u1"),
    ("nic_out", "u1"),
    ("health", "u1"),
    ("weights", "u1"),
]
RECORD = np.dtype(LOAD_WORD + _BEYOND)
RECORD_BYTES = RECORD.itemsize

_CODES = {"<u8": "Q", "<u4": "I", "<u2": "H", "u1": "B", "<f4": "f", "<f2": "e"}


def structure(fields: Sequence[tuple[str, str]]) -> struct.Struct:
    """Packs these fields, (name, numpy type), one after the other."""
    return struct.Struct("<" + "".join(_CODES[kind] for _, kind in fields))


_STRUCT = structure(LOAD_WORD + _BEYOND)
_NAMES = tuple(RECORD.names or ())
RECORD_WORDS = RECORD_BYTES // 4
"""A record as 32-bit words, which numpy copies and compares much faster than structures of thirty fields."""


def _word(name: str) -> int:
    offset: int = RECORD.fields[name][1]  # type: ignore[index]
    return offset // 4


FLOAT_WORDS = [_word(name) for name in _NAMES if RECORD[name] == np.dtype("<f4")]
IDENTITY_WORDS = [_word(name) for name in ("node_low", "node_high", "version", "incarnation")]
"""The words of two 64-bit numbers: the node's key, and its order."""

RESIDUAL_WORD = _word("residual")
"""Its high half is the residual."""

Version = tuple[int, int]
"""(incarnation, version): the greater one is newer."""


@lru_cache(maxsize=65536)
def node_key(node_id: str) -> int:
    """64-bit name of a node in records and digests."""
    return int.from_bytes(blake2b(node_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """Load of one node. The owner fills in all fields except node, incarnation and version, which the view stamps."""

    node: int = 0  # node_key of its id
    incarnation: int = 0
    version: int = 0  # counts from 1; 0 = no record was published yet
    running: int = 0  # requests in its batch
    waiting: int = 0  # queued requests,
    waiting_interactive: int = 0  # of these by class (sched/classes.py); the rest is of the standard class
    waiting_batch: int = 0
    max_running: int = 0
    running_soon: int = 0  # predicted for the hand-over of a prefill that starts now
    queued_tokens: int = 0  # prefill tokens not yet computed, of waiting and running requests
    blocks_used: int = 0  # KV blocks held by requests; cached blocks that no request holds count as free
    blocks_soon: int = 0  # predicted like running_soon
    blocks_total: int = 0
    age_s: float = 0.0  # since its owner wrote it
    work_s: float = 0.0  # time until its accepted prefill work is done
    prefill_a0: float = 0.0  # its PrefillModel: seconds,
    prefill_a1: float = 0.0  # seconds per token,
    prefill_a2: float = 0.0  # seconds per attended token pair (see sched.cost)
    decode_step_s: float = 0.0  # predicted decode step with one more request
    residual: float = 0.0  # measured / predicted step time; above 1 the node is slow; 0 = not known
    dram_fill: float = 0.0  # share of its DRAM tier in use, sent in 1/255
    ssd_fill: float = 0.0
    nic_in: float = 0.0  # share of its network in use, sent in 1/255
    nic_out: float = 0.0
    health: int = 0  # sched/membership/health.py: 0 = healthy .. 7
    flags: int = 0  # as in the load word: roles, draining, reading weights, whether it can be a stage, masked ranks
    digest_epoch: int = 0  # of its cache digest, the low 16 bits
    settled: int = 0  # as in the load word
    written_ms: int = 0  # as in the load word
    weights: int = 0  # one byte that differs for other weights (engine/update/served.py)

    @property
    def order(self) -> Version:
        return (self.incarnation, self.version)

    @property
    def waiting_standard(self) -> int:
        return max(0, self.waiting - self.waiting_interactive - self.waiting_batch)

    @property
    def prefill(self) -> tuple[float, float, float]:
        return (self.prefill_a0, self.prefill_a1, self.prefill_a2)

    @property
    def free_blocks(self) -> int:
        return max(0, self.blocks_total - self.blocks_used)

    def aged(self, seconds: float) -> NodeRecord:
        """The record `seconds` later: its queue drains, its age grows."""
        return replace(self, work_s=max(0.0, self.work_s - seconds), age_s=self.age_s + seconds)

    def pack(self) -> bytes:
        """RECORD_BYTES bytes; counters saturate, times are rounded to 32-bit floats, shares to 1/255."""
        values = {name: getattr(self, name, 0) for name in _NAMES}
        values["node_low"], values["node_high"] = self.node & 0xFFFFFFFF, self.node >> 32
        for name in ("dram_fill", "ssd_fill", "nic_in", "nic_out"):
            values[name] = round(255 * min(1.0, values[name]))
        for name, bits in _COUNTERS:
            values[name] = min(values[name], (1 << bits) - 1)
        values["residual"] = min(self.residual, 65_000.0)
        return _STRUCT.pack(*values.values())

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises ValueError for another length or a float that is negative or not finite."""
        if len(data) != RECORD_BYTES:
            raise ValueError(f"a record has {RECORD_BYTES} bytes, got {len(data)}")
        return cls.of_row(_STRUCT.unpack(data))

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Self:
        """From one row of a RECORD array (`array[i].item()`). Raises ValueError as `unpack`."""
        values = dict(zip(_NAMES, row, strict=True))
        if not all(math.isfinite(values[name]) and values[name] >= 0 for name in _FLOATS):
            raise ValueError("record with a field that is negative or not finite")
        values["node"] = values.pop("node_low") | values.pop("node_high") << 32
        values["waiting"] = values["waiting_interactive"] + values.pop("waiting_standard") + values["waiting_batch"]
        for name in ("dram_fill", "ssd_fill", "nic_in", "nic_out"):
            values[name] /= 255
        return cls(**values)


_FLOATS = tuple(name for name in _NAMES if RECORD[name].kind == "f")
_COUNTERS = tuple(
    (name, 8 * RECORD[name].itemsize)
    for name in _NAMES
    if RECORD[name].kind == "u" and name not in ("node_low", "node_high")
)
