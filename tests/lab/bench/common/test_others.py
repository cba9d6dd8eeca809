"""The guard of quiet machines: what others used during a run, without this process, what it started, and the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.common import machine
from lab.bench.common.others import PROC, TICKS_PER_S, Others, others

OURS = 40


def process(proc: Path, pid: int, parent: int, cpu_s: float, name: str = "a (b) c", started: int = 7) -> None:
    """cpu_s: a quarter each as user and system time of the process and of its children that ended."""
    ticks = round(cpu_s * TICKS_PER_S / 4)
    behind = ["S", parent, *[0] * 9, *[ticks] * 4, *[0] * 4, started, 0, 0]
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, behind))}")


def steal(proc: Path, seconds: float) -> None:
    (proc / "stat").write_text(f"cpu  1 2 3 4 5 6 7 {round(seconds * TICKS_PER_S)} 0 0\ncpu0 9\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """init, the kernel's threads, a shell that started us, our server and its child, and a stranger."""
    for pid, parent, cpu_s, name in (
        (1, 0, 8.0, "init"),
        (2, 0, 0.0, "kthreadd"),
        (3, 2, 8.0, "ksoftirqd/0"),
        (30, 1, 8.0, "bash"),
        (OURS, 30, 8.0, "python"),
        (50, OURS, 8.0, "server"),
        (60, 50, 8.0, "worker"),
        (90, 30, 80.0, "stranger"),
    ):
        process(tmp_path, pid, parent, cpu_s, name)
    steal(tmp_path, 5.0)
    return tmp_path


def test_only_strangers_count(proc):
    since = Others(proc, OURS, cores=2)
    for pid, parent, name in ((OURS, 30, "python"), (50, OURS, "server"), (60, 50, "worker"), (3, 2, "ksoftirqd/0")):
        process(proc, pid, parent, 20.0, name)
    process(proc, 1, 0, 20.0, "init")
    assert since.share(10.0) == 0.0
    process(proc, 90, 30, 81.0)
    assert since.share(10.0) == pytest.approx(0.05)
    process(proc, 91, 90, 3.0)  # new
    assert since.share(10.0) == pytest.approx(0.2)
    steal(proc, 11.0)
    assert since.share(10.0) == pytest.approx(0.5)


def test_a_process_that_ended_counts_from_the_start_of_the_run(proc):
    since = Others(proc, OURS, cores=2)
    (proc / "90" / "stat").unlink()
    process(proc, 30, 1, 8.0 + 84.0, "bash")  # it waited for the stranger: 80 s before, 4 s since
    assert since.share(10.0) == pytest.approx(0.2)


def test_one_that_nobody_waited_for_takes_nothing_from_the_others(proc):
    process(proc, 95, 1, 40.0)
    since = Others(proc, OURS, cores=2)
    (proc / "95" / "stat").unlink()
    process(proc, 90, 30, 82.0)
    assert since.share(10.0) == pytest.approx(0.1)


def test_a_process_id_that_is_used_again_is_another_process(proc):
    since = Others(proc, OURS, cores=2)
    process(proc, 90, 30, 2.0, started=8)
    process(proc, 30, 1, 8.0 + 80.0, "bash")
    assert since.share(10.0) == pytest.approx(0.1)


def test_orphans_of_ours_do_not_count_nor_what_they_start(proc):
    """The server is killed: process 1 takes over its worker, and one that started meanwhile."""
    since = Others(proc, OURS, cores=2)
    (proc / "50" / "stat").unlink()
    process(proc, 60, 1, 20.0, "worker")
    process(proc, 61, 1, 20.0, "later worker")
    process(proc, 62, 60, 20.0, "child of a worker")
    assert since.share(10.0) == 0.0
    process(proc, 90, 1, 81.0, "stranger")  # it was there, also with another parent now
    assert since.share(10.0) == pytest.approx(0.05)
    process(proc, 91, 90, 1.0)
    assert since.share(10.0) == pytest.approx(0.1)


def test_a_container_may_have_an_ordinary_process_2(proc):
    process(proc, 2, 0, 0.0, "bash")
    since = Others(proc, OURS, cores=2)
    process(proc, 3, 2, 10.0, "ksoftirqd/0")
    assert since.share(10.0) == pytest.approx(0.1)


@pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="no /proc")
def test_our_children_are_not_others():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {pid for pid, _ in others(PROC, os.getpid())}
        child.communicate(b"\n")
    assert child.pid not in found and os.getpid() not in found
    assert os.getppid() in found | {0, 1}


@pytest.mark.parametrize(("load", "share", "quiet"), [(0.1, 0.01, True), (0.1, 0.3, False), (2.0, 0.01, False)])
def test_a_machine_is_quiet_before_and_during_the_run(monkeypatch, load, share, quiet):
    monkeypatch.setattr(machine, "LOAD_BEFORE", load)
    monkeypatch.setattr(machine.OTHERS, "share", lambda: share)
    found = machine.machine()
    assert (found["load_before"], found["others_share"], found["quiet"]) == (load, share, quiet)
    assert f"{load:.2f}" in machine.busy_note(found) and f"{share:.0%}" in machine.busy_note(found)
