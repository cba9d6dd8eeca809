"""Messages of the store that are not as agreed: a home refuses them and holds nothing, and an asker goes on without the
home that sent one."""

import orjson
import pytest

from cache import messages
from cache.homes.rendezvous import equal_members, homes
from net.errors import RemoteError
from tests.cache.pooled import SLOT, cluster_of, get, key_of, of_home, put, quiet

KEYS = b"".join(key_of(i) for i in range(2))
UINT32_END = 1 << 32


def offer(**fields):
    return {"lease": 1, "offer": fields}


def take(**fields):
    return {"keys": KEYS.hex(), "slot_bytes": SLOT, "region": "kv", "offsets": [0, SLOT], "mark": [0, 1]} | fields


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (messages.HAS, {"leading": 1}),
        (messages.HAS, {"contents": {"checksums": [1], "lengths": [1]}}),
        (messages.PIN, {}),
        (messages.PIN, {"lease": "1"}),
        (messages.PIN, {"lease": 1, "leading": None}),
        (messages.PIN, {"lease": 1, "more": True}),
        (messages.READ, {"leading": []}),
        (messages.RESERVE, {"lease": 1.5}),
        (messages.RESERVE, {"lease": [1]}),
        (messages.RESERVE, offer(owner=5)),
        (messages.RESERVE, offer(divert="yes")),
        (messages.RESERVE, offer(kept=[True])),
        (messages.RESERVE, offer(kept=[1, 1])),
        (messages.RESERVE, offer(contents=[[1, 1], [1, 1]])),
        (messages.RESERVE, offer(contents={"checksums": [1], "lengths": [1]})),
        (messages.RESERVE, offer(contents={"checksums": [1, 2], "lengths": [1]})),
        (messages.RESERVE, offer(contents={"checksums": [1, -2], "lengths": [1, 1]}, repair=True)),
        (messages.RESERVE, offer(contents={"checksums": [1, 2], "lengths": [1, UINT32_END]}, repair=True)),
        (messages.RESERVE, offer(facts={"positions": [1] * 3, "costs_s": [1] * 3, "service_classes": [""] * 3})),
        (messages.RESERVE, offer(facts={"positions": [1], "costs_s": ["1"], "service_classes": [""]})),
        (messages.WRITE, {}),
        (messages.WRITE, {"lengths": [1, 1], "checksums": [1]}),
        (messages.WRITE, {"lengths": [1, 0], "checksums": [1, 1]}),
        (messages.WRITE, {"lengths": [2, -1], "checksums": [1, 1]}),
        (messages.WRITE, {"lengths": [1, 1], "checksums": [1, "1"]}),
        (messages.WRITE, {"lengths": [1, 1], "checksums": [1, 1], "offer": {"kept": [True]}}),
        (messages.TAKE, {}),
        (messages.TAKE, take(keys=KEYS.hex()[:-2])),
        (messages.TAKE, take(offsets=[0])),
        (messages.TAKE, take(offsets=[0, -1])),
        (messages.TAKE, take(lengths=[1])),
        (messages.TAKE, take(lengths=[1, 0])),
        (messages.TAKE, take(mark=[1])),
        (messages.TAKE, take(offer={"kept": [True]})),
        (messages.COMMIT, {"lease": 9}),
        (messages.UNPIN, {"lease": None}),
        (messages.REMOVE, {"keys": []}),
        (messages.FLUSH, {"now": True}),
        (messages.STATS, {"of": "b"}),
        (messages.LIST, {}),
        (messages.LIST, {"prefix": 5}),
        (messages.LIST, {"prefix": "0g"}),
        (messages.OUTSETS, {"nbytes": 0}),
        (messages.OUTSETS, {"nbytes": 1 << 20}),
    ],
    ids=lambda part: part if isinstance(part, str) else orjson.dumps(part).decode()[:70],
)
async def test_a_question_that_is_not_as_agreed_is_refused_and_holds_nothing(kind, body):
    async with cluster_of("a", "b") as cluster:
        b = cluster.stores["b"]
        with pytest.raises(RemoteError) as caught:
            await cluster.hub.channels["a"].call("b", kind, body, [KEYS, b"xy"] if kind == messages.WRITE else [KEYS])
        assert caught.value.code == "bad_request"
        dram = b.local.stats()["dram"]
        assert not (dram["held"] or dram["reserved"] or dram["blocks"] or b.stats()["share"]["leases"])


async def test_a_lease_outlives_a_commit_of_another_form():
    async with cluster_of("a", "b") as cluster:
        call, b = cluster.hub.channels["a"].call, cluster.stores["b"]
        await call("b", messages.RESERVE, {"lease": 1}, [KEYS])
        for checksums in (["1", "2"], None, [1, -1]):
            with pytest.raises(RemoteError) as caught:
                await call("b", messages.COMMIT, {"lease": 1, "checksums": checksums})
            assert caught.value.code == "bad_request"
        assert b.local.stats()["dram"]["reserved"] == 2
        assert (await call("b", messages.COMMIT, {"lease": 1, "checksums": [1, 2]}))[0] == {"answers": [0, 0]}


async def test_damaged_positions_that_a_lease_does_not_have_end_it_all_the_same():
    async with cluster_of("a", "b") as cluster:
        call, b = cluster.hub.channels["a"].call, cluster.stores["b"]
        (number,) = of_home(cluster, "b", 1)
        await put(b, [number])
        for bad in ([1], [-1]):
            await call("b", messages.PIN, {"lease": 1}, [key_of(number)])
            with pytest.raises(RemoteError) as caught:
                await call("b", messages.UNPIN, {"lease": 1, "bad": bad})
            assert caught.value.code == "bad_request"
            assert b.local.stats()["dram"]["held"] == b.stats()["share"]["leases"] == 0


def lying(cluster, name, kind, change):
    """What node `name` answers to `kind` passes through `change`."""
    handlers = cluster.hub.channels[name].handlers
    told = handlers[kind]

    async def handle(peer, body, data):
        answer = await told(peer, body, data)
        return (answer[0] | change, answer[1]) if isinstance(answer, tuple) else answer | change

    handlers[kind] = handle


@pytest.mark.parametrize(
    "change",
    [
        {"slots": None},
        {"slots": [0] * 9},
        {"checksums": []},
        {"checksums": ["1", "2"]},
        {"tiers": []},
        {"lengths": [SLOT] * 9},
        {"hot": [[7, 2]]},
        {"hot": [[0]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [messages.PIN, messages.READ])
async def test_an_answer_that_is_not_as_agreed_is_that_of_a_home_that_failed(kind, change):
    options = {"message_block_bytes": SLOT} if kind == messages.READ else {}
    async with cluster_of("a", "b", "c", replicas=2, **options) as cluster:
        a, members = cluster.stores["a"], equal_members("abc")
        numbers = [i for i in of_home(cluster, "b", 20) if homes(key_of(i), members, 2)[1] == "c"][:2]
        assert await put(a, numbers) == 2
        lying(cluster, "b", kind, change)
        cluster.hub.calls.clear()
        found = await get(a, numbers)
        assert ("a", "b", kind) in cluster.hub.calls
        assert (found.blocks, found.sources) == (2, {"c": 2})
        await quiet(cluster.stores["b"])


@pytest.mark.parametrize(
    "change", [{"have": [0]}, {"have": [0] * 9}, {"ssd": []}, {"on_ssd": [9]}, {"price": [1]}], ids=str
)
async def test_a_look_that_is_not_as_agreed_is_that_of_a_home_that_failed(change):
    async with cluster_of("a", "b") as cluster:
        a = cluster.stores["a"]
        numbers = of_home(cluster, "b", 3)
        assert await put(a, numbers) == 3
        lying(cluster, "b", messages.HAS, change)
        assert await a.exists_many([key_of(i) for i in numbers]) == [False] * 3


@pytest.mark.parametrize(
    "change", [{"slots": [1, 2, 3]}, {"slots": ["1"]}, {"place": {"region": 5}}, {"trouble": 5}], ids=str
)
async def test_a_put_goes_on_without_a_home_whose_answer_is_not_as_agreed(change):
    async with cluster_of("a", "b") as cluster:
        a, b = cluster.stores["a"], cluster.stores["b"]
        (number,) = of_home(cluster, "b", 1)
        lying(cluster, "b", messages.RESERVE, change)
        assert await put(a, [number]) == 1
        assert a.local.contains(key_of(number)) == "dram"
        await quiet(b)
        assert b.local.stats()["dram"]["reserved"] == 0
