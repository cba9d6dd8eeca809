"""Replaces the weights of a cluster in two phases, from the node that a client asked.

1. Every node that computes prepares: it reads all tensors, checks them and converts them next to its old weights. If
   one cannot, or if two have read different contents, all forget what they prepared, and nothing has changed.
2. All nodes switch. Requests without a token begin with the new weights; the others end with those they began with.

A node that misses the switch learns of it from the load records (engine/update/member.py). Afterwards the coordinator
watches until no client's request needs older weights, and lets them be dropped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from engine.update.member import WeightsMember
from engine.update.messages import (
    ABANDON,
    PREPARE,
    RELEASE,
    SWITCH,
    TELL,
    Abandon,
    Prepare,
    Prepared,
    Release,
    Switch,
    Told,
)
from engine.update.served import ServedWeights
from net.bodies import Nothing, answered, encode
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.http.common.frontend import Refused, Unavailable
from net.loop.tasks import awaited, spawn
from sched.membership.member import Member

log = logging.getLogger("mooncake.weights")

SWITCH_TIMEOUT_S = 5.0
RELEASE_POLL_S = 0.5
COMPUTES = frozenset({"prefill", "decode"})
NO_ANSWER = (PeerLost, PeerRefused, RemoteError, TimeoutError)

Json = dict[str, Any]
Found = TypeVar("Found")


class WeightUpdates:
    """`members()`: all nodes of the cluster that are not known to be dead."""

    def __init__(self, channel: Channel, member: WeightsMember, members: Callable[[], Sequence[Member]]) -> None:
        self._channel, self._member, self._members = channel, member, members
        self._running: asyncio.Task[Json] | None = None
        self._releasing: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether this node coordinates a replacement now."""
        return self._running is not None

    async def update(self, prefix: str, version: str, tenant: str, timeout_s: float) -> Json:
        """The figures of a replacement. It goes on when the caller is cancelled. Raises ValueError for tensors that are
        not the model's, Refused if the cluster does not replace weights (now), Unavailable if a node failed; then no
        node has switched."""
        if self._running is not None:
            raise Refused("this node already replaces the cluster's weights")
        self._running = awaited(self._update(ServedWeights(0, "", prefix, tenant, version), timeout_s))
        self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)

    def _ended(self, task: asyncio.Task[Json]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:  # perhaps no client waits any more
            log.info("the weights were not replaced: %s", error)

    async def _update(self, wanted: ServedWeights, timeout_s: float) -> Json:
        begun, generation = time.monotonic(), self._member.served.generation + 1
        nodes = [member.node_id for member in self._members() if COMPUTES & set(member.roles)]
        if not nodes:
            raise Refused("no node of this cluster computes with weights of its own")
        name = secrets.token_hex(8)
        try:
            prepared = await self._prepare(name, nodes, generation, wanted, timeout_s)
            keys = {answer.key for answer in prepared.values()}
            if len(keys) > 1:
                raise Refused("the tensors changed while the nodes read them: their contents differ")
        except BaseException:
            self._tell(nodes, ABANDON, Abandon(name))
            raise
        ready = time.monotonic()
        served = ServedWeights(generation, keys.pop(), wanted.prefix, wanted.tenant, wanted.version)
        late = await self._switch(served)
        switched = time.monotonic()
        self._watch_old()
        figures = {
            node: {"bytes": one.nbytes, "read_s": one.read_s, "prepare_s": one.seconds}
            for node, one in prepared.items()
        }
        return {
            "version": served.version,
            "generation": generation,
            "key": served.key,
            "prepare_s": ready - begun,
            "switch_s": switched - ready,
            "nodes": figures,
            "late": late,
        }

    async def _prepare(
        self, name: str, nodes: Sequence[str], generation: int, wanted: ServedWeights, timeout_s: float
    ) -> dict[str, Prepared]:
        question = Prepare(name, generation, wanted.prefix, wanted.tenant, timeout_s + SWITCH_TIMEOUT_S)
        tasks = {awaited(self._call(Prepared, node, PREPARE, question, timeout_s)): node for node in nodes}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
        failed = {tasks[task]: error for task in done if (error := task.exception()) is not None}
        if failed:
            raise _answer(failed)
        return {tasks[task]: task.result() for task in done}

    async def _switch(self, served: ServedWeights) -> dict[str, str]:
        """Tell all nodes; returns why some could not be told. They follow."""
        nodes = [member.node_id for member in self._members()]
        calls = (self._call(Nothing, node, SWITCH, Switch(served), SWITCH_TIMEOUT_S) for node in nodes)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        late = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, NO_ANSWER):
                late[node] = str(answer) or type(answer).__name__
                log.warning("%s did not answer that the weights are replaced; it will follow: %s", node, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return late

    def _watch_old(self) -> None:
        if self._releasing is not None:
            self._releasing.cancel()
        self._releasing = spawn(self._release_unused(), "releasing old weights")

    async def _release_unused(self) -> None:
        """Until no client's request uses replaced weights, or others were replaced from elsewhere."""
        mine = self._member.served
        while self._member.served == mine:
            nodes = [member.node_id for member in self._members()]
            calls = (self._call(Told, node, TELL, Nothing(), SWITCH_TIMEOUT_S) for node in nodes)
            told = await asyncio.gather(*calls, return_exceptions=True)
            if all(isinstance(one, Told) for one in told):
                used = {key for one in told if isinstance(one, Told) for key, count in one.open.items() if count}
                computing = [member.node_id for member in self._members() if COMPUTES & set(member.roles)]
                self._tell(computing, RELEASE, Release(sorted(used)))
                if used <= {mine.key}:
                    return
            await asyncio.sleep(RELEASE_POLL_S)

    async def _call(self, kind: type[Found], node: str, message: str, body: Any, timeout_s: float) -> Found:
        answer, _ = await self._channel.call(node, message, encode(body), timeout_s=timeout_s)
        return answered(kind, answer)

    def _tell(self, nodes: Iterable[str], message: str, body: Any) -> None:
        for node in nodes:
            self._channel.post(node, message, encode(body))

    async def close(self) -> None:
        tasks = [task for task in (self._running, self._releasing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(failed: dict[str, BaseException]) -> Exception:
    """What the client is told about nodes that could not prepare."""
    reasons = {node: str(error) or type(error).__name__ for node, error in failed.items()}
    codes = {error.code for error in failed.values() if isinstance(error, RemoteError)}
    if "tensors" in codes:  # of one cluster: all nodes miss the same
        return ValueError(next(str(e) for e in failed.values() if isinstance(e, RemoteError) and e.code == "tensors"))
    text = "; ".join(f"{node}: {reason}" for node, reason in sorted(reasons.items())) + ". No node has switched"
    if codes & {"busy", "unsupported"}:
        return Refused(text)
    unexpected = next((error for error in failed.values() if not isinstance(error, NO_ANSWER)), None)
    return unexpected if isinstance(unexpected, Exception) else Unavailable(text, retry_after_s=1.0)
