"""Collects the messages of a membership core, signs them with its node and adds rumours."""

from __future__ import annotations

from collections.abc import Iterable

from sched.membership.events import Effect, SendPacket
from sched.membership.member import Address, Member, Preset, Verdict
from sched.membership.packet import BODY_BYTES, MESSAGE_BYTES, Message, encode_message, encode_update
from sched.membership.roster import Rumours


class Outbox:
    """Collects the effects of one event. Call `address` first: messages carry the node's present incarnation."""

    def __init__(self, tag: int, preset: Preset) -> None:
        self.tag = tag
        self._preset = preset
        self._rumours = Rumours()
        self._effects: list[Effect] = []
        self._sender = ""
        self._incarnation = 0
        self._limit = 0

    def address(self, me: Member, num_members: int) -> None:
        """Set the sender, and the number of members that rumours must reach."""
        self._sender, self._incarnation = me.node_id, me.incarnation
        self._limit = self._preset.retransmits(num_members)

    def collect(self) -> list[Effect]:
        """The effects so far, in order; the outbox is empty afterwards."""
        effects, self._effects = self._effects, []
        return effects

    def effect(self, effect: Effect) -> None:
        self._effects.append(effect)

    @property
    def has_rumours(self) -> bool:
        return len(self._rumours) > 0

    def tell(self, update: Member | Verdict, keep_old: bool = False) -> None:
        """Spread `update` with the next messages. `keep_old`: keep older news about its node; else replace it."""
        self._rumours.add(update, keep_old)

    def gossip(self, address: Address) -> None:
        """Send rumours, if there are any."""
        if self._rumours:
            self.send(address, "gossip")

    def send(
        self,
        address: Address,
        kind: str,
        *,
        seq: int = 0,
        target: str = "",
        at: Address | None = None,
        reason: str = "",
        fingerprint: int = 0,
        updates: tuple[Member | Verdict, ...] = (),
    ) -> None:
        """Send one message. It carries rumours if it has neither updates nor a reason."""
        message = Message(kind, self._sender, self._incarnation, seq, target, at, 0, 1, reason, fingerprint, updates)
        rumours: list[bytes] = []
        if not updates and not reason:
            rumours = self._rumours.take(BODY_BYTES - MESSAGE_BYTES, self._limit)
        self._effects.append(SendPacket(address, encode_message(self.tag, message, rumours)))

    def send_pages(self, kind: str, address: Address, members: Iterable[Member]) -> None:
        """Send a member list in as few packets as possible."""
        pages = pages_of(members)
        for number, page in enumerate(pages):
            message = Message(kind, self._sender, self._incarnation, page=number, pages=len(pages), updates=page)
            self._effects.append(SendPacket(address, encode_message(self.tag, message)))


def pages_of(members: Iterable[Member]) -> list[tuple[Member, ...]]:
    """`members` split into pages of one packet each; at least one page."""
    pages: list[tuple[Member, ...]] = []
    page: list[Member] = []
    room = BODY_BYTES - MESSAGE_BYTES
    for member in members:
        size = len(encode_update(member)) + 1
        if page and size > room:
            pages.append(tuple(page))
            page, room = [], BODY_BYTES - MESSAGE_BYTES
        page.append(member)
        room -= size
    return [*pages, tuple(page)]
