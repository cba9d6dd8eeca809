"""What an acceptor does when nodes, clients and clocks misbehave: every token once, and no node left with work."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.core.held_weights import WRONG_WEIGHTS
from engine.front import flight_log, silence
from engine.front.acceptor import Acceptor, RequestLimits
from engine.front.attempts import Attempts
from engine.front.clocks import Clocks
from engine.front.declined import NO_NODE_RETRY_S, no_placement
from engine.front.flight_log import FlightLog
from engine.front.persistence import MAX_FUTILE_ATTEMPTS
from engine.front.placed import Placed
from engine.handoff import messages
from engine.handoff.messages import Moving
from engine.handoff.updates import Failed, HandedOver, Token, encode_all
from engine.observe.history import History
from engine.text.tokenizer import Tokenizer
from net.bodies import encode
from net.errors import PeerLost, RemoteError
from net.http.common.frontend import Overloaded, Unavailable
from net.http.openai.plan import Plan, Prompt
from net.http.openai.streams import run
from net.metrics.events import Metrics
from sched.placement.choice import Placement, Rejected
from sched.placement.measured_links import MeasuredLinks
from tests.engine.handoff.test_service import Wires

ESTIMATES = dict.fromkeys(("wait_s", "transfer_s", "prefill_s", "ttft_s", "handover_s", "step_s"), 0.1)
ROOT = root_key("toy", BlockGeometry(2, 1, 4, 4, "float32"))
PROMPT = [5, 6, 7]


class Nodes:
    """Places on p0 and d0, after each failure on the next pair; `doubted` nodes are suspects."""

    block_size = 16

    def __init__(self) -> None:
        self.clocks, self.links = Clocks(), MeasuredLinks()
        self.placed: list[list[int]] = []  # the tokens of each request that was placed
        self.fetches: list[bool] = []  # whether each may load its prefix
        self.weights: list[bytes] = []  # that compute each
        self.doubted: set[str] = set()
        self.places = 100  # requests that may wait
        self.learnt: list[tuple[str, float]] = []  # node and time to the first token
        self.missing = ""  # a role that no node has
        self.refused: list[str] = []  # nodes that could not be reached
        self.avoided: list[set[str]] = []  # of each request that was placed
        self.one_node: list[bool] = []
        self.beyond = False  # the node of the prompt decodes it: its KV exceeds the arena

    async def place(self, request: Any, avoid: Any = (), new: bool = True, one_node: bool = False) -> Placed:
        if self.missing:
            raise no_placement(Rejected(f"no {self.missing}", None, self.missing), [], 0, 0.0)
        number = len(self.placed)
        self.placed.append(list(request.token_ids))
        self.fetches.append(request.fetches)
        self.weights.append(request.weights)
        self.avoided.append(set(avoid))
        self.one_node.append(one_node)
        decode = f"p{number}" if self.beyond else f"d{number}"
        return Placed(Placement(f"p{number}", decode, "none", 0, ESTIMATES, beyond=self.beyond), [], 0, 0.0)

    def suspects(self, node: str) -> bool:
        return node in self.doubted

    def learn(self, prefill: str, estimates: Any, ttft_s: float) -> None:
        assert estimates is ESTIMATES
        self.learnt.append((prefill, ttft_s))

    def missing_role(self) -> str:
        return self.missing

    def unreachable(self, node: str) -> None:
        self.refused.append(node)

    def room(self) -> tuple[int, float]:
        return self.places, 2.0

    def decode_nodes(self, site_bound: bool = False) -> list[str]:
        return []

    async def release(self, placed: Placed) -> None:
        pass


class Peers(Wires):
    """Calls are answered, but those to `hanging` nodes."""

    def __init__(self) -> None:
        super().__init__("a")
        self.hanging: set[str] = set()
        self.called: list[tuple[str, str]] = []
        self.named: dict[int, str] = {}  # the request's name on the nodes, by attempt
        self.cut: set[str] = set()  # nodes that give no sign of life
        self.down: set[str] = set()
        self.serves: bytes | None = None  # the only weights of all nodes

    async def call(self, peer, kind, body, data=(), timeout_s=10.0):
        self.called.append((peer, kind))
        name = body["request"]["id"]
        self.named[int(name.rpartition(".")[2])] = name
        if peer in self.down:
            raise PeerLost(f"cannot reach {peer}: connection refused")
        if peer in self.hanging:
            await asyncio.sleep(3600)
        if self.serves is not None and body["request"].get("weights", "") != self.serves.hex():
            raise RemoteError("this node does not serve these weights", WRONG_WEIGHTS)
        return {"node": peer, "region": "kv", "block_ids": [0], "first_missing": 0, "epoch": ""}, memoryview(b"")

    def ask(self, peer, kind, body, data=()):
        answer = asyncio.get_running_loop().create_future()
        if peer not in self.cut:
            answer.set_result(None)
        return answer

    @property
    def aborted(self) -> list[tuple[str, str]]:
        return [(peer, body["ids"][0]) for peer, kind, body in self.posted if kind == messages.ABORT]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(describe(EMBEDDED_MODEL))


@pytest.fixture
def world(tokenizer: Tokenizer) -> SimpleNamespace:
    return made(tokenizer)


def made(tokenizer: Tokenizer, timeout_s: float = 60.0, role_wait_s: float = 5.0) -> SimpleNamespace:
    channel, nodes = Peers(), Nodes()
    limits = RequestLimits(1000, timeout_s, role_wait_s)
    metrics = Metrics("m", "a")
    log = FlightLog("a", metrics, nodes, History("a", 0.0))
    attempts = Attempts(channel, nodes, log)
    one = Acceptor("a", nodes, attempts, tokenizer, ROOT, limits, log)
    return SimpleNamespace(acceptor=one, attempts=attempts, channel=channel, nodes=nodes, metrics=metrics)


def ask(world: SimpleNamespace) -> Any:
    return world.acceptor.generate(list(PROMPT), {"max_tokens": 6, "temperature": 0.0}, "r", "standard", "")


async def tell(world: SimpleNamespace, attempt: int, index: int, token: int, finish: str | None = None) -> None:
    body = encode_all([(world.channel.named[attempt], Token(index, token, finish=finish))])
    await world.channel.handlers[messages.TOKENS](f"d{attempt}", body, memoryview(b""))


async def collect(stream: Any, into: list[int]) -> str | None:
    reason = None
    async for output in stream:
        into += output.token_ids
        reason = output.finish_reason
    return reason


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.001)


async def test_a_lost_node_is_a_pause_and_its_late_tokens_are_nobodys(world):
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    for index in range(2):
        await tell(world, 0, index, 10 + index)
    await until(lambda: len(tokens) == 2)
    world.channel.lost("d0")
    await until(lambda: len(world.channel.called) == 4)
    assert world.nodes.placed[1] == [*PROMPT, 10, 11], "the new nodes get what was already answered"
    assert {peer for peer, _ in world.channel.aborted} == {"p0", "d0"}, "an abort reaches every node of the attempt"
    await tell(world, 0, 2, 99)  # d0 lives after all
    for index in range(2, 6):
        await tell(world, 1, index, 10 + index, "length" if index == 5 else None)
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]
    assert world.nodes.learnt == [], "its times are of two decisions"


async def test_the_first_token_may_come_after_those_of_the_decode_node(world):
    """The prefill node sends the first token, the decode node the others, and nothing orders the two."""
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    for index in (1, 2, 0, 3):
        await tell(world, 0, index, 10 + index)
    await until(lambda: len(tokens) == 4)
    assert tokens == [10, 11, 12, 13] and len(world.nodes.placed) == 1
    await tell(world, 0, 5, 99)  # one is missing that no other node owes
    await until(lambda: len(world.nodes.placed) == 2)
    for index in (5, 4):
        await tell(world, 1, index, 10 + index, "length" if index == 5 else None)
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]


async def test_a_first_token_that_never_comes_ends_the_attempt(world):
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 1, 99)
    body = encode_all([(world.channel.named[0], HandedOver())])
    await world.channel.handlers[messages.TOKENS]("p0", body, memoryview(b""))
    await until(lambda: len(world.nodes.placed) == 2)
    for index in range(6):
        await tell(world, 1, index, 10 + index, "length" if index == 5 else None)
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]


async def test_early_tokens_of_an_attempt_are_not_those_of_the_next(world):
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 1, 99)
    world.channel.lost("p0")
    await until(lambda: len(world.nodes.placed) == 2)
    for index in range(6):
        await tell(world, 1, index, 10 + index, "length" if index == 5 else None)
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]


async def test_a_suspected_node_that_says_nothing_is_given_up_before_it_is_dead(world, monkeypatch):
    monkeypatch.setattr(silence, "SILENCE_S", 0.02)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    world.attempts.node_suspected("d0")  # and refutes
    await asyncio.sleep(0.05)
    assert len(world.nodes.placed) == 1
    world.nodes.doubted = {"d0"}
    world.attempts.node_suspected("d0")
    await until(lambda: len(world.nodes.placed) == 2)
    for index in range(1, 6):
        await tell(world, 1, index, 10 + index, "length" if index == 5 else None)
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]


async def test_a_node_that_gives_no_sign_of_life_is_suspected_and_given_up_before_its_second_of_silence(
    world, monkeypatch
):
    """Nobody else suspects it, and without a sign of life its stream does not wait for SILENCE_S."""
    monkeypatch.setattr(silence, "SILENCE_S", 3600.0)
    monkeypatch.setattr(silence, "REFUTATION_S", 0.02)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    await asyncio.sleep(0.5)
    assert world.nodes.refused == [] and len(world.nodes.placed) == 1, "it computes a long prompt, and answers"
    world.channel.cut = {"d0"}
    await until(lambda: world.nodes.refused == ["d0"])
    world.nodes.doubted = {"d0"}
    world.attempts.node_suspected("d0")  # as gossip does when it is told so
    await until(lambda: ("p1", messages.PREFILL) in world.channel.called)
    await tell(world, 1, 1, 11, "stop")
    assert await work == "stop" and tokens == [10, 11]


async def test_a_node_that_falls_silent_long_after_others_suspected_it_is_given_up(world, monkeypatch):
    """Gossip tells of the beginning of a suspicion only."""
    monkeypatch.setattr(silence, "SILENCE_S", 0.05)
    monkeypatch.setattr(silence, "REFUTATION_S", 0.02)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    world.nodes.doubted = {"d0"}
    world.attempts.node_suspected("d0")
    for step in range(12):  # it speaks for longer than anybody looks on after a suspicion
        await tell(world, 0, step, 10)
        await asyncio.sleep(0.04)
    assert len(world.nodes.placed) == 1
    world.channel.cut = {"d0"}
    await until(lambda: ("p1", messages.PREFILL) in world.channel.called)
    await tell(world, 1, 12, 11, "stop")
    assert await work == "stop" and tokens == [*[10] * 12, 11]


async def test_a_suspected_node_that_speaks_keeps_its_requests(world, monkeypatch):
    monkeypatch.setattr(silence, "SILENCE_S", 0.05)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    world.nodes.doubted = {"d0"}
    world.attempts.node_suspected("d0")
    await tell(world, 0, 0, 10)
    await asyncio.sleep(0.1)
    assert len(world.nodes.placed) == 1
    await tell(world, 0, 1, 11, "stop")
    assert await work == "stop" and tokens == [10, 11]


async def test_silence_begins_with_the_last_token_of_the_attempt(world, monkeypatch):
    """The stream has been silent for an hour when the suspicion comes, and it need not wait for another one. A stream
    without a token in its attempt has to."""
    monkeypatch.setattr(silence, "SILENCE_S", 3600.0)
    monkeypatch.setattr(silence, "REFUTATION_S", 0.02)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    await until(lambda: tokens)
    (flight,) = world.acceptor._attempts._flights.values()
    flight.begun -= 3601.0
    flight.last_token -= 3600.0
    world.nodes.doubted = {"d0"}
    world.attempts.node_suspected("d0")
    await until(lambda: ("p1", messages.PREFILL) in world.channel.called)
    world.nodes.doubted = {"d1"}
    world.attempts.node_suspected("d1")
    await asyncio.sleep(0.1)
    assert len(world.nodes.placed) == 2, "its prompt may be long"
    await tell(world, 1, 1, 11, "stop")
    assert await work == "stop" and tokens == [10, 11]


@pytest.mark.parametrize("kind", [messages.RESERVE, messages.PREFILL])
async def test_nobody_waits_for_the_answer_of_a_silent_node(world, monkeypatch, kind):
    monkeypatch.setattr(silence, "SILENCE_S", 0.02)
    silent = "d0" if kind == messages.RESERVE else "p0"
    world.channel.hanging = {silent}
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: (silent, kind) in world.channel.called)
    world.nodes.doubted = {silent}
    world.attempts.node_suspected(silent)
    await until(lambda: ("p1", messages.PREFILL) in world.channel.called)
    await tell(world, 1, 0, 10, "stop")
    assert await work == "stop" and tokens == [10]


async def test_a_client_that_leaves_while_a_node_is_asked_is_gone(world, monkeypatch):
    monkeypatch.setattr(silence, "SILENCE_S", 0.02)
    world.channel.hanging = {"d0"}
    work = asyncio.create_task(collect(ask(world), []))
    await until(lambda: world.channel.called)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert world.acceptor.open == 0 and {peer for peer, _ in world.channel.aborted} == {"p0", "d0"}


async def test_an_abort_travels_to_both_nodes_when_the_client_hangs_up(world):
    stream = ask(world)
    first = asyncio.create_task(anext(stream))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    assert (await first).token_ids == [10]
    await stream.aclose()
    name = world.channel.named[0]
    assert sorted(world.channel.aborted) == [("d0", name), ("p0", name)] and world.acceptor.open == 0


async def test_two_requests_with_one_id_are_two_requests(tokenizer):
    """A load balancer that sends a request again reuses its id, perhaps while the first one runs, or after the acceptor
    was restarted. Nodes remember the names of ended requests."""
    first, second, later = made(tokenizer), [], []
    work = asyncio.create_task(collect(ask(first), []))
    await until(lambda: len(first.channel.called) == 2)
    names = [first.channel.named[0]]
    again = asyncio.create_task(collect(ask(first), second))
    await until(lambda: len(first.channel.called) == 4)
    names.append(first.channel.named[0])
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert {name for _, name in first.channel.aborted} == {names[0]}
    await tell(first, 0, 0, 10, "stop")
    assert await again == "stop" and second == [10]
    restarted = made(tokenizer)
    work = asyncio.create_task(collect(ask(restarted), later))
    await until(lambda: len(restarted.channel.called) == 2)
    names.append(restarted.channel.named[0])
    await tell(restarted, 0, 0, 11, "stop")
    assert await work == "stop" and later == [11]
    assert len(set(names)) == 3


async def test_the_timeline_of_an_id_is_that_of_its_newest_request_and_is_kept_as_long(world, monkeypatch):
    monkeypatch.setattr(flight_log, "MAX_TIMELINES", 2)

    async def answered(request_id: str, count: int) -> None:
        called = len(world.channel.called)
        stream = world.acceptor.generate(list(PROMPT), {"max_tokens": 6}, request_id, "standard", "")
        work = asyncio.create_task(collect(stream, []))
        await until(lambda: len(world.channel.called) == called + 2)
        for index in range(count):
            await tell(world, 0, index, 10, "stop" if index == count - 1 else None)
        assert await work == "stop"

    await answered("r", 1)
    await answered("other", 1)
    await answered("r", 3)
    await answered("another", 1)
    assert world.acceptor.timeline("r")["summary"]["output_tokens"] == 3
    assert world.acceptor.timeline("other") is None


async def test_after_the_last_attempt_the_client_is_told(world):
    work = asyncio.create_task(collect(ask(world), []))
    for attempt in range(MAX_FUTILE_ATTEMPTS):
        await until(lambda: len(world.channel.called) == 2 * attempt + 2)  # noqa: B023 - awaited in this turn
        world.channel.lost(f"p{attempt}")
    with pytest.raises(Unavailable, match=f"{MAX_FUTILE_ATTEMPTS} attempts in a row brought no token, last: node p3"):
        await work


async def fail(world: SimpleNamespace, attempt: int, incomplete: bool) -> None:
    await until(lambda: len(world.channel.called) == 2 * attempt + 2)
    body = encode_all([(world.channel.named[attempt], Failed("its prefix arrived incomplete", incomplete=incomplete))])
    await world.channel.handlers[messages.TOKENS](f"p{attempt}", body, memoryview(b""))


async def test_after_an_incomplete_prefix_the_prompt_is_computed(world):
    got: list[int] = []
    work = asyncio.create_task(collect(ask(world), got))
    await fail(world, 0, incomplete=True)
    await fail(world, 1, incomplete=False)  # for another reason
    await until(lambda: len(world.channel.called) == 6)
    await tell(world, 2, 0, 10, finish="stop")
    assert await work == "stop" and got == [10]
    assert world.nodes.fetches == [True, False, False]


@pytest.mark.parametrize("settled", [True, False])
async def test_a_late_failure_of_a_settled_move_changes_nothing(world, settled):
    """The source of a move has no answer to its commit; the destination's first token settles the move."""
    tokens, hears = list[int](), world.channel.handlers
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    name = world.channel.named[0]
    await tell(world, 0, 0, 10)
    await hears[messages.MOVING]("d0", encode(Moving(name, "d1")), memoryview(b""))
    if settled:
        await hears[messages.TOKENS]("d1", encode_all([(name, Token(1, 11))]), memoryview(b""))
    failed = encode_all([(name, Failed("d1 did not say whether it took the request"))])
    await hears[messages.TOKENS]("d0", failed, memoryview(b""))
    if settled:
        await hears[messages.TOKENS]("d1", encode_all([(name, Token(2, 12, finish="stop"))]), memoryview(b""))
    else:
        await until(lambda: len(world.channel.called) == 4)
        assert ("d1", name) in world.channel.aborted
        await tell(world, 1, 1, 11)
        await tell(world, 1, 2, 12, "stop")
    assert await work == "stop" and tokens == [10, 11, 12]
    assert len(world.nodes.placed) == (1 if settled else 2)


async def test_a_failure_at_the_destination_of_a_move_counts(world):
    """It has taken the request, and failed before its first token."""
    tokens, hears = list[int](), world.channel.handlers
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    name = world.channel.named[0]
    await tell(world, 0, 0, 10)
    await hears[messages.MOVING]("d0", encode(Moving(name, "d1")), memoryview(b""))
    await hears[messages.TOKENS]("d1", encode_all([(name, Failed("a step failed"))]), memoryview(b""))
    await until(lambda: len(world.channel.called) == 4)
    await tell(world, 1, 1, 11, "stop")
    assert await work == "stop" and tokens == [10, 11]


async def test_the_last_attempt_computes_the_prompt_whatever_ended_the_others(world):
    work = asyncio.create_task(collect(ask(world), []))
    for attempt in range(MAX_FUTILE_ATTEMPTS):
        await fail(world, attempt, incomplete=False)
    with pytest.raises(Unavailable):
        await work
    assert world.nodes.fetches == [True] * (MAX_FUTILE_ATTEMPTS - 1) + [False]


@pytest.mark.parametrize("alone", [False, True])
async def test_after_two_failures_of_several_nodes_one_node_does_it(world, alone):
    """Not if one node has failed."""
    world.nodes.beyond = alone
    work = asyncio.create_task(collect(ask(world), []))
    for attempt in range(MAX_FUTILE_ATTEMPTS):
        last = (f"p{attempt}", messages.PREFILL)
        await until(lambda: world.channel.called[-1:] == [last])  # noqa: B023 - awaited in this turn
        body = encode_all([(world.channel.named[attempt], Failed("KV that other nodes write leaves 7 blocks"))])
        await world.channel.handlers[messages.TOKENS](f"p{attempt}", body, memoryview(b""))
    with pytest.raises(Unavailable, match="leaves 7 blocks"):
        await work
    assert world.nodes.one_node == [False, False, not alone, not alone]


@pytest.mark.parametrize("beyond", [True, False])
async def test_a_node_that_failed_beyond_memory_is_avoided(world, beyond):
    world.nodes.beyond = beyond
    work = asyncio.create_task(collect(ask(world), []))
    for attempt in range(2):
        await until(lambda: world.channel.called[-1:] == [(f"p{attempt}", messages.PREFILL)])  # noqa: B023 - as above
        body = encode_all([(world.channel.named[attempt], Failed("its room could not be found"))])
        await world.channel.handlers[messages.TOKENS](f"p{attempt}", body, memoryview(b""))
    await until(lambda: len(world.nodes.placed) == 3)
    assert world.nodes.avoided == ([set(), {"p0"}, {"p0", "p1"}] if beyond else [set()] * 3)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_a_begun_request_outlasts_a_node_that_refuses_and_a_role_that_is_missing(world):
    """More refusals than attempts may fail; then no node has the role; then one comes."""
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    await until(lambda: tokens == [10])
    world.channel.down = {f"d{number}" for number in range(1, 1000)}
    world.channel.lost("d0")
    await until(lambda: len(world.nodes.refused) > MAX_FUTILE_ATTEMPTS)
    world.nodes.missing = "decode"
    placed = len(world.nodes.placed)
    await asyncio.sleep(0.2)
    assert len(world.nodes.placed) <= placed + 1, "one was on its way"
    assert placed < 20, "tries are paced"
    world.nodes.missing, world.channel.down = "", set()
    await until(lambda: world.channel.called[-1][1] == messages.PREFILL)
    last = len(world.nodes.placed) - 1
    updates = [(name, Token(index, 10 + index, finish="length" if index == 5 else None))
               for name in world.channel.named.values() for index in range(1, 6)]  # fmt: skip
    assert world.nodes.placed[last] == [*PROMPT, 10]
    await world.channel.handlers[messages.TOKENS]("d", encode_all(updates), memoryview(b""))
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]
    events = [event["event"] for event in world.acceptor.timeline("r")["events"]]
    assert events.count("attempt_failed") == 1 and "waits" in events
    assert world.acceptor.open == 0


@pytest.mark.parametrize("how", ["missing", "refuses"])
async def test_a_new_request_waits_a_bounded_time_for_a_missing_role(tokenizer, how):
    world = made(tokenizer, role_wait_s=0.2)
    if how == "missing":
        world.nodes.missing = "decode"
    else:
        world.channel.down = {f"d{number}" for number in range(100)}
    with pytest.raises(Unavailable) as caught:
        await collect(ask(world), [])
    assert caught.value.retry_after_s == NO_NODE_RETRY_S and world.acceptor.open == 0
    told = world.acceptor.timeline("r")
    assert told["refused"]["retry_after_s"] == NO_NODE_RETRY_S
    assert [event["event"] for event in told["events"]][-2:] == ["rejected", "aborted"]


async def test_a_begun_request_that_waits_ends_at_its_deadline(tokenizer):
    world = made(tokenizer, timeout_s=0.3, role_wait_s=0.0)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    await until(lambda: tokens == [10])
    world.nodes.missing = "decode"
    world.channel.lost("d0")
    assert await work == "abort" and tokens == [10]


async def test_a_drain_ends_what_waits(world):
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    world.nodes.missing = "decode"
    world.channel.lost("d0")
    await until(lambda: any(event["event"] == "waits" for event in world.acceptor.timeline("r")["events"]))
    assert world.acceptor.open == 1, "drain waits for it"
    await world.acceptor.drain(0.05)
    with pytest.raises(Unavailable, match="shutting down"):
        await work


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("patient", [True, False])
async def test_a_drain_waits_for_what_is_being_placed_or_adopted(world, monkeypatch, again, patient):
    """A drain that has no more time ends it as soon as it begins, and no node keeps its work."""
    asked, go = asyncio.Event(), asyncio.Event()
    place, adopt = world.nodes.place, world.attempts.adopt

    async def late(*args: Any) -> Any:
        asked.set()
        await go.wait()
        return await (adopt if again else place)(*args)

    monkeypatch.setattr(*((world.attempts, "adopt") if again else (world.nodes, "place")), late)
    tokens: list[int] = []
    stream = world.acceptor.generate(list(PROMPT), {"max_tokens": 6}, "r", "standard", "", again=again)
    work = asyncio.create_task(collect(stream, tokens))
    await asked.wait()
    drain = asyncio.create_task(world.acceptor.drain(60.0 if patient else 0.01))
    if patient:
        await asyncio.sleep(0.1)
        assert not drain.done() and world.acceptor.open == 1
        go.set()
        await until(lambda: len(world.channel.called) == 2)
        await tell(world, 0, 0, 10, "stop")
        assert await work == "stop" and tokens == [10]
        await drain
    else:
        await drain
        go.set()
        with pytest.raises(Unavailable, match="shutting down"):
            await work
        assert len(world.channel.called) == len(world.channel.aborted)
    assert world.acceptor.open == 0


async def test_the_deadline_ends_the_answer_and_the_work(tokenizer):
    world = made(tokenizer, timeout_s=0.05)
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    assert await work == "abort" and tokens == [10]
    assert {peer for peer, _ in world.channel.aborted} == {"p0", "d0"}


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
async def test_a_step_of_the_wall_clock_changes_no_answer(world, monkeypatch, step_s):
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    for index in range(1, 6):
        await tell(world, 0, index, 10 + index, "length" if index == 5 else None)
    assert await work == "length" and tokens == [10, 11, 12, 13, 14, 15]


async def test_a_burst_keeps_those_that_came_first(world):
    """Beyond the places of the nodes' queues, a request is refused before it is placed; a first token frees a place."""
    world.nodes.places = 1
    first, second = ask(world), world.acceptor.generate(list(PROMPT), {"max_tokens": 6}, "s", "standard", "")
    got: list[int] = []
    task = asyncio.create_task(collect(first, got))
    await until(lambda: world.nodes.placed)
    with pytest.raises(Overloaded) as refused:
        await anext(second)
    assert refused.value.retry_after_s == 2.0 and len(world.nodes.placed) == 1
    assert "rejected" in [event["event"] for event in world.acceptor.timeline("s")["events"]]
    told = "mooncake:requests_rejected_total{"
    before = [line for line in world.metrics.text().decode().splitlines() if line.startswith(told)]
    with pytest.raises(Overloaded):
        world.acceptor.check_room(0)
    after = [line for line in world.metrics.text().decode().splitlines() if line.startswith(told)]
    assert [line.split()[-1] for line in before + after] == ["1.0", "2.0"], "also those without a timeline"
    await tell(world, 0, 0, 11)
    await until(lambda: got)
    world.acceptor.check_room(0)
    await tell(world, 0, 1, 12, "stop")
    assert await task == "stop"


def choices_of(world: SimpleNamespace, count: int) -> Any:
    """One request with so many choices, as the HTTP layer asks for them."""
    plan = Plan([Prompt(list(PROMPT), "")] * count, 1, [{"max_tokens": 6}] * count, "standard", "")

    def generate(
        prompt: Any, sampling: Any, *, request_id: str, service_class: str, cache_salt: str, **more: Any
    ) -> Any:
        return world.acceptor.generate(prompt, sampling, request_id, service_class, cache_salt, **more)

    return run(SimpleNamespace(generate=generate), plan, "r")


async def test_a_request_with_more_choices_than_places_is_served_whole(world, monkeypatch):
    """Each choice waits for its place at the gate, and for a node if all are full when it is placed."""
    world.nodes.places, call, place = 3, world.channel.call, world.nodes.place

    async def full_at_times(*args: Any) -> Placed:
        full_at_times.calls += 1
        if not full_at_times.calls % 2:
            raise no_placement(Rejected("queue full", 1.0), [], 0, 0.0)
        return await place(*args)

    async def answers(peer, kind, body, data=(), timeout_s=10.0):
        if kind == messages.PREFILL:
            token = encode_all([(body["request"]["id"], Token(0, 10, finish="stop"))])
            hear = world.channel.handlers[messages.TOKENS]
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, lambda: loop.create_task(hear("d", token, memoryview(b""))))
        return await call(peer, kind, body, data, timeout_s)

    full_at_times.calls = 0
    monkeypatch.setattr(world.nodes, "place", full_at_times)
    monkeypatch.setattr(world.channel, "call", answers)
    ended = [choice async for choice, output in choices_of(world, 10) if output.finish_reason == "stop"]
    assert sorted(ended) == list(range(10)) and world.acceptor.open == 0
    world.acceptor.check_room(2)


@pytest.mark.parametrize("where", ["gate", "nodes"])
async def test_a_request_of_which_no_choice_finds_room_is_refused_at_once(world, monkeypatch, where):
    tries, tokens = [], list[int]()
    if where == "gate":
        world.nodes.places = 1
        stranger = asyncio.create_task(collect(ask(world), tokens))
        await until(lambda: world.nodes.placed)

    async def full(*args: Any) -> Placed:
        tries.append(args)
        await asyncio.sleep(0.001)
        raise no_placement(Rejected("queue full", 1.0), [], 0, 0.0)

    monkeypatch.setattr(world.nodes, "place", full)
    with pytest.raises(Overloaded):
        [None async for _ in choices_of(world, 10)]
    assert len(tries) == (0 if where == "gate" else 10), "each choice asked once"
    if where == "gate":
        await tell(world, 0, 0, 10, "stop")
        assert await stranger == "stop"
    assert world.acceptor.open == 0


NEW = b"n" * 16


async def test_a_request_without_a_token_begins_with_the_new_weights(world):
    """Also if the nodes have switched before this acceptor: it waits until it has learnt of it."""
    world.channel.serves = NEW
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.nodes.placed) == 2)
    assert not work.done() and world.acceptor.open_by_weights() == {b"": 1}
    world.acceptor.renew(NEW)
    await until(lambda: ("p", messages.PREFILL) in {(peer[0], kind) for peer, kind in world.channel.called})
    assert world.nodes.weights[-1] == NEW and world.acceptor.open_by_weights() == {NEW: 1}
    await tell(world, len(world.nodes.placed) - 1, 0, 10, "stop")
    assert await work == "stop" and tokens == [10] and not world.acceptor.open_by_weights()


@pytest.mark.parametrize("kept", [True, False])
async def test_a_request_with_tokens_ends_with_its_weights_or_not_at_all(world, kept):
    tokens: list[int] = []
    work = asyncio.create_task(collect(ask(world), tokens))
    await until(lambda: len(world.channel.called) == 2)
    await tell(world, 0, 0, 10)
    await until(lambda: tokens)
    world.acceptor.renew(NEW)
    world.channel.serves = None if kept else NEW
    world.channel.lost("d0")
    if kept:
        await until(lambda: len(world.channel.called) == 4)
        await tell(world, 1, 1, 11, "stop")
        assert await work == "stop" and tokens == [10, 11]
    else:
        with pytest.raises(Unavailable, match="does not serve these weights"):
            await work
    assert set(world.nodes.weights) == {b""} and not world.acceptor.open_by_weights()


async def test_an_answer_that_nobody_kept_is_not_continued_with_other_weights(world):
    world.acceptor.renew(NEW)
    stream = world.acceptor.generate(list(PROMPT), {"max_tokens": 6}, "r", "standard", "", again=True)
    with pytest.raises(Unavailable, match="weights were replaced"):
        await collect(stream, [])
    assert world.nodes.placed == [] and not world.acceptor.open_by_weights()
