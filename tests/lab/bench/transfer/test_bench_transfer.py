"""scripts/bench.py transfer: real contenders on tiny arenas, and the judgement of its goals."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lab.bench.transfer import command as bench_transfer
from lab.bench.transfer.agent import plan
from lab.bench.transfer.contenders import TRIES, Contenders
from lab.bench.transfer.pairs import Arenas, Missing
from lab.bench.transfer.verdict import verdicts

KIB, MIB = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parents[4]


def test_a_plan_visits_no_block_twice_and_joins_none():
    calls = plan(64 * KIB, 4, 4 * MIB)
    here = [offset for ours, _ in calls for offset in ours]
    there = [offset for _, theirs in calls for offset in theirs]
    assert len(calls) == 16
    assert sorted(here) == sorted(there) == list(range(0, 4 * MIB, 64 * KIB))
    assert here != there


def test_blocks_that_did_not_arrive_are_seen():
    arenas = Arenas(MIB)
    calls = {"first": ([0], [64 * KIB]), "last": ([128 * KIB], [0])}
    arenas.begin("read", 64 * KIB)
    assert arenas.wrong(calls, 64 * KIB) == 2
    local, remote = arenas._bytes["local"], arenas._bytes["remote"]
    local[: 64 * KIB] = remote[64 * KIB : 128 * KIB]
    assert arenas.wrong(calls, 64 * KIB) == 1


def test_goals_are_judged_by_ratios_of_one_run():
    cell = {"gbs": 9.0, "p50_us": 10.0, "p99_us": 31.0, "threads": 1}
    cells = {("ours-shm", "read", 368 * KIB, 1): cell, ("memcpy", "read", 368 * KIB, 1): cell | {"gbs": 10.1}}
    rows = verdicts(cells)
    assert [(row["met"], round(row["ratio"], 2)) for row in rows] == [(False, 0.89), (False, 3.1)]


def test_two_copying_threads_are_compared_with_two_of_memcpy():
    cell = {"gbs": 9.0, "p50_us": 10.0, "p99_us": 20.0, "threads": 2}
    case = ("read", 368 * KIB, 32)
    cells = {
        ("ours-shm", *case): cell,
        ("memcpy", *case): cell | {"gbs": 5.0},
        ("memcpy-2", *case): cell | {"gbs": 18.0},
    }
    assert [(row["what"], row["ratio"]) for row in verdicts(cells)] == [
        ("read 368K x32: GB/s of ours-shm / memcpy-2", 0.5)
    ]


def test_encrypted_transfers_are_judged_by_plain_ones_of_the_same_run():
    cell = {"gbs": 2.0, "p50_us": 10.0, "p99_us": 20.0, "threads": 1}
    cells = {
        (name, "read", size, 1): cell | {"gbs": speed}
        for size in (64 * KIB, MIB)
        for name, speed in (("ours-tcp", 2.0), ("ours-tcp-key", 1.0))
    }
    assert [(row["what"], row["ratio"], row["goal"], row["met"]) for row in verdicts(cells)] == [
        ("read 1M x1: GB/s of ours-tcp-key / ours-tcp", 0.5, ">= 0.6", False)
    ]
    assert {"ours-tcp", "ours-tcp-key"} <= set(bench_transfer.parse([]).names)


class Flaky:
    """A contender whose process fails in its second cell, and every process from the third on never fails."""

    made: ClassVar[list[Any]] = []

    def __init__(self, name, python, arenas, congestion):
        self.name, self.cells, self.closed = name, 0, False
        Flaky.made.append(self)

    def cell(self, op, size, batch, seconds):
        self.cells += 1
        if self.cells == 2 and len(Flaky.made) < 3:
            raise Missing("a put returned -200")
        return {"n": 1, "gbs": 1.0 * self.cells, "p50_us": 1.0, "p99_us": 1.0, "cpu_s_per_gb": 1.0, "threads": 1}

    def close(self):
        self.closed = True


def test_a_contender_that_fails_is_started_again_and_has_as_many_rounds(monkeypatch):
    monkeypatch.setattr("lab.bench.transfer.contenders.Pair", Flaky)
    Flaky.made = []
    grid = [("write", 4 * KIB, 1), ("read", 4 * KIB, 1)]
    with ExitStack() as stack:
        contenders = Contenders({"flaky": Path("python")}, Arenas(MIB), "reno", stack)
        cells = contenders.measure(grid, 3, 0.01, lambda text: None)
    assert {key[1]: cell["rounds"] for key, cell in cells.items()} == {"write": 3, "read": 3}
    assert contenders.failures == ["flaky, read 4K x1: a put returned -200", "flaky, write 4K x1: a put returned -200"]
    assert len(Flaky.made) == 3 and all(pair.closed for pair in Flaky.made)


def test_a_contender_that_does_not_start_again_at_once_is_tried_again(monkeypatch):
    """Its port may be taken for a moment: it still gets its cells and as many rounds."""

    class Late(Flaky):
        def __init__(self, *given):
            super().__init__(*given)
            if len(Flaky.made) == 2:
                raise Missing("no answer within 60 s")

    monkeypatch.setattr("lab.bench.transfer.contenders.Pair", Late)
    Flaky.made = []
    with ExitStack() as stack:
        contenders = Contenders({"late": Path("python")}, Arenas(MIB), "reno", stack)
        cells = contenders.measure([("write", 4 * KIB, 1), ("read", 4 * KIB, 1)], 2, 0.01, lambda text: None)
    assert {key[1]: cell["rounds"] for key, cell in cells.items()} == {"write": 2, "read": 2}
    assert contenders.missing == {}
    assert contenders.failures[1] == "late: it did not start again: no answer within 60 s"


def test_a_contender_that_never_starts_again_is_given_up(monkeypatch):
    class Gone(Flaky):
        def __init__(self, *given):
            super().__init__(*given)
            if len(Flaky.made) > 1:
                raise Missing("no memory")

        def cell(self, op, size, batch, seconds):
            raise Missing("a put returned -200")

    monkeypatch.setattr("lab.bench.transfer.contenders.Pair", Gone)
    Flaky.made = []
    with ExitStack() as stack:
        contenders = Contenders({"gone": Path("python")}, Arenas(MIB), "reno", stack)
        assert contenders.measure([("write", 4 * KIB, 1), ("read", 4 * KIB, 1)], 3, 0.01, lambda text: None) == {}
    assert contenders.missing == {"gone": "no memory"} and len(Flaky.made) == 1 + TRIES


@pytest.mark.parametrize(
    "flags", [["--ops", "raed"], ["--sizes", ""], ["--sizes", "4K,"], ["--sizes", "0K"], ["--batches", "0"]]
)
def test_wrong_flags_are_one_clear_line(flags, capsys):
    with pytest.raises(SystemExit) as end:
        bench_transfer.parse(flags)
    assert end.value.code == 2 and flags[0] in capsys.readouterr().err


def test_no_process_outlives_a_run_that_is_killed(tmp_path):
    """Processes stand still between their turns, and such a one does not see that its socket has ended."""
    code = (
        "import os, signal, sys;"
        "from lab.bench.transfer.pairs import Arenas, Pair;"
        "pair = Pair('memcpy', sys.executable, Arenas(1 << 20), 'reno');"
        "print(*(process._child.pid for process in pair._processes), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    left = [int(pid) for pid in done.stdout.split()]
    try:
        assert len(left) == 2 and done.returncode == -signal.SIGKILL
        while any(runs(pid) for pid in left):  # the test's own limit ends it
            time.sleep(0.01)
    finally:
        for pid in left:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Whether it is there and no zombie, and still a process of this benchmark."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"lab.bench.transfer.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_cell_that_never_succeeds_is_left_out_and_the_others_stay(monkeypatch):
    class Broken(Flaky):
        def cell(self, op, size, batch, seconds):
            if op == "read":
                raise Missing("no route")
            return super().cell(op, size, batch, seconds)

    monkeypatch.setattr("lab.bench.transfer.contenders.Pair", Broken)
    Flaky.made = [None] * 3
    with ExitStack() as stack:
        contenders = Contenders({"broken": Path("python")}, Arenas(MIB), "reno", stack)
        cells = contenders.measure([("read", 4 * KIB, 1), ("write", 4 * KIB, 1)], 2, 0.01, lambda text: None)
    assert [key[1] for key in cells] == ["write"]
    assert contenders.failures == ["broken, read 4K x1: no route"] * TRIES * 2


def test_every_contender_has_the_same_congestion_control():
    """In a process of its own: the network namespace stays with the process."""
    code = (
        "import socket;"
        "from lab.bench.transfer.network import one_congestion_control as one;"
        "name = one('reno'); s = socket.socket();"
        "listener = socket.create_server(('127.0.0.1', 0)); s.connect(listener.getsockname());"
        "found = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(bytes(1))[0].decode();"
        "print(name, found)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    in_force, used = done.stdout.split()
    assert used == in_force


@pytest.fixture
def same_network(monkeypatch):
    """The benchmark stays in the network of the tests' process."""
    monkeypatch.setattr("lab.bench.transfer.shared.one_congestion_control", lambda name: "reno")


def test_one_run_of_ours_with_the_limits_with_the_peers_missing(tmp_path, capsys, same_network):
    out = tmp_path / "cells.json"
    arguments = ["--quick", "--seconds", "0.01", "--sizes", "64K", "--batches", "1,4", "--arena-mb", "8"]
    arguments += ["--only", "memcpy,memcpy-2,sockets,stream,ours-shm,ours-tcp,ours-tcp-key,nixl", "--json", str(out)]
    assert bench_transfer.main(arguments) == 0
    text = capsys.readouterr().out
    assert "missing: nixl: name an interpreter that has it with --peer-python" in text
    result = json.loads(out.read_text())
    config = result["config"]
    assert set(config["missing"]) == {"nixl"} and config["failures"] == [] and config["congestion"] == "reno"
    assert "cpu_features" in config["machine"] and "quiet" in config["machine"]
    speeds = [row for row in result["rows"] if row["metric"] == "GB/s"]
    assert [row["case"] for row in speeds if "shared" in row["case"]] == [
        f"{op} 64K x{batch}, shared memory" for batch in (1, 4) for op in ("read", "write")
    ]
    for row in speeds:
        shared = "shared" in row["case"]
        assert row["ours"] > 0 and row["rounds"] == 1 and set(row["samples"]) == set(row["threads"])
        key = "cluster key" in row["case"]
        limits = {"memcpy", "memcpy-2"} if shared else {"ours-tcp", "sockets"} if key else {"sockets", "stream"}
        assert set(row["limits"]) == limits
        assert row["peers"] == ({"nixl": None} if shared else {} if key else {"mooncake-te": None})
        assert all(count >= 1 for count in row["threads"].values())
    assert any(row["unit"] == "ms" and "event loop" in row["case"] for row in result["rows"])
