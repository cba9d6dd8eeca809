"""Where a request goes whose KV exceeds the arenas: which nodes are asked, and what their answers lead to."""

from __future__ import annotations

from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from engine.beyond.messages import Foreseen
from engine.front.beyond import BEYOND_TOKENS, BeyondPlacing
from engine.front.declined import NEVER_RETRY_S, NO_NODE_RETRY_S, NotPlaced
from engine.front.known import with_unasked
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import encode
from net.errors import RemoteError
from sched.gossip.load_word import DRAINING, READING
from sched.gossip.record import NodeRecord
from sched.membership.member import Member
from sched.placement.measured_links import MeasuredLinks
from sched.placement.view import Candidate, View

ROOT = root_key("toy", BlockGeometry(1, 1, 2, 16, "float32"))


class Cluster:
    """A channel and a gossip: what each node answers, an answer or an error, and its flags."""

    def __init__(self, **answers: Foreseen | Exception) -> None:
        self.answers, self.flags = answers, dict.fromkeys(answers, 0)
        self.asked: list[str] = []

    async def call(self, node: str, kind: str, body: Any, data: Any, timeout_s: float) -> Any:
        self.asked.append(node)
        answer = self.answers[node]
        if isinstance(answer, Exception):
            raise answer
        return encode(answer), memoryview(b"")

    me = Member("me", ("h", 1))

    @property
    def members(self) -> list[Member]:
        return [Member(name, ("h", 1), roles=("decode",), info={BEYOND_TOKENS: 9999}) for name in self.answers]

    def record(self, node: str) -> NodeRecord | None:
        return NodeRecord(flags=self.flags[node])

    @property
    def placing(self) -> BeyondPlacing:
        return BeyondPlacing(self, self, 16, 4000)  # type: ignore[arg-type]


def request(tokens: int = 2000) -> Request:
    return Request("r", [1] * tokens, tokens, SamplingParams(max_tokens=10), 0.0, ROOT)


def view(*blocks: int) -> View:
    nodes = [
        Candidate(node_id=f"n{i}", roles=("prefill", "decode"), prefill=(0.0, 1e-3, 0.0), total_blocks=count)
        for i, count in enumerate(blocks)
    ]
    return View(0.0, nodes, MeasuredLinks(), 9)


def able(seconds: float) -> Foreseen:
    return Foreseen("", prompt_s=seconds)


async def test_the_earliest_first_token_but_not_where_an_attempt_failed():
    cluster = Cluster(a=able(1.0), b=able(2.0))
    assert (await cluster.placing.place(request(), (), 0.0)).placement.prefill == "a"
    placed = await cluster.placing.place(request(), (), 0.0, {"a"})
    assert placed.placement.prefill == "b" and placed.placement.beyond
    assert (await cluster.placing.place(request(), (), 0.0, {"a", "b"})).placement.prefill == "a"


async def test_a_node_that_leaves_or_reads_weights_is_not_asked():
    cluster = Cluster(a=able(1.0), b=able(2.0))
    cluster.flags["a"] = DRAINING
    assert (await cluster.placing.place(request(), (), 0.0)).placement.prefill == "b" and cluster.asked == ["b"]
    assert cluster.placing.concerns(request(), view(100))
    cluster.flags["b"] = READING
    assert not cluster.placing.concerns(request(), view(100))


@pytest.mark.parametrize(
    ("answers", "retry_s"),
    [
        ({"a": Foreseen("no room"), "b": Foreseen("too slow")}, NEVER_RETRY_S),
        ({"a": Foreseen("no room"), "b": RemoteError("it leaves", "draining")}, NO_NODE_RETRY_S),
        ({"a": TimeoutError()}, NO_NODE_RETRY_S),
    ],
)
async def test_only_if_all_have_answered_does_a_retry_not_help(answers, retry_s):
    with pytest.raises(NotPlaced) as error:
        await Cluster(**answers).placing.place(request(), (), 0.0)
    assert error.value.declined.refused["retry_after_s"] == retry_s
    for answer in answers.values():
        assert not isinstance(answer, Foreseen) or answer.refused in str(error.value)


def test_an_arena_that_nobody_was_asked_about_may_hold_it():
    """The policy asked n0, whose arena is small; gossip knows n1, with a large one."""
    placing, known = Cluster(a=able(1.0)).placing, view(100, 900)
    answered = known.only([0])
    assert placing.concerns(request(), answered)
    everyone = with_unasked(answered, known)
    assert everyone.ids == ["n0", "n1"] and not placing.concerns(request(), everyone)
    fresh = view(100)  # it has told gossip nothing yet
    assert placing.concerns(request(), with_unasked(fresh, known.only([])))
    assert not placing.concerns(request(1000), with_unasked(fresh, known.only([]))), "1,600 tokens fit"
