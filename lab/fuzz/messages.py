"""Messages between nodes about requests and pooled blocks, as a handler gets them from the control connection. JSON
must become the dataclass of its kind or a BodyError, and the same JSON when it is written again."""

from __future__ import annotations

from typing import Any

import orjson

from cache import messages as store
from cache.bulk_messages import Get, Got, Put, PutEnd
from cache.messages import Place
from cache.offer import BlockFacts, Contents, Offer
from cache.ssd_reads import SsdPrice
from engine.core.kv_ready import KvTarget
from engine.handoff import messages as handoff
from engine.handoff.updates import Failed, HandedOver, Landed, Refused, Report, Token, Update, decode_all, encode_all
from engine.prefill_group import messages as group
from engine.sampling.params import SamplingParams, TokenLogprobs
from engine.update import messages as weights
from engine.update.served import ServedWeights
from net.bodies import BodyError, Nothing, decode, encode
from net.gossip.load_words import Amount, Previous
from net.transfer.device.peers import IsDevice, Moved, MoveThere, StopMove
from net.transfer.path_finder import Offers
from sched.gossip.intents import Coming

EVENT = {"t": 1.5e9, "node": "p", "event": "kv_moved", "detail": {"bytes": 10, "seconds": 0.5}}
REPORT = Report(16, [EVENT])
UPDATES: tuple[Update, ...] = (
    Token(3, 77),
    Token(0, 5, TokenLogprobs(-0.5, [(5, -0.5), (7, float("-inf"))]), "stop", REPORT),
    Landed(REPORT),
    HandedOver(),
    Failed("a step failed", REPORT),
    Failed("node d was lost"),
    Failed("damaged", REPORT, incomplete=True),
    Refused("too slow", 3.0, {"retry_after_s": 3.0, "objective": "tbt"}, REPORT),
)

SAMPLING = SamplingParams(max_tokens=9, seed=-1, stop=("x", "y"), stop_token_ids=(3,), logit_bias={5: -1.5}, logprobs=2)
REQUEST = handoff.WireRequest("a/r#0", 3, SAMPLING, "standard", b"\x01" * 16, 0.25, fetches=False)
SERVED = ServedWeights(2, "ab" * 16, "step-40/", "default", "40")
CONTENTS = Contents([2**64 - 1, 5], [32, 7])
OFFER = Offer(True, "h", True, True, [True, False], CONTENTS, BlockFacts([0, 1], [0.5, 1.0], ["batch", ""]))
PLACE = Place("arena", 4096, "e")
STORE: tuple[Any, ...] = (
    store.Has(True, CONTENTS),
    store.Look([0, -1, -2], [0], SsdPrice(0.25, 0.5)),
    store.Pin(1, True),
    store.Pinned(PLACE, [4, -1], [9], ["ssd"], [77], True, [(0, 3)]),
    store.Reserve(1, OFFER),
    store.Reserved(PLACE, [4, -1], "the disk is full"),
    store.Commit(1, [9, 8], [32, 7]),
    store.Committed([0, -1]),
    store.Unpin(1, [1]),
    store.Read(True),
    store.BlocksRead([0, -1], [9], [77], ["dram"], True, [(0, 3)]),
    store.Write([32, 7], [9, 8], OFFER),
    store.Taken([0, -1], "the disk is full"),
    store.ListKeys(b"\x01" * 6, b"\x02" * 16),
    store.Listed(True),
    store.ReadOutsets(512),
    store.Outsets([5, 0]),
    Get(b"\x01" * 16, True),
    Got([9], [0, -2], [77], ["ssd"], True, [(0, 3)]),
    Put(b"\x01" * 32, [32, 7], OFFER),
    PutEnd([9, 8]),
    store.MakeDurable(0.5),
    store.MadeDurable([True, False], "no SSD"),
    store.Keep(True),
    store.KeptThere([0, -2], 1),
    store.Removed(2),
    store.StoreStats({"hits": 3}),
    store.PoolMembers([("n", "127.0.0.1", 7, 4096)], 4096, 2),
)
BODIES: tuple[Any, ...] = (
    handoff.Reserve(REQUEST, ["p"]),
    handoff.Prefill(REQUEST, handoff.Promise(3, 0.1, 0.2, 2), KvTarget("d", "kv", [1, 2], 0, "e")),
    handoff.Prefill(REQUEST, handoff.Promise(0, 0.0, 1.0, 0)),
    handoff.Prefill(
        REQUEST,
        handoff.Promise(0, 0.0, 1.0, 0),
        KvTarget("d", "kv", [1, 2], 0, "e"),
        group.Place(1, ["a", "b"], [0, 2, 3]),
    ),
    group.Place(0, ["a", "b"]),
    group.Known("a/r#0", 64),
    group.Hidden("a/r#0", 64, 128, 64),
    group.Begin("a/r#0", 64, [64, 32]),
    group.Layer("a/r#0", 2, 128, 64),
    group.Landed("a/r#0", 192),
    KvTarget("d", "kv", [1, 2], 0, "e", epochs=["e", "f"]),
    KvTarget("d", "kv", [1, 2], 0, "e"),
    handoff.Abort(["a/r#0"]),
    handoff.Fence("a/r#0"),
    handoff.Handover("a/r#0", 5),
    handoff.Pull("a/r#0", "kv", 30.0),
    handoff.Pulled(4096, 0.25, "tcp"),
    handoff.Adopt("r", "ab" * 16, SAMPLING),
    handoff.Adopted("a/r#0", [["a/r#0", 0, 5]]),
    handoff.Probe(0.5, ["d"]),
    handoff.Probed(
        handoff.LoadNow(b"\x00\x01", 1, 2, 0.1, 0.2, 0.3, 1.5e9, "boot"), handoff.Rates(1e9, {"d": 2e9}, 3e8), 32
    ),
    handoff.Intend("p", 0.5),
    handoff.Intended({"p": Coming(2, 0.5)}),
    handoff.ScoredPrompt("a/r#0", 3, 1),
    handoff.Borrow(5, 4096, "int8"),
    handoff.Borrowed("kv", [3, 1]),
    handoff.Return(5),
    handoff.Returned(True),
    Offers({"tcp": {}, "shm": {"refused": "no"}}, "e"),
    Nothing(),
    weights.Prepare("ab", 2, "step-40/", "default", 605.0),
    weights.Prepared("ab" * 16, 1 << 28, 0.5, 0.75),
    weights.Abandon("ab"),
    weights.Switch(SERVED),
    weights.Told(SERVED, {"": 1, "ab" * 16: 2}),
    weights.Release(["ab" * 16]),
    *STORE,
    Amount(1000),
    Previous(0),
    IsDevice("kv"),
    MoveThere(1, "write", "kv", "there", 30.0, "e"),
    Moved(10, "tcp"),
    StopMove(1),
)


def updates_corpus() -> list[bytes]:
    return [orjson.dumps(encode_all([("a/r#0", update)])) for update in UPDATES]


def read_updates(data: bytes) -> object:
    """Read a TOKENS message."""
    body = orjson.loads(data)
    if not isinstance(body, dict):  # net/channel/wire.py rejects all others
        raise BodyError("no object")
    found = decode_all(body)
    if decode_all(orjson.loads(orjson.dumps(encode_all(found)))) != found:
        raise AssertionError("another update was written than was read")
    return found


def bodies_corpus() -> list[bytes]:
    """Each body, preceded by the number of its kind."""
    return [bytes([kind]) + orjson.dumps(encode(body)) for kind, body in enumerate(BODIES)]


def read_body(data: bytes) -> object:
    kind = type(BODIES[data[0] % len(BODIES)]) if data else handoff.Abort
    found = decode(kind, orjson.loads(data[1:]))
    if decode(kind, orjson.loads(orjson.dumps(encode(found)))) != found:
        raise AssertionError("another body was written than was read")
    return found
