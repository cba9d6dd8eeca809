"""Registers the backends, and upstream's functions about members and failures.

`activate_ranks` and `deactivate_ranks` are called by every member, at the same place of its program; upstream's by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from connect.process_group.group import create, of
from connect.process_group.options import SETTINGS
from connect.process_group.work import MooncakeWork
from net.collectives.errors import RanksGone

BACKENDS = ("mooncake", "mooncake-cpu")


@dataclass(frozen=True)
class MembershipResult:
    """The answer of activate_ranks and deactivate_ranks."""

    status: str  # "Applied" or "Rejected"
    new_epoch: int
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


def register() -> None:
    """Idempotent."""
    for name in BACKENDS:
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def get_active_ranks(pg: dist.ProcessGroup | None = None) -> Tensor:
    """int32 [max_group_size]: 1 for members of the present epoch."""
    ranks = of(pg).ranks
    active = torch.zeros(ranks.slots, dtype=torch.int32)
    active[list(ranks.members)] = 1
    return active


def get_peer_state(pg: dist.ProcessGroup | None, ranks: Iterable[int]) -> list[bool]:
    """Whether each of these ranks is connected to this process, which is not gone."""
    group = of(pg).ranks
    linked = {group.rank, *group.linked()}
    return [rank in linked for rank in ranks]


def get_num_synced_ranks(pg: dist.ProcessGroup | None = None) -> int:
    """The ranks connected to this process, and itself."""
    return 1 + len(of(pg).ranks.linked())


def get_current_epoch(pg: dist.ProcessGroup | None = None) -> int:
    return of(pg).ranks.epoch


def activate_ranks(pg: dist.ProcessGroup | None, ranks: Iterable[int], timeout_s: float = 300.0) -> MembershipResult:
    """By all members: admit new processes, which call join_group."""
    group = of(pg).ranks
    try:
        group.admit(ranks, timeout_s)
    except (RanksGone, ValueError) as error:
        return MembershipResult("Rejected", group.epoch, reject_reason=str(error))
    return MembershipResult("Applied", group.epoch)


recover_ranks = activate_ranks


def deactivate_ranks(pg: dist.ProcessGroup | None, ranks: Iterable[int]) -> MembershipResult:
    """By all members that stay: go on without these ranks."""
    group = of(pg).ranks
    try:
        group.remove(ranks)
    except RanksGone as error:
        return MembershipResult("Rejected", group.epoch, reject_reason=str(error))
    return MembershipResult("Applied", group.epoch)


def join_group(pg: dist.ProcessGroup | None = None, timeout_s: float = 300.0) -> None:
    """By a process made with is_extension: blocks until the members have activated it. Raises RanksGone."""
    of(pg).ranks.join(timeout_s)


def sync_after_failure(pg: dist.ProcessGroup | None = None) -> str:
    """By all members that are left, after a call has failed: "Reconciled", "NoPending", or "Rejected" if the others
    have removed this rank."""
    try:
        return "Reconciled" if of(pg).ranks.recover() else "NoPending"
    except RanksGone:
        return "Rejected"


def get_local_success(work: MooncakeWork) -> bool:
    """Whether the call has ended well for this rank; others may have another answer."""
    return work.is_success()


def get_failed_ranks_hint(work: MooncakeWork) -> list[int]:
    """The ranks that this rank considers the cause."""
    error = work.exception()
    return list(error.ranks) if isinstance(error, RanksGone) else []


def set_collective_timeout_us(microseconds: int) -> None:
    """How late a rank may be in a call, for groups made later without a timeout of their own."""
    SETTINGS.collective_timeout_s = microseconds / 1e6


def set_host_ip(host: str) -> None:
    """The address under which other hosts reach this one, for groups made later."""
    SETTINGS.host_ip = host
