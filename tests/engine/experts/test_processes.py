"""The processes of ranks while they load: one that hangs is killed, and a start that fails leaves nothing open."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from engine.checkpoint.model_source import describe
from engine.config.config import Config
from engine.experts import processes
from engine.experts.loading import LOADING, fill
from engine.experts.plan import Duty
from engine.experts.processes import ExpertProcesses, why_not_loaded
from tests.engine.tiny_families import save

HEAD = """
import sys, time
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
"""


@contextmanager
def rank(does: str) -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """A process that has the other end of the connection as `link`."""
    ours, theirs = Pipe()
    with ours:
        with theirs:
            command = [sys.executable, "-c", HEAD + does, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()


def test_one_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "LOAD_HUNG_S", 1.0)
    with rank("link.send('loading'); time.sleep(600)") as (link, process):
        assert why_not_loaded(link, process) == "it made no progress for 1 s and was killed"
        assert process.returncode == -9


def test_one_that_makes_progress_may_take_long(monkeypatch):
    monkeypatch.setattr(processes, "LOAD_HUNG_S", 2.0)
    slow = f"for _ in range(8): link.send({LOADING!r}) or time.sleep(0.35)\nlink.send(None); time.sleep(600)"
    with rank(slow) as (link, process):
        assert why_not_loaded(link, process) is None and process.poll() is None


@pytest.mark.parametrize(("does", "why"), [("link.send('no weights')", "no weights"), ("sys.exit(3)", "exit code 3")])
def test_one_that_cannot_load_says_why(does, why):
    with rank(does) as (link, process):
        assert why in (why_not_loaded(link, process) or "")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("mixtral")
    save("mixtral", folder)
    return Config(
        model=str(folder), dtype="float32", device="cpu", num_threads=1, expert_parallel_size=2,
        max_num_batched_tokens=64,
    )  # fmt: skip


def open_files() -> list[str]:
    """Shared memory and sockets of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # the one that lists the others
            continue
    return sorted(name for name in found if name.startswith(("/memfd:", "socket:")))


def test_a_start_that_fails_leaves_nothing_open(config, monkeypatch):
    def fails(*command: object, **options: object) -> None:
        raise OSError("no more processes")

    source, before = describe(config.model), open_files()
    monkeypatch.setattr(processes.subprocess, "Popen", fails)
    with pytest.raises(OSError, match="no more processes"):
        ExpertProcesses(config, source)
    assert open_files() == before


def test_a_share_tells_how_far_it_is(config, monkeypatch):
    """Each weight that was read is a sign of progress; the process of the other rank ends at once here."""
    monkeypatch.setattr(processes, "WORKER", "no_such_module")
    made, signs = ExpertProcesses(config, describe(config.model)), list[tuple[int, ...]]()
    try:
        duty = Duty(0, made.plan, made.placement)
        fill(duty, describe(config.model), made.shares, progress=lambda *read: signs.append(read))
        experts = made.placement.layers
        assert len(signs) == 3 * sum(len(layer[0]) for layer in experts)
        assert "exit code 1" in (made._loaded(1) or "")
    finally:
        made.close()
