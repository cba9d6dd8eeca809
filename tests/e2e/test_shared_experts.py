"""Two nodes whose experts are on the same ranks: attention by each for its requests, experts by all for both."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lab.foreign.common.processes import free_port
from lab.launch.cluster import LocalCluster
from lab.launch.expert_ranks import ExpertRanks
from tests.e2e.conftest import Start, complete, settled
from tests.e2e.test_experts import ROOT, expected, get, moe, texts
from tests.e2e.test_start import run
from tests.e2e.test_tensor_parallel import children, soon

__all__ = ["expected", "moe"]

RANKS = 2
FLAGS = ["--expert-parallel-size", str(RANKS), "--expert-remote-ranks", str(RANKS), "--expert-replicas", "2"]


@contextmanager
def grouped(moe: list[str], node: str, *flags: str) -> Iterator[ExpertRanks]:
    """The processes of the ranks, told of one node."""
    model = moe[: moe.index("--dtype")]
    with ExpertRanks([*model, "--join", node, *flags]) as made:
        for rank in range(RANKS):
            begin(made, rank)
        yield made


def begin(group: ExpertRanks, rank: int) -> None:
    group.start(str(rank), "--rank", str(rank))


def experts(cluster: LocalCluster, name: str) -> dict:
    return get(f"{cluster[name].url}/debug/state")["engine"]["experts"]


def loaded(cluster: LocalCluster, names: list[str], stop: threading.Event, found: dict[str, list[str]]) -> list:
    """Threads that ask these nodes until `stop`."""

    def ask(name: str) -> None:
        while not stop.is_set():
            answer = complete(cluster[name].url, list(range(100, 231)), 40, ignore_eos=True)
            found[name].append(answer["choices"][0]["text"])

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    return threads


def test_nodes_share_one_group_and_outlive_ranks_and_each_other(start: Start, moe, expected, tmp_path):
    """The ranks know one node; gossip brings them to the other. Under load, a rank is killed with SIGKILL and comes
    back; then the node that the ranks were told of is killed, and nobody masks anything."""
    key = tmp_path / "key"
    key.write_text("cd" * 32)
    key.chmod(0o600)
    sealed = ["--cluster-key-file", str(key)]
    port, nodes = free_port(), ["mixed-0", "mixed-1"]
    first = {"mixed-0": ["--expert-port", str(port)]}
    with (
        grouped(moe, f"127.0.0.1:{port}", *sealed) as group,
        start("mixed=2", *moe, *FLAGS, *sealed, role_flags=first) as cluster,
    ):
        for name in nodes:
            assert texts(cluster[name].url) == expected
            state = experts(cluster, name)
            assert state["remote"]["connected"] == state["remote"]["near"] == [0, 1]
            assert len(state["remote"]["nodes"]) == 2 and min(state["pairs_by_rank"]) > 0
            assert not children(cluster[name].pid)
        found: dict[str, list[str]] = {name: [] for name in nodes}
        stop = threading.Event()
        threads = loaded(cluster, nodes, stop, found)
        try:
            soon(lambda: all(map(len, found.values())), 60)
            group.end("1")
            soon(lambda: all(experts(cluster, name)["times_masked"] == 1 for name in nodes), 60)
            begin(group, 1)
            soon(lambda: all(get(f"{cluster[name].url}/health") == {"status": "ok"} for name in nodes), 60)
            before = {name: len(found[name]) for name in nodes}
            soon(lambda: all(len(found[name]) > before[name] + 1 for name in nodes), 60)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert len({text for one in found.values() for text in one}) == 1
        found["mixed-1"].clear()
        stop.clear()
        threads = loaded(cluster, ["mixed-1"], stop, found)
        try:
            soon(lambda: len(found["mixed-1"]) > 0, 60)
            cluster.kill("mixed-0")
            before_it = len(found["mixed-1"])
            soon(lambda: len(found["mixed-1"]) > before_it + 2, 60)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert set(found["mixed-1"]) == {found["mixed-0"][0]}
        soon(lambda: len(experts(cluster, "mixed-1")["remote"]["nodes"]) == 1, 60)
        state = experts(cluster, "mixed-1")
        assert state["times_masked"] == 1 and state["masked"] == {} and state["dropped_pairs"] == 0
        assert texts(cluster["mixed-1"].url) == expected
        settled(cluster)


def test_prefill_and_decode_share_the_ranks_without_a_copy(start: Start, moe, expected):
    """KV goes from one node to the other; the experts of both are in the same processes. A rank that is killed is
    waited for."""
    port = free_port()
    flags = ["--expert-parallel-size", "2", "--expert-remote-ranks", "2", "--expert-loss", "wait"]
    first = {"prefill-0": ["--expert-port", str(port)]}
    with (
        grouped(moe, f"127.0.0.1:{port}") as group,
        start("prefill=1,decode=1", *moe, *flags, role_flags=first) as cluster,
    ):
        assert texts(cluster["decode-0"].url) == expected
        assert all(min(experts(cluster, node.name)["pairs_by_rank"]) > 0 for node in cluster.nodes)
        group.end("0")
        begin(group, 0)
        assert texts(cluster["prefill-0"].url) == expected
        settled(cluster)


def test_more_ranks_elsewhere_than_there_are_is_refused(moe):
    code, told = run(*moe, "--port", "0", "--expert-parallel-size", "2", "--expert-remote-ranks", "3")
    assert code == 2 and "--expert-remote-ranks 3 is more than --expert-parallel-size 2" in told


def test_a_rank_that_no_node_has_is_refused(start: Start, moe):
    port = free_port()
    first = {"mixed-0": ["--expert-port", str(port)]}
    with grouped(moe, f"127.0.0.1:{port}"), start("mixed=1", *moe, *FLAGS, role_flags=first):
        command = [sys.executable, str(ROOT / "mooncake.py"), "expert-rank", "--join", f"127.0.0.1:{port}"]
        found = subprocess.run([*command, "--rank", "2"], capture_output=True, text=True)
        assert found.returncode == 2 and "--rank 2: the ranks of --expert-parallel-size 2 are 0 to 1" in found.stderr
