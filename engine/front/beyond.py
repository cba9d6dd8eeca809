"""Places requests whose KV exceeds the arenas of the cluster, on a node that takes them (--beyond-memory).

Such a node says so in what gossip tells of it. It computes the prompt and decodes it, so that the blocks beyond its
arena move only between its own memories. Before the acceptor places a request, each candidate says what it would cost
there, or why it does not take it; nothing has been computed then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from cache.block import BlockKey
from engine.beyond.messages import FORESEE, Foresee, Foreseen
from engine.front.declined import NEVER_RETRY_S, NO_NODE_RETRY_S, Declined, NotPlaced
from engine.front.placed import Placed
from engine.step.request import Request
from net.bodies import answered, encode
from net.channel.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.gossip.driver import Gossip
from sched.gossip.load_word import CLOSED
from sched.membership.member import Member, Status
from sched.placement.choice import Placement
from sched.placement.view import View

BEYOND_TOKENS = "beyond_tokens"
"""Entry of a member's info: longest prompt + output of such a request there."""

ANSWER_S = 5.0


class BeyondPlacing:
    """`longest`: prompt + output that this acceptor accepts."""

    def __init__(self, channel: Channel, gossip: Gossip, block_size: int, longest: int) -> None:
        self._channel, self._gossip, self._block_size, self._longest = channel, gossip, block_size, longest

    def concerns(self, request: Request, view: View) -> bool:
        """Whether no arena holds the request, and some node takes it all the same. An answer that may be as long as the
        context allows ends with the arena if its prompt fits there: few clients mean that length."""
        output = request.sampling.max_tokens - request.num_output_tokens
        if view.least_blocks * self._block_size >= request.num_tokens + output or request.scores_prompt:
            return False
        prefills, decodes = view.total_blocks[view.prefills], view.total_blocks[view.decodes]
        if not len(prefills) or not len(decodes) or not self._hosts():
            return False
        held = int(min(prefills.max(), decodes.max())) * self._block_size
        if request.num_tokens + output <= held:
            return False
        open_end = request.num_prompt_tokens + request.sampling.max_tokens >= self._longest
        return not (open_end and request.num_tokens < held)

    def _hosts(self) -> list[Member]:
        site = self._gossip.me.site
        members = [member for member in self._gossip.members if member.site == site]
        return [m for m in members if m.status is Status.ALIVE and _tokens(m) and not self._closed(m)]

    def _closed(self, member: Member) -> bool:
        record = self._gossip.record(member.node_id)
        return record is not None and bool(record.flags & CLOSED)

    async def place(
        self, request: Request, keys: Sequence[BlockKey], begun: float, avoid: Collection[str] = ()
    ) -> Placed:
        """The node with the earliest first token; one of `avoid` only if no other takes it. Raises NotPlaced with the
        arithmetic if none does."""
        hosts = self._hosts()
        output = request.sampling.max_tokens - request.num_output_tokens
        body = encode(Foresee(request.num_tokens, output, request.service_class))
        data = [b"".join(keys)]
        told = await asyncio.gather(*(self._ask(host.node_id, body, data) for host in hosts))
        answers = {host.node_id: answer for host, answer in zip(hosts, told, strict=True) if answer is not None}
        able = {node: answer for node, answer in answers.items() if not answer.refused}
        seconds = time.monotonic() - begun
        if not able:
            raise _not_placed(answers, len(hosts), seconds)
        node = min(able, key=lambda one: (one in avoid, able[one].wait_s + able[one].prompt_s, one))
        found = able[node]
        placement = Placement(
            prefill=node,
            decode=node,
            prefix_source="local" if found.known_tokens else "none",
            prefix_tokens=found.known_tokens,
            estimates={
                "wait_s": found.wait_s,
                "transfer_s": 0.0,
                "prefill_s": found.prompt_s,
                "ttft_s": found.wait_s + found.prompt_s,
                "handover_s": 0.0,
                "step_s": found.token_s,
                "cold_bytes": float(found.cold_bytes),
            },
            beyond=True,
        )
        return Placed(placement, (), len(hosts), seconds)

    async def _ask(self, node: str, body: dict[str, object], data: Sequence[bytes]) -> Foreseen | None:
        try:
            reply, _ = await self._channel.call(node, FORESEE, body, data, timeout_s=ANSWER_S)
            return answered(Foreseen, reply)
        except (RemoteError, PeerLost, PeerRefused, TimeoutError):  # it is lost, leaves, or still loads its model
            return None


def _tokens(member: Member) -> int:
    told = member.info.get(BEYOND_TOKENS)
    return told if type(told) is int and told > 0 else 0


def _not_placed(answers: dict[str, Foreseen], asked: int, seconds: float) -> NotPlaced:
    """Nobody takes it. A node that has not answered may take it later."""
    reason = "; ".join(answer.refused for answer in answers.values())
    if not reason:
        reason = "no node with --beyond-memory on has answered"
    retry_s = NEVER_RETRY_S if len(answers) == asked > 0 else NO_NODE_RETRY_S
    return NotPlaced(Declined({"reason": reason, "retry_after_s": retry_s}, (), None, (), asked, seconds))
