"""LocalCluster over fake nodes: start, join, watch, kill, restart, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from engine.config.flags import UsageError
from lab.launch import rest
from lab.launch.cluster import ROOT, LocalCluster, NodeDied, Processes, StartTimeout
from lab.launch.nodes import parse_nodes, thread_environment, threads_per_node


def gone(pid: int) -> bool:
    """No such process, or only its exit code is left for the process that adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def interrupted() -> None:
    raise KeyboardInterrupt


def test_parse_nodes():
    assert parse_nodes("prefill=2, decode+store=1,mixed") == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode+store-0", "decode,store"),
        ("mixed-0", "mixed"),
    ]
    assert [name for name, _ in parse_nodes("store=1,store=1")] == ["store-0", "store-1"]
    assert parse_nodes("prefill=1,store=0") == [("prefill-0", "prefill")]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("prefil=2", "did you mean prefill?"),
        ("", "prefill=2,decode=1"),
        ("prefill=x", "number of nodes"),
        ("prefill=-1", "number of nodes"),
        ("prefill=65", "number of nodes"),
        ("prefill=0", "names no node"),
        ("prefill+=1", "is no role"),
    ],
)
def test_wrong_nodes_name_the_remedy(text, remedy):
    with pytest.raises(UsageError, match=remedy.replace("?", r"\?")):
        parse_nodes(text)


def test_cores_are_shared_by_the_nodes_that_compute():
    plan = parse_nodes("prefill=2,decode=1,store=4")
    assert threads_per_node(plan, 16) == 5
    assert threads_per_node(plan, 2) == 1
    assert threads_per_node(parse_nodes("store=1"), 4) == 4


def test_threads_sleep_between_operations_where_models_share_the_cores():
    assert thread_environment(parse_nodes("prefill=1,decode=1"), 1)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in thread_environment(parse_nodes("mixed=1,store=2"), 2)


def test_nodes_start_join_and_stop(fake):
    flags = ["--served-model-name", "of-{node}"]
    with LocalCluster(
        "prefill=1,decode=1,store=1", flags, role_flags={"store": ["--ssd-path", "/x/{node}"]}, **fake
    ) as it:
        assert [node.name for node in it.nodes] == ["prefill-0", "decode-0", "store-0"]
        assert len({node.pid for node in it.nodes}) == 3
        assert all(node.url and node.control == ("127.0.0.1", 1) and node.ready_s > 0 for node in it.nodes)
        members = {member["node_id"]: member for member in rest.get(it.nodes[0].url + "/cluster")["members"]}
        assert members["store-0"]["join"] is None  # the lightest starts, the others join it
        assert members["decode-0"]["join"] == it["store-0"].url.removeprefix("http://")
        assert "of-decode-0" in it["decode-0"].argv
        assert "/x/store-0" in it["store-0"].argv
        assert "--ssd-path" not in it["decode-0"].argv
        assert any("loading" in line for line in it["decode-0"].last_lines())
        pids = [node.pid for node in it.nodes]
    assert all(gone(pid) for pid in pids)
    assert [node.process.returncode for node in it.nodes] == [0, 0, 0]


async def test_async_context_manager(fake):
    async with LocalCluster("mixed=1", **fake) as it:
        pid = it["mixed-0"].pid
        assert it.members("mixed-0") == {"mixed-0"}
    assert gone(pid)


def test_kill_restart_and_add(fake):
    with LocalCluster("prefill=1,store=1", **fake) as it:
        assert it.kill("prefill-0") == -signal.SIGKILL
        assert it.kill("prefill-0") == -signal.SIGKILL
        it.check()  # a node we killed ourselves is no accident
        before = it["store-0"].url
        node = it.restart("prefill-0")
        assert node.argv[node.argv.index("--join") + 1] == before.removeprefix("http://")
        assert it.add("decode").name == "decode-0"
        assert it.add("decode").name == "decode-1"
        assert it.formed()
        assert it.kill("decode-1", signal.SIGTERM) == 0
        assert it.formed()


def test_a_node_started_by_a_thread_outlives_it(fake):
    """scripts/faults.py rolling-restart starts nodes in threads of asyncio, which end with its loop."""
    with LocalCluster("store=1", **fake) as it:
        thread = Thread(target=it.add, args=("decode",))
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            it["decode-0"].process.wait(0.5)
        assert it.formed()


def test_a_refused_addition_leaves_the_cluster_alone(fake):
    with LocalCluster("store=1", **fake) as it:
        with pytest.raises(NodeDied, match="exit code 2"):
            it.add("decode", "--model", "missing")
        it.check()
        assert it.formed()


def test_a_node_that_cannot_start_is_reported_with_its_last_words(fake):
    cluster = LocalCluster("prefill=1,store=1", ["--model", "missing"], **fake)
    with pytest.raises(NodeDied, match="no model named missing") as caught, cluster:
        pass
    assert "store-0 ended with exit code 2" in str(caught.value)
    assert not any(node.alive for node in cluster.nodes)


def test_a_start_that_takes_too_long_names_the_late_node(fake):
    idle = (sys.executable, "-c", "import time; time.sleep(600)")
    fake |= {"processes": Processes(program=idle, start_timeout_s=0.2)}
    cluster = LocalCluster("mixed=1", **fake)
    with pytest.raises(StartTimeout, match="mixed-0 not ready"):
        cluster.start()
    assert gone(cluster["mixed-0"].pid)


def test_death_while_serving_is_noticed(fake):
    with LocalCluster("mixed=1", **fake) as it:
        it.check()
        os.kill(it["mixed-0"].pid, signal.SIGKILL)
        it["mixed-0"].process.wait(30)
        with pytest.raises(NodeDied, match="exit code -9"):
            it.check()


def test_a_node_deaf_to_sigterm_is_killed(fake):
    fake |= {"processes": replace(fake["processes"], stop_timeout_s=0.2)}
    with LocalCluster("mixed=1", ["--log-level", "debug"], **fake) as it:
        pid = it["mixed-0"].pid
    assert gone(pid)
    assert it["mixed-0"].process.returncode == -signal.SIGKILL


def test_one_more_ctrl_c_while_nodes_end_spares_none(fake, monkeypatch):
    fake |= {"processes": replace(fake["processes"], stop_timeout_s=0.2)}
    cluster = LocalCluster("mixed=2", ["--log-level", "debug"], **fake)
    cluster.start()
    first, second = cluster.nodes
    with monkeypatch.context() as patched:
        patched.setattr(first.process, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.stop()
    assert (first.process.wait(30), second.process.wait(30)) == (-signal.SIGKILL, -signal.SIGKILL)


def test_the_api_key_reaches_nodes_and_our_own_calls(fake):
    with LocalCluster("mixed=1", api_key="secret", **fake) as it, pytest.raises(rest.RestError, match="wrong key"):
        rest.get(it.nodes[0].url + "/cluster")


def test_a_killed_launcher_leaves_no_node_behind(fake, tmp_path):
    code = (
        "import sys, time, pathlib; from lab.launch.cluster import LocalCluster, Processes\n"
        f"p = Processes(program={fake['processes'].program!r})\n"
        f"c = LocalCluster('mixed=1', processes=p, run_dir=pathlib.Path({str(tmp_path)!r}))\n"
        "c.start(); print(c['mixed-0'].pid, flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    with launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)
