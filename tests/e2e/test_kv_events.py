"""A subscriber that knows only ZeroMQ, MessagePack and vLLM's form rebuilds the set of blocks of a node's arena."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled, wait_until

SEED = 20261124
BLOCKS = 64
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # of the tiny model: layers, K and V, heads, tokens, head size, float32


class Indexer:
    """The set of blocks, from a SUB socket and the replay socket."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay: str) -> None:
        self.held: set[int] = set()
        self.numbers: list[int] = []
        self.kinds: set[str] = set()
        self.sub, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.sub.connect(endpoint)
        self.replay.connect(replay)

    def ask_again(self, first: int) -> list[tuple[int, bytes]]:
        """(number, payload) of the batches from `first` on."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.replay.poll(10_000), "no answer"
            *_, topic, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return found
            assert topic == b"kv"
            found.append((int.from_bytes(number, "big"), payload))

    def apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        unix_s, events, rank = msgspec.msgpack.decode(payload)
        assert unix_s > 1.7e9 and rank == 0
        for event in events:
            self.kinds.add(event["type"])
            match event["type"]:
                case "BlockStored":
                    assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                    parent = event["parent_block_hash"]
                    assert parent is None or parent in self.held
                    self.held |= set(event["block_hashes"])
                case "BlockRemoved":
                    self.held -= set(event["block_hashes"])
                case "AllBlocksCleared":
                    self.held.clear()

    def follow(self) -> None:
        """Apply what has arrived."""
        while self.sub.poll(0):
            _, number, payload = self.sub.recv_multipart()
            if int.from_bytes(number, "big") == len(self.numbers):
                self.apply(len(self.numbers), payload)


@contextmanager
def indexer(endpoint: str, replay: str) -> Iterator[Indexer]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield Indexer(context, endpoint, replay)
    finally:
        context.destroy(linger=0)


def test_a_subscriber_rebuilds_the_blocks_of_the_arena(start: Start, tiny_model: list[str], tmp_path: Path) -> None:
    config = {"enable_kv_cache_events": True, "topic": "kv"}
    config |= {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": "tcp://127.0.0.1:*"}
    rng = random.Random(SEED)
    stems = [[rng.randrange(1000, 40_000) for _ in range(160)] for _ in range(3)]
    flags = [*tiny_model, "--kv-cache-bytes", str(BLOCKS * BLOCK_BYTES), "--kv-events-config", json.dumps(config)]
    with start("mixed=1", *flags, "--dram-bytes", "0", "--max-model-len", "512") as cluster:
        url = cluster.nodes[0].url
        told: Any = rest.get(f"{url}/debug/state")["kv_events"]
        assert told["endpoint"] == config["endpoint"] and not told["replay_endpoint"].endswith("*")

        def named() -> int:
            count: int = settled(cluster)["mixed-0"]["engine"]["blocks"]["named"]
            return count

        with indexer(told["endpoint"], told["replay_endpoint"]) as one:

            def current() -> bool:
                one.follow()
                return len(one.numbers) == rest.get(f"{url}/debug/state")["kv_events"]["batches"]

            complete(url, stems[0], 4)
            for number, payload in one.ask_again(0):  # published before the subscription may have reached the node
                one.apply(number, payload)
            assert len(one.held) == named() == 10
            for turn in range(6):
                complete(url, stems[turn % 3] + [rng.randrange(1000, 40_000) for _ in range(96)], 20, ignore_eos=True)
            wait_until(current, "every batch has arrived")
            assert len(one.held) == named()
            assert rest.get(f"{url}/debug/state")["engine"]["blocks"]["evictions"] > 0
            assert one.numbers == list(range(len(one.numbers)))

            # one that comes later, or lost some, asks for what it missed
            with indexer(told["endpoint"], told["replay_endpoint"]) as late:
                missed = late.ask_again(5)
                assert [number for number, _ in missed] == one.numbers[5:]
                for number, payload in late.ask_again(0):
                    late.apply(number, payload)
                assert late.held == one.held

            rest.post(f"{url}/reset_prefix_cache", {})
            wait_until(current, "every batch has arrived")
            assert not one.held and one.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
