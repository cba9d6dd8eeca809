"""Ranks that several nodes share: real processes, the tokens of one process, and losses on either side."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config.config import Config
from engine.experts import remote_ranks, shared_rank
from engine.experts.joining import LOADING_S, VERSION, Joining, Welcome, refusal
from engine.experts.placing.placement import first_placement
from engine.experts.plan import Duty, Plan, group_name
from engine.experts.rank_command import _nodes
from engine.experts.remote_ranks import RemoteRanks
from engine.experts.remote_worker import new_share
from engine.experts.shared_rank import SharedRank
from engine.experts.sharing import EXPERTS, Sharing
from engine.experts.work import COMMIT
from engine.model.model_error import ModelError
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import Message, new_region
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.near import Handover
from net.rounds.rdma.offer import Offer
from net.transfer.common.memory import Region
from tests.engine.experts.test_ranks import Ranks, all_logits, expected, ranks, saved, wait_for
from tests.engine.experts.test_remote_ranks import MOONCAKE, joins, port_of, refused, same
from tests.engine.model.test_model import TOLERANCE
from tests.engine.tiny_families import save

__all__ = ["saved"]

LAYOUT = Layout(most_rows=8, hidden=16, top_k=1, dtype="float32")
PLAN = Plan((0, 1), 4, 2, 4, hidden=16, expert_size=8, activation="silu", layout=LAYOUT, remote=2)


def node(path: Path, size: int = 2, **flags: Any) -> Any:
    return ranks(path, expert_parallel_size=size, expert_remote_ranks=size, **flags)


@contextmanager
def shared(path: Path, seeds: list[int], size: int = 2, *flags: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of all ranks, which are told these nodes of this host."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(joins(seeds[0], *_more(seeds), "--rank", str(rank), "--model", str(path), *flags))
            for rank in range(size)
        ]


def _more(seeds: list[int]) -> list[str]:
    return ["--join", ",".join(f"127.0.0.1:{port}" for port in seeds)]


def here(made: Ranks) -> None:
    wait_for(lambda: made.processes.awaited() is None)
    made.until(lambda state: not state["masked"])


def meet(*nodes: Ranks) -> None:
    """As gossip would tell them."""
    for made in nodes:
        assert made.processes.remote is not None
        made.processes.remote._door.share([f"127.0.0.1:{port_of(one)}" for one in nodes])


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3moe", marks=pytest.mark.heavy)])
def test_two_nodes_with_one_group_compute_what_one_process_does(saved, family):
    """The ranks are told of one node only, and hear of the other. Each expert is in one process, and both nodes use
    all. Then a rank is killed, each node masks it by itself, and a new process has its place at both."""
    path = saved(family)
    with node(path, expert_replicas=2) as a, node(path, max_num_batched_tokens=48, expert_replicas=2) as b:
        waits = a.processes.awaited()
        assert waits is not None and f"--join 127.0.0.1:{port_of(a)} --rank N" in waits
        with shared(path, [port_of(a)]) as processes:
            here(a)
            assert b.processes.awaited() is not None
            meet(a, b)
            here(b)
            found: list[BaseException] = []

            def compute() -> None:
                try:
                    for _ in range(3):
                        same(b, path)
                except BaseException as error:
                    found.append(error)

            thread = threading.Thread(target=compute)
            thread.start()
            for _ in range(3):
                same(a, path)
            thread.join()
            assert not found and a.group.num_masked == b.group.num_masked == 0
            for made in (a, b):
                state = made.processes.state()
                assert min(state["pairs_by_rank"]) > 0 and state["remote"]["near"] == [0, 1]
                assert len(state["remote"]["nodes"]) == 2 and not made.processes.shares
            processes[0].kill()
            processes[0].wait()
            same(a, path)
            same(b, path)
            wait_for(lambda: list(a.processes.missing()) == list(b.processes.missing()) == ["0"])
            with joins(port_of(b), "--rank", "0"):  # its weights come from the node
                here(a)
                here(b)
                before = a.group.pairs[0], b.group.pairs[0]
                same(a, path)
                same(b, path)
                assert a.group.pairs[0] > before[0] and b.group.pairs[0] > before[1]


def test_a_node_that_ends_does_not_disturb_the_other_and_another_one_comes(saved):
    path = saved("mixtral")
    with node(path) as a:
        with node(path) as b, shared(path, [port_of(b), port_of(a)], 2, "--log-level", "debug"):
            here(a)
            here(b)
            same(b, path)
            b.processes.close()
            for _ in range(3):
                same(a, path)
            meet(a)
            assert a.group.num_masked == 0 and not a.processes.missing()
            with node(path) as c:
                meet(a, c)
                here(c)
                same(c, path)
                same(a, path)
                assert c.group.num_masked == a.group.num_masked == 0
        wait_for(lambda: len(a.processes.missing()) == 2)
        all_logits(a.logits)
        assert a.group.take_losses().masked == (0, 1) and a.processes.lack() == 1.0


def test_a_stopped_rank_is_masked_by_both_and_continues(saved):
    path = saved("mixtral")
    with ExitStack() as stack:
        a, b = (stack.enter_context(node(path, expert_replicas=2)) for _ in range(2))
        processes = stack.enter_context(shared(path, [port_of(a), port_of(b)]))
        here(a)
        here(b)
        same(a, path)
        processes[1].send_signal(signal.SIGSTOP)
        same(a, path)
        same(b, path)
        for made in (a, b):
            assert "no sign of life" in made.processes.state()["masked"]["1"]
        processes[1].send_signal(signal.SIGCONT)
        here(a)
        here(b)
        same(a, path)


def test_a_process_that_hangs_loses_its_place_to_one_that_asks_for_it(saved, monkeypatch):
    """On the node's host too, where its connection shows nothing."""
    monkeypatch.setattr("engine.experts.remote_ranks.SILENCE_S", 2.0)
    path = saved("mixtral")
    with node(path, expert_replicas=2) as a, shared(path, [port_of(a)]) as processes:
        here(a)
        assert a.processes.state()["remote"]["near"] == [0, 1]
        processes[1].send_signal(signal.SIGSTOP)
        same(a, path)
        with joins(port_of(a), "--rank", "1"):
            here(a)
            before = a.group.pairs[1]
            same(a, path)
            assert a.group.pairs[1] > before


def test_a_node_that_has_two_addresses_keeps_its_ranks(saved, monkeypatch):
    """It names itself otherwise than it was found: each process asks again and again for the place that it has."""
    path, refused, take_place = saved("mixtral"), list[int](), RemoteRanks._take_place

    def noted(self: RemoteRanks, wire: FrameSocket, joining: Joining, host: str | None) -> int | None:
        if (found := take_place(self, wire, joining, host)) is None:
            refused.append(joining.rank)
        return found

    monkeypatch.setattr(RemoteRanks, "_take_place", noted)
    with node(path) as a, shared(path, [port_of(a)], 2, "--join", f"localhost:{port_of(a)}"):
        here(a)
        assert a.processes.remote is not None
        before = {rank: guest.wire for rank, guest in a.processes.remote._guests.items()}
        refused.clear()
        wait_for(lambda: min(refused.count(rank) for rank in range(2)) >= 2)
        same(a, path)
        assert {rank: guest.wire for rank, guest in a.processes.remote._guests.items()} == before


def test_ranks_of_the_same_host_take_memory_whatever_the_transport(saved):
    """--transport is about messages to other hosts; these have no way there that both would take."""
    path = saved("mixtral")
    with node(path, transport="rdma") as a, shared(path, [port_of(a)], 2, "--transport", "tcp"):
        here(a)
        same(a, path)
        assert a.processes.state()["remote"]["near"] == [0, 1]


class Unreachable(Handover):
    """As from another container of the host."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        Path(self.path).unlink()


def test_where_memory_is_out_of_reach_rdma_without_a_device_is_refused(saved, monkeypatch):
    path = saved("mixtral")
    monkeypatch.setattr(remote_ranks, "Handover", Unreachable)
    with node(path, transport="rdma") as a:
        told = refused(port_of(a), "--rank", "0", "--model", str(path), "--transport", "tcp")
    assert "the node was started with --transport rdma, and " in told and "give --transport auto or tcp" in told


def another_host() -> str:
    return "another host"


def no_folder(folder: Path) -> None:
    raise OSError("AF_UNIX path too long")


@pytest.mark.parametrize(("name", "instead"), [("boot_id", another_host), ("Handover", no_folder)])
def test_over_tcp_where_memory_cannot_be_shared(saved, monkeypatch, name, instead):
    path = saved("mixtral")
    monkeypatch.setattr(f"engine.experts.remote_ranks.{name}", instead)
    with node(path) as a, shared(path, [port_of(a)]):
        here(a)
        same(a, path)
        state = a.processes.state()["remote"]
        assert state["connected"] == [0, 1] and state["near"] == []


def test_a_rank_without_the_checkpoint_gets_its_experts_from_another_one(tmp_path):
    """Through the node, which has no experts itself and can no longer read its checkpoint."""
    save("mixtral", path := tmp_path / "model")
    wanted = expected(path)
    with node(path, expert_replicas=2) as a, joins(port_of(a), "--rank", "0", "--model", str(path)):
        wait_for(lambda: a.processes.state()["remote"]["connected"] == [0])
        path.rename(tmp_path / "away")
        with joins(port_of(a), "--rank", "1"):
            here(a)
            for logits, one in zip(all_logits(a.logits), wanted, strict=True):
                torch.testing.assert_close(logits, one, **TOLERANCE)
            plan, state = a.processes.plan, a.processes.state()
            assert state["experts_from"] == {"memory": 0, "ranks": len(plan.layers) * plan.slots, "checkpoint": 0}
            assert a.group.pairs[1] > 0 and state["remote"]["near"] == [0, 1]


def test_memory_that_nobody_takes_is_freed(monkeypatch):
    made: list[Region] = []
    monkeypatch.setattr(remote_ranks, "new_region", lambda *given: made.append(new_region(*given)) or made[0])

    def give(descriptors: list[int]) -> None:
        raise PeerLost("it has ended")

    duty, ours = Duty(0, PLAN, first_placement(2, 4, 2, 8, 2)), SimpleNamespace(_bell=SimpleNamespace(memfd=0))
    with pytest.raises(PeerLost, match="it has ended"):
        RemoteRanks._shared_region(ours, SimpleNamespace(give=give), duty)  # type: ignore[arg-type]
    assert made[0].closed


def test_a_rank_comes_again_when_the_node_had_no_memory_for_it(saved, monkeypatch, caplog):
    path, refused = saved("mixtral"), list[str]()

    def short_at_first(name: str, layout: Layout) -> Region:
        if name not in refused:
            refused.append(name)
            raise OSError("too many open files")
        return new_region(name, layout)

    monkeypatch.setattr(remote_ranks, "new_region", short_at_first)
    with node(path) as a, shared(path, [port_of(a)]):
        here(a)
        same(a, path)
        assert len(refused) == 2 and a.processes.state()["remote"]["near"] == [0, 1]
    assert caplog.text.count("is lost: too many open files") == 2


@pytest.mark.expects_error("cannot load: rank . serves nodes that have other experts")
def test_a_node_with_other_experts_is_refused_while_the_first_is_here(saved):
    path = saved("mixtral")
    with node(path) as a, node(path, expert_replicas=2) as other, shared(path, [port_of(a)]) as processes:
        here(a)
        meet(a, other)
        for process in processes:
            wait_for(lambda process=process: "give all the same --dtype" in _line(process))
        assert other.processes.awaited() is not None
        same(a, path)
        assert a.group.num_masked == 0


def test_two_processes_for_one_rank_are_one_and_one_that_waits(saved):
    path = saved("mixtral")
    with node(path) as a, shared(path, [port_of(a)]) as processes:
        here(a)
        with joins(port_of(a), "--rank", "1") as spare:
            wait_for(lambda: "rank 1 has its process" in _line(spare))
            processes[1].kill()
            wait_for(lambda: a.processes.missing() != {})
            here(a)
            same(a, path)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize(
    ("plan", "joining", "why"),
    [
        (PLAN, {}, "give --rank, of 0 to 1"),
        (replace(PLAN, remote=1), {"shared": True, "rank": 1}, "leave out --rank"),
        (PLAN, {"shared": True, "rank": 2}, "--rank 2: the ranks of --expert-parallel-size 2 are 0 to 1"),
        (PLAN, {"shared": True, "rank": 1}, None),
        (replace(PLAN, remote=1), {}, None),
    ],
)
def test_who_can_be_a_rank_of_which_node(plan, joining, why):
    found = refusal(Joining(VERSION, "x", **joining), "a model", plan)
    assert found is None if why is None else found is not None and why in found


ONE, TWO = {"mlx5_0": 0, "mlx5_1": 1}, {"mlx5_4": 0, "mlx5_5": 1}


@pytest.mark.parametrize(
    ("node", "rank", "why"),
    [
        (Offer(refused="none"), Offer(refused="none"), None),
        (Offer(ONE), Offer(refused="none"), None),
        (Offer(ONE, only=True), Offer(TWO), None),
        (
            Offer(ONE, only=True),
            Offer(refused="none"),
            "the node was started with --transport rdma, and the rank: none",
        ),
        (Offer(refused="no"), Offer(TWO, only=True), "it was started with --transport rdma, and the node: no"),
        (Offer(ONE), Offer({"mlx5_7": 7}, only=True), "share no rail number"),
    ],
)
def test_who_takes_nothing_but_rdma_is_refused_where_there_is_none(node, rank, why):
    joining, plan = Joining(VERSION, "x", rdma=rank), replace(PLAN, remote=1)
    found = refusal(joining, "a model", plan, node)
    assert found is None if why is None else found is not None and why in found
    assert refusal(joining, "a model", plan, node, near=True) is None


def test_groups_are_of_the_same_experts():
    """What only messages depend on does not matter."""
    placement = first_placement(2, 4, 2, 8, 2)
    name = group_name("m", PLAN, placement)
    assert name == group_name("m", replace(PLAN, layout=replace(LAYOUT, most_rows=9, codes="int8")), placement)
    assert name != group_name("n", PLAN, placement)
    assert name != group_name("m", replace(PLAN, layout=replace(LAYOUT, dtype="bfloat16")), placement)
    assert name != group_name("m", PLAN, first_placement(2, 4, 2, 4, 1))


def test_nodes_of_the_same_group_hear_of_each_other():
    model = SimpleNamespace(
        num_layers=2, has_experts=lambda layer: True, num_experts=4, hidden_size=16, expert_size=8, activation="silu",
        experts_per_token=1, gate_limit=0.0, expert_biases=False,
    )  # fmt: skip
    config = Config(model="m", host="127.0.0.1", dtype="float32", expert_parallel_size=2, expert_remote_ranks=2)
    made: Any = model
    nodes = [Sharing(one, made, "m") for one in (config, config, replace(config, expert_replicas=2))]
    try:
        members = [one.told for one in nodes]
        told = [*members, {}, {EXPERTS: 7}, {EXPERTS: [members[0][EXPERTS][0], "nowhere"]}]
        for one in nodes:
            one.heard(told)
        assert set(nodes[0].door.nodes) == set(nodes[1].door.nodes) == {nodes[0].door.where, nodes[1].door.where}
        assert nodes[2].door.nodes == (nodes[2].door.where,)
        nodes[0].heard([members[0]])
        assert nodes[0].door.nodes == (nodes[0].door.where,)
    finally:
        for one in nodes:
            one.door.close()


def rank_of(source: Any = None) -> SharedRank:
    return SharedRank(0, ["127.0.0.1:1"], source, None, 1)


def test_a_share_is_replaced_only_when_no_node_uses_it(monkeypatch):
    filled: list[Any] = []
    monkeypatch.setattr(shared_rank, "new_share", lambda wire, welcome, *given: filled.append(welcome) or object())
    made, sent = rank_of(), list[dict[str, Any]]()
    wire: Any = SimpleNamespace(send=sent.append)
    first = Welcome(0, "m", PLAN, first_placement(2, 4, 2, 8, 2))
    other = replace(first, fingerprint="n")
    messages = replace(first, plan=replace(PLAN, layout=replace(LAYOUT, most_rows=99)))
    with made._holding(wire, first) as one, made._holding(wire, messages) as two:
        assert one is two and len(filled) == 1 and not sent
        with pytest.raises(PeerRefused, match="give all the same"), made._holding(wire, other):
            pass
        assert "give all the same" in sent[-1]["failed"]
    with made._holding(wire, other):
        assert len(filled) == 2 and made._served == 1
    assert made._served == 0


def test_a_model_that_cannot_load_is_told_to_the_node(monkeypatch):
    def fails(*given: Any) -> None:
        raise ModelError("no such file")

    monkeypatch.setattr(shared_rank, "new_share", fails)
    made, sent = rank_of(), list[dict[str, Any]]()
    wire: Any = SimpleNamespace(send=sent.append)
    with pytest.raises(ModelError), made._holding(wire, Welcome(0, "m", PLAN, first_placement(2, 4, 2, 8, 2))):
        pass
    assert sent == [{"failed": "no such file"}]


def visit(made: SharedRank, monkeypatch: pytest.MonkeyPatch, where: str, *errors: Exception) -> list[Exception]:
    """All connections to a node end with these errors, as long as the process tries: those that are left."""
    left = [*errors]

    def serve(where: str) -> None:
        raise left.pop(0)

    for name in ("AGAIN_S", "REFUSED_AGAIN_S"):
        monkeypatch.setattr(shared_rank, name, 0.0)
    monkeypatch.setattr(shared_rank, "limit_threads", lambda count: None)
    monkeypatch.setattr(made, "_serve", serve)
    made._visited.add(where)
    made._visit(where)
    return left


@pytest.mark.parametrize("error", [ModelError("no such file"), ZeroDivisionError("a mistake")])
def test_an_error_that_stays_ends_the_process(monkeypatch, error):
    """One that may pass does not."""
    made = rank_of()
    assert not visit(made, monkeypatch, "127.0.0.1:1", PeerLost("away"), OSError("too many open files"), error)
    with pytest.raises(type(error), match=str(error)):
        made.run()


def test_a_process_ends_when_all_nodes_refuse_it(monkeypatch):
    made = SharedRank(0, ["127.0.0.1:1", "127.0.0.1:2"], None, None, 1)
    refused = PeerRefused("run the same release")
    assert not visit(made, monkeypatch, "127.0.0.1:1", refused, refused, ModelError("the end"))
    assert len(visit(made, monkeypatch, "127.0.0.1:2", refused, refused)) == 1
    with pytest.raises(PeerRefused, match="the same release"):
        made.run()


def test_a_node_that_hangs_while_it_hands_out_weights_is_given_up():
    """Other nodes wait for the share, each in a thread that says that it loads."""
    waits: list[float] = []

    def frame() -> None:
        raise PeerLost("nothing came")

    wire: Any = SimpleNamespace(trust=lambda place: None, send=lambda header: None, frame=frame, await_for=waits.append)
    with pytest.raises(PeerLost, match="nothing came"):
        new_share(wire, Welcome(0, "m", PLAN, first_placement(2, 4, 2, 8, 2)), None, lambda: None)
    assert waits == [LOADING_S]


def test_names_of_nodes_stay_names():
    """Each connection looks them up: a node may come back at another address."""
    assert _nodes(["localhost:9100"], False) == ["localhost:9100"]
    assert _nodes(["localhost:9100", " [::1]:9100"], True) == ["localhost:9100", "[::1]:9100"]


def test_a_message_that_is_none_ends_one_connection_only():
    made = rank_of()
    broken: Any = SimpleNamespace(do=lambda head: [][head[1]])
    with pytest.raises(PeerLost, match="would move experts"):
        made._do("a", broken, Message(1, [COMMIT, 0, 0, 0]), lambda waits: None)
    with pytest.raises(PeerLost, match="cannot be computed"):
        made._do("a", broken, Message(1, [0, 5, 1, 1]), lambda waits: None)
    made._do("b", SimpleNamespace(do=lambda head: None), Message(1, [0, 0, 1, 1]), lambda waits: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--join", "127.0.0.1:1,127.0.0.1:2"], "only with --rank"),
        (["--join", "127.0.0.1:1,nowhere", "--rank", "0"], "not HOST:PORT"),
        (["--join", "127.0.0.1:1", "--rank", "64"], "64 is no rank"),
        (["--join", "127.0.0.1:1", "--rank", "-1"], "is no rank"),
    ],
)
def test_refused_command_lines(flags, told):
    found = subprocess.run([sys.executable, str(MOONCAKE), "expert-rank", *flags], capture_output=True, text=True)
    assert found.returncode == 2 and told in found.stderr


def test_a_rank_without_a_number_is_told_to_give_one(saved):
    path = saved("mixtral")
    with node(path) as a, joins(port_of(a)) as process:
        assert process.wait(120) == 2 and process.stderr is not None
        assert "give --rank, of 0 to 1" in process.stderr.read()
