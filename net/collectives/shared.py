"""SharedCalls: the collectives of ranks on one host, in C, through segments that all of them map (turns.h)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from net.collectives import native, plan
from net.collectives.errors import CallsDiffer, RanksGone
from net.transfer.common.memory import Region

STAGE_BYTES = 1 << 20
"""Of each of two stages of a rank: with the stages of the other ranks it fits into a shared cache."""


def new_segment(name: str) -> Region:
    """A rank's own segment. Raises OSError."""
    return Region.shared(name, native.HEAD_BYTES + 2 * STAGE_BYTES)


class SharedCalls:
    """One rank's calls. One thread calls at a time; `stop`, `late` and `moved_ns` may be used by any thread."""

    def __init__(self, segments: Sequence[Region], ranks: Sequence[int], me: int, epoch: int, calls: int) -> None:
        """`segments`: of the members, whose `ranks` are for messages; `me`: the index of this one. `calls`: complete
        calls so far, the same on all members."""
        self._ranks, self._segments = list(ranks), list(segments)
        self._library = native.library()
        self._group = native.Group()
        self._address = ctypes.addressof(self._group)
        spin_ns, yields = plan.spin_ns(len(segments), len(os.sched_getaffinity(0)))
        for name, value in {
            "size": len(segments),
            "me": me,
            "epoch": epoch,
            "stage_bytes": STAGE_BYTES,
            "spin_ns": spin_ns,
            "yields": int(yields),
            "calls": calls,
        }.items():
            setattr(self._group, name, value)
        for i, region in enumerate(segments):
            self._group.segments[i] = region.address
        self._library.mc_enter(self._address)

    @property
    def completed(self) -> int:
        """The number of complete calls."""
        return int(self._group.calls)

    def stop(self) -> None:
        """Members are gone: a call that cannot become complete without them ends with RanksGone."""
        self._group.stopped = 1

    def moved_ns(self) -> int:
        """When the running call last moved on, by the monotonic clock; 0 if none runs."""
        return int(self._group.moved_ns)

    def late(self) -> list[int]:
        """The ranks that the running call waits for."""
        late = self._library.mc_late(self._address)
        return [rank for i, rank in enumerate(self._ranks) if late >> i & 1]

    def barrier(self) -> None:
        self._end(self._library.mc_barrier(self._address, plan.signature("barrier")))

    def all_reduce(self, given: int, into: int, count: int, dtype: str, op: str) -> None:
        plan.check_reduction(dtype, op)
        direct = plan.is_direct(count * plan.WIDTHS[dtype], len(self._ranks))
        sign = plan.signature("all_reduce", count, dtype, op)
        codes = plan.DTYPES.index(dtype), plan.OPS.index(op)
        self._end(self._library.mc_all_reduce(self._address, sign, given, into, count, *codes, direct))

    def reduce(self, given: int, into: int, count: int, dtype: str, op: str, root: int) -> None:
        plan.check_reduction(dtype, op)
        sign = plan.signature("reduce", count, dtype, op, root)
        codes = plan.DTYPES.index(dtype), plan.OPS.index(op)
        self._end(self._library.mc_reduce(self._address, sign, given, into, count, *codes, root))

    def reduce_scatter(self, given: Sequence[int], into: int, count: int, dtype: str, op: str) -> None:
        plan.check_reduction(dtype, op)
        sign = plan.signature("reduce_scatter", count, dtype, op)
        codes = plan.DTYPES.index(dtype), plan.OPS.index(op)
        self._end(self._library.mc_reduce_scatter(self._address, sign, pointers(given), into, count, *codes))

    def all_gather(self, given: int, into: Sequence[int], nbytes: int) -> None:
        sign = plan.signature("all_gather", nbytes)
        self._end(self._library.mc_gather(self._address, sign, given, pointers(into), nbytes, -1))

    def gather(self, given: int, into: Sequence[int], nbytes: int, root: int) -> None:
        sign = plan.signature("gather", nbytes, root)
        self._end(self._library.mc_gather(self._address, sign, given, pointers(into), nbytes, root))

    def scatter(self, given: Sequence[int], into: int, nbytes: int, root: int) -> None:
        me, size = int(self._group.me), len(self._ranks)
        sent = [nbytes] * size if me == root else [0] * size
        taken = [nbytes if member == root else 0 for member in range(size)]
        outs = [into if member == root else 0 for member in range(size)]
        self._exchange(plan.signature("scatter", nbytes, root), given or [0] * size, sent, outs, taken)

    def broadcast(self, memory: int, nbytes: int, root: int) -> None:
        sign = plan.signature("broadcast", nbytes, root)
        self._end(self._library.mc_broadcast(self._address, sign, memory, nbytes, root))

    def all_to_all(
        self, given: Sequence[int], given_bytes: Sequence[int], into: Sequence[int], into_bytes: Sequence[int]
    ) -> None:
        self._exchange(plan.signature("all_to_all"), given, given_bytes, into, into_bytes)

    def _exchange(
        self, sign: int, given: Sequence[int], sent: Sequence[int], into: Sequence[int], taken: Sequence[int]
    ) -> None:
        froms, tos = pointers(given), pointers(into)
        self._end(self._library.mc_all_to_all(self._address, sign, froms, sizes(sent), tos, sizes(taken)))

    def _end(self, code: int) -> None:
        if code == native.CHANGED:
            raise RanksGone("the members of the group have changed")
        if code == native.MISMATCH:
            mine, theirs = self._ranks[self._group.me], self._ranks[self._group.culprit]
            raise CallsDiffer(
                f"rank {theirs} calls another collective than rank {mine}, or the same with other sizes or another type"
            )
        assert code == native.OK, code


def pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def sizes(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
