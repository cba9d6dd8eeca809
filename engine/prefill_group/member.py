"""One request on one node of its group, and what all ways to divide a prompt use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engine.core.kv_transfer import KvTransfer
from engine.core.model_steps import Inputs
from engine.core.worker import Worker
from engine.prefill_group.messages import Place
from engine.step.part import Part
from engine.step.request import Request
from engine.step.step import ScheduledRow
from net.channel.channel import Channel
from net.loop.tasks import spawn
from net.metrics.events import Metrics

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
"""Of what a chunk passes on. Messages are not split, and the next one to the same node waits for it."""


@dataclass(slots=True)
class Member:
    """One request here."""

    request: Request
    place: Place
    transfer: KvTransfer | None  # to the decode node
    known: dict[int, int] = field(default_factory=dict)  # on the first node: node -> tokens of its prefix
    prefix: int = 0  # tokens that all nodes know
    chunks: int = 0  # computed here
    pauses: int = 0  # steps that ended between two of its layers: for others, or cut by a policy
    compute_s: float = 0.0  # in steps here
    sent_bytes: int = 0  # to the other nodes of the group
    begun: float = 0.0  # monotonic seconds: when the nodes agreed
    sending: list[asyncio.Future[str | None]] = field(default_factory=list)  # what was sent: the error of each, or None

    @property
    def id(self) -> str:
        return self.request.request_id


@dataclass(slots=True)
class Common:
    """The parts of this node that members use."""

    channel: Channel
    worker: Worker
    metrics: Metrics
    members: dict[str, Member] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    inputs: Inputs = field(default_factory=dict)  # see Worker.follow_parts

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = spawn(work, "data for another node of a group")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def sent(self, member: Member, data: memoryview) -> None:
        member.sent_bytes += len(data)
        self.metrics.count("mooncake:stage_bytes", len(data))


Computed = Callable[[Request, str | None], None]
"""(request, error): a node that is not the last one has computed all of its part, and the nodes that need it have it,
or one of them will not compute its own."""


class Way(Protocol):
    """How the nodes of a group divide a prompt."""

    def part_of(self, place: Place) -> Part:
        """Raises RemoteError if this node cannot compute that part."""

    def agreed(self, member: Member, tokens: int) -> None:
        """On the first node: all nodes have the KV of the first `tokens` tokens, whole blocks. Begin."""

    def computed(self, member: Member, row: ScheduledRow, hidden: Tensor | None) -> bool:
        """A step has computed this row. Returns whether that was all of the part."""

    def detail(self, member: Member) -> dict[str, Any]:
        """What the timeline tells of this part, in addition to what all ways have."""

    def end(self, member: Member) -> None:
        """The request has ended here: what waits for it gets an error."""
