"""Ranks on other hosts: real processes that join over TCP, the tokens of one process, and what follows from a cut."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.flags import UsageError
from engine.experts import joining
from engine.experts.placing.moves import Move
from engine.experts.placing.placement import imbalance
from lab.faults.networks.tcp_way import Way
from net.channel.wire import MAGIC, PREFIX, SEALED_MAGIC, VERSION
from net.transfer.rdma import verbs
from tests.engine.experts.test_ranks import OneMove, Ranks, all_logits, expected, kill, ranks, saved, wait_for
from tests.engine.model.test_model import TOLERANCE
from tests.engine.tiny_families import save

__all__ = ["saved"]

MOONCAKE = Path(__file__).resolve().parents[3] / "mooncake.py"


@contextmanager
def joins(port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is a rank of the node at this port of this host."""
    command = [sys.executable, str(MOONCAKE), "expert-rank", "--join", f"127.0.0.1:{port}", "--num-threads", "1"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def port_of(made: Ranks) -> int:
    assert made.processes.remote is not None
    return made.processes.remote.address[1]


def all_here(made: Ranks) -> None:
    wait_for(lambda: made.processes.awaited() is None)
    made.until(lambda state: not state["masked"])


def same(made: Ranks, path: Path) -> None:
    for logits, wanted in zip(all_logits(made.logits), expected(path), strict=True):
        torch.testing.assert_close(logits, wanted, **TOLERANCE)


@pytest.mark.parametrize("checkpoint", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_the_same_as_one_process_and_back_after_a_kill(saved, checkpoint):
    """Rank 1 is here, rank 2 elsewhere: with the checkpoint there, or weights from the node."""
    path = saved("mixtral")
    flags = ("--model", str(path)) if checkpoint else ()
    with ranks(path, expert_parallel_size=3, expert_remote_ranks=1, expert_replicas=2) as made:
        waits = made.processes.awaited()
        told = f"ranks 2 of the experts: mooncake.py expert-rank --join 127.0.0.1:{port_of(made)}"
        assert waits is not None and told in waits
        same(made, path)  # ranks 0 and 1 have a copy of each expert
        with joins(port_of(made), *flags) as process:
            all_here(made)
            before = made.group.pairs[2]
            same(made, path)
            assert made.group.pairs[2] > before and made.group.num_masked == 0
            process.kill()
            same(made, path)
            made.until(lambda state: "2" in state["masked"])
            assert "its connection has ended" in made.processes.missing()["2"]
        with joins(port_of(made), *flags):
            made.until(lambda state: not state["masked"])
            before = made.group.pairs[2]
            same(made, path)
            assert made.group.pairs[2] > before


def test_biases_come_with_the_weights(saved):
    """gpt-oss, whose rank elsewhere has no checkpoint."""
    path = saved("gpt-oss")
    with ranks(path, expert_remote_ranks=1) as made, joins(port_of(made)):
        all_here(made)
        same(made, path)
        assert made.group.pairs[1] > 0


def test_a_node_whose_only_other_rank_is_elsewhere_and_lost_follows_the_rule(saved):
    path = saved("mixtral")
    with ranks(path, expert_remote_ranks=1, expert_loss="fail") as made, joins(port_of(made)) as process:
        all_here(made)
        same(made, path)
        assert not made.group.take_losses().tokens
        process.kill()
        process.wait()
        wait_for(lambda: bool(made.processes.missing()))
        all_logits(made.logits)
        losses = made.group.take_losses()
        assert losses.masked == (1,) and losses.tokens and losses.by_row([0], [105])[0].fails


def test_a_stopped_rank_is_masked_and_continues(saved):
    path = saved("mixtral")
    with ranks(path, expert_remote_ranks=1, expert_replicas=2) as made, joins(port_of(made)) as process:
        all_here(made)
        process.send_signal(signal.SIGSTOP)
        same(made, path)
        assert "no sign of life" in made.processes.state()["masked"]["1"]
        process.send_signal(signal.SIGCONT)
        made.until(lambda state: not state["masked"])
        same(made, path)


def test_experts_move_to_and_from_ranks_elsewhere(saved):
    """Ranks 0 and 1 are here, 2 and 3 elsewhere, one with the checkpoint. All swap experts with each other, and one
    process that lost its connection has kept what it got."""
    path = saved("qwen3moe")
    flags: dict[str, Any] = {"expert_parallel_size": 4, "expert_remote_ranks": 2, "num_redundant_experts": 2}
    with ranks(path, **flags) as made, joins(port_of(made), "--model", str(path)), joins(port_of(made)):
        all_here(made)
        same(made, path)
        group = made.group
        before = group.placement
        rng, moved = random.Random(7), 0
        for number in range(4):
            layer = number % len(before.layers)
            slots = [list(one) for one in group.placement.layers[layer]]
            kept = [list(one) for one in slots]
            while kept == slots or any(len({*one}) < len(one) for one in slots):
                flat = [expert for one in kept for expert in one]
                rng.shuffle(flat)
                slots = [flat[i : i + 2] for i in range(0, len(flat), 2)]
            after = group.placement.with_layer(layer, group.placement.after(layer, slots))
            moved += Move.between(group.placement, after, layer, 2).count
            group.balance = OneMove(layer, after)
            group.begin()
            assert group.placement is after and not group.masked
            same(made, path)
        assert group.num_moved == moved and group.num_masked == 0
        assert made.processes.remote is not None
        for guest in list(made.processes.remote._guests.values()):
            guest.wire.end()
        wait_for(lambda: len(made.processes.missing()) == 2)
        made.until(lambda state: not state["masked"])
        same(made, path)


def test_loads_are_balanced_with_a_rank_elsewhere(saved):
    path = saved("qwen3moe")
    flags: dict[str, Any] = {"expert_remote_ranks": 1, "num_redundant_experts": 2, "expert_balance_steps": 2}
    with ranks(path, **flags) as made, joins(port_of(made)):
        assert made.processes._hosts() == [None, "of rank 1"]
        all_here(made)
        assert made.processes._hosts() == [None, None]  # it is a process of this host
        loads = [900, 5, 5, 800, 5, 5]
        made.group.counts[:] = torch.tensor(loads)
        before = made.group.placement
        same(made, path)
        made.group.begin()  # looks at the last layer
        made.group.balance = None
        assert made.group.num_moved > 0 and not made.group.masked
        for layer in made.group.placement.layers:
            assert imbalance(layer, loads) < imbalance(before.layers[0], loads)
        same(made, path)


def test_a_rank_elsewhere_that_is_lost_in_a_move_changes_nothing(saved, monkeypatch):
    path = saved("mixtral")
    with ranks(path, expert_remote_ranks=1, expert_replicas=2) as made, joins(port_of(made)) as process:
        all_here(made)
        group, placement = made.group, made.group.placement
        changed = [placement.layers[0][0], tuple(reversed(placement.layers[0][1]))]
        group.balance = OneMove(0, placement.with_layer(0, changed))
        process.send_signal(signal.SIGSTOP)
        group.begin()
        assert group.placement == placement and group.num_moved == 0 and list(group.masked) == [1]
        same(made, path)
        process.send_signal(signal.SIGCONT)
        made.until(lambda state: not state["masked"])
        same(made, path)
        group.balance = OneMove(0, placement.with_layer(0, changed))
        group.begin()
        assert group.placement.layers[0] == tuple(changed) and not group.masked
        same(made, path)


class SeenWay(Way):
    """Keeps what it has carried, of each direction of each connection."""

    def __init__(self, to: int) -> None:
        self._seen: dict[object, bytearray] = {}
        super().__init__(to)

    @property
    def carried(self) -> list[bytearray]:
        return list(self._seen.values())

    def carries(self, data: bytes, connection: object) -> None:
        self._seen.setdefault(connection, bytearray()).extend(data)


@pytest.fixture
def way_to() -> Iterator[Any]:
    ways: list[SeenWay] = []

    def made(port: int) -> SeenWay:
        ways.append(SeenWay(port))
        return ways[-1]

    yield made
    for way in ways:
        way.close()


@pytest.mark.parametrize("long", [False, True])
def test_a_cut_masks_a_rank_until_it_heals(saved, way_to, monkeypatch, long):
    """A short one leaves the connection; after a long one the process, which kept its experts, connects again."""
    if long:
        monkeypatch.setattr("engine.experts.remote_ranks.SILENCE_S", 2.0)
    path = saved("mixtral")
    with ranks(path, expert_remote_ranks=1, expert_replicas=2) as made:
        way = way_to(port_of(made))
        with joins(way.port) as process:
            all_here(made)
            way.cut()
            same(made, path)
            assert "no sign of life" in made.processes.state()["masked"]["1"]
            if long:
                wait_for(lambda: not made.processes.state()["remote"]["connected"])
            way.heal()
            made.until(lambda state: not state["masked"])
            same(made, path)
            assert process.poll() is None and made.group.num_masked == 1


@pytest.fixture
def keys(tmp_path) -> tuple[str, str]:
    found = []
    for name in "ab":
        file = tmp_path / name
        file.write_text(name.encode().hex() * 32)
        file.chmod(0o600)
        found.append(str(file))
    return found[0], found[1]


def refused(port: int, *flags: str) -> str:
    with joins(port, *flags) as process:
        _, told = process.communicate(timeout=60)
        assert process.returncode == 2
        return told.strip().splitlines()[-1]


PLAIN = PREFIX.pack(MAGIC, VERSION, 0, 0)[:8]
"""How every frame begins that is not sealed."""
SAID = b'{"join":', b'{"welcome":', b'{"ready":', b'{"m":1,', b'{"a":1}'


def test_with_a_cluster_key_all_is_sealed_and_others_are_refused(saved, keys, way_to):
    path = saved("mixtral")
    with ranks(path, expert_remote_ranks=1, cluster_key_file=keys[0]) as made:
        port = port_of(made)
        assert "one of the two nodes has a cluster key and the other has none" in refused(port)
        assert "no cluster key in common" in refused(port, "--cluster-key-file", keys[1])
        way = way_to(port)
        with joins(way.port, "--cluster-key-file", keys[0]):
            all_here(made)
            same(made, path)
            assert made.group.pairs[1] > 0
        assert all(data.startswith(SEALED_MAGIC) for data in way.carried) and len(way.carried) >= 2
        assert not any(text in data for data in way.carried for text in (PLAIN, *SAID))
    with ranks(path, expert_remote_ranks=1) as made:
        way = way_to(port_of(made))
        with joins(way.port):
            all_here(made)
            same(made, path)
        assert all(data.startswith(PLAIN) for data in way.carried)
        assert all(any(text in data for data in way.carried) for text in SAID)
    with ranks(path, expert_remote_ranks=1) as made:
        told = refused(port_of(made), "--cluster-key-file", keys[0])
        assert "one of the two nodes has a cluster key and the other has none" in told


def test_a_rank_of_another_model_or_release_is_refused(saved, monkeypatch):
    with ranks(saved("mixtral"), expert_remote_ranks=1) as made:
        assert "its --model is another one" in refused(port_of(made), "--model", str(saved("qwen3moe")))
        found = joining.Joining("0.0.0/1", "x")
        assert "run the same release" in (joining.refusal(found, "", made.processes.plan) or "")


def test_the_way_of_messages_is_told_and_rdma_without_a_device_is_refused(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(verbs, "SYSFS", tmp_path / "nothing")
    verbs.verbs.cache_clear()
    path, why = saved("mixtral"), "this machine has no RDMA device (nothing in /sys/class/infiniband)"
    with ranks(path, expert_remote_ranks=1, expert_replicas=2) as made, joins(port_of(made)):
        all_here(made)
        assert made.processes.state()["remote"]["ways"] == {"1": f"TCP; no RDMA: the node: {why}"}
        assert "--transport rdma: " in refused(port_of(made), "--transport", "rdma", "--rdma-devices", "mlx5_77")
    with ranks(path, expert_remote_ranks=1, expert_replicas=2, transport="rdma") as made:
        assert "the node was started with --transport rdma, and the node: " in refused(port_of(made))
    with ranks(path, expert_remote_ranks=1, transport="tcp") as made, joins(port_of(made)):
        all_here(made)
        assert made.processes.state()["remote"]["ways"] == {"1": "TCP; no RDMA: the node: --transport tcp"}


def test_a_rank_too_many_waits_for_a_place(saved):
    path = saved("mixtral")
    with ranks(path, expert_remote_ranks=1, expert_replicas=2) as made, joins(port_of(made)) as first:
        all_here(made)
        with joins(port_of(made)) as second:
            assert second.stderr is not None
            assert any("the node has no place for another rank" in line for line in second.stderr)
            assert second.poll() is None
            os.kill(first.pid, signal.SIGKILL)
            wait_for(lambda: bool(made.processes.missing()))
            made.until(lambda state: not state["masked"])
            same(made, path)


def test_a_port_in_use_is_named(saved):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = f"--expert-port {port} on 127.0.0.1: Address already in use"
        with pytest.raises(UsageError, match=told), ranks(saved("mixtral"), expert_remote_ranks=1, expert_port=port):
            pass


class WithoutCheckpoint:
    """A node whose ranks have loaded, and whose checkpoint is gone since then."""

    def __init__(self, made: Ranks, path: Path) -> None:
        self.made, self._wanted = made, expected(path)
        all_here(made)
        self.right()
        path.rename(path.with_name("away"))

    def right(self) -> None:
        for logits, one in zip(all_logits(self.made.logits), self._wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)

    @property
    def came(self) -> Counter[str]:
        """Experts, by where they came from."""
        return Counter(self.made.processes.state()["experts_from"])

    def move(self, places: dict[tuple[int, int], int]) -> None:
        """These experts to these ranks and slots of the first layer."""
        group = self.made.group
        slots = [list(one) for one in group.placement.layers[0]]
        for (rank, slot), expert in places.items():
            slots[rank][slot] = expert
        placement = group.placement.with_layer(0, [tuple(one) for one in slots])
        group.balance = OneMove(0, placement)
        group.begin()
        group.balance = None
        assert group.placement is placement

    def of(self, rank: int, here: Collection[int]) -> Counter[str]:
        """Where the experts of a rank come from when it is started again: from others of these ranks, or elsewhere."""
        placement = self.made.group.placement
        every = [(layer, e) for layer, ranks in enumerate(placement.layers) for e in ranks[rank]]
        others = [{other for other, _ in placement.holders(*one)} - {rank} for one in every]
        memory = sum(1 for there in others if there & {*here})
        assert all(others) and memory < len(every)
        return Counter(memory=memory, ranks=len(every) - memory)


def test_experts_that_only_other_hosts_have_come_from_there_when_the_checkpoint_is_gone(tmp_path):
    """Rank 0 is here, 1 and 2 are elsewhere. Experts move to ranks here and there, also while a rank that has them is
    stopped, and a rank that was killed gets its experts back."""
    save("mixtral", path := tmp_path / "model")
    flags: dict[str, Any] = {"expert_parallel_size": 3, "expert_remote_ranks": 2, "expert_replicas": 2}
    with ranks(path, **flags) as made, joins(port_of(made)) as one, joins(port_of(made)) as other:
        node = WithoutCheckpoint(made, path)
        placed = made.group.placement.layers[0]
        far = next(e for e in placed[1] if e in placed[2])
        near = next(e for e in placed[0] if e in placed[1])
        here, there = (0, placed[0].index(near)), (2, placed[2].index(far))
        for places, came in (
            ({here: far, there: near}, {"ranks": 1, "memory": 1}),
            ({here: near, there: far}, {"ranks": 1, "memory": 0}),  # only rank 1 has it for rank 2
        ):
            before = node.came
            node.move(places)
            assert node.came - before == Counter(came) + Counter(memory=places[here] == near)
            node.right()
        for process in (one, other):
            process.send_signal(signal.SIGSTOP)
            before = node.came
            node.move({here: far})
            process.send_signal(signal.SIGCONT)
            assert node.came - before == Counter(ranks=1)
            node.right()
            made.until(lambda state: not state["masked"])
            node.move({here: near})
            node.right()
        before = node.came
        other.kill()
        made.until(lambda state: bool(state["masked"]))
        (rank,) = map(int, made.processes.missing())
        with joins(port_of(made)):
            made.until(lambda state: not state["masked"])
            assert node.came - before == node.of(rank, [0])
            node.right()


def test_a_process_of_the_nodes_host_that_is_started_again_needs_no_checkpoint(tmp_path):
    """Ranks 0 and 1 are here, and 2 elsewhere: from there comes what rank 0 does not have."""
    save("mixtral", path := tmp_path / "model")
    flags: dict[str, Any] = {"expert_parallel_size": 3, "expert_remote_ranks": 1, "expert_replicas": 2}
    with ranks(path, **flags) as made, joins(port_of(made)):
        node = WithoutCheckpoint(made, path)
        before = node.came
        kill(made, 1)
        made.until(lambda state: state["restarts"] == 1 and not state["masked"])
        assert node.came - before == node.of(1, [0])
        pairs = made.group.pairs[1]
        node.right()
        assert made.group.pairs[1] > pairs
