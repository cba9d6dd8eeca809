"""A process that ends while it compiles takes the compilers along."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from net import compiled
from net.compiled import NotCompiled


def gone(pid: str) -> bool:
    """No such process, or only its exit code is left for the process that adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_abandoned_compilers_end_with_what_they_have_started(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_abandoned", threading.Event())  # later tests of this process compile
    told = tmp_path / "told"
    inner = f"sh -c 'echo $$ >{told}.part; mv {told}.part {told}; exec sleep 1000'; exit 0"
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(compiled.run, ["sh", "-c", inner])
        while not told.exists():
            assert not work.done(), work.result()
            time.sleep(0.01)
        compiled.abandon()
        with pytest.raises(NotCompiled, match="about to end"):  # not refused: nodes log that as an error
            work.result(60)
    while not gone(told.read_text().strip()):  # without the kill it would go on for 1000 s
        time.sleep(0.01)
    with pytest.raises(NotCompiled, match="about to end"):
        compiled.run(["true"])


def test_what_a_killed_process_left_of_a_compilation_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = compiled.folder("tests") / "code-x1y2"
    left.mkdir(parents=True)
    (left / "half.o").write_bytes(b"half")
    path = compiled.kept("tests", "code", [b"source"], lambda out: out.write_bytes(b"whole"))
    assert path.read_bytes() == b"whole"
    assert [*path.parent.iterdir()] == [path]
