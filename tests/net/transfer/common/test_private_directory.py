"""What a process leaves in the temporary directory: nothing, or until the next one comes."""

import subprocess
import sys
from pathlib import Path

from net.transfer.common.private_directory import PrivateDirectory, sweep

PROJECT = Path(__file__).parents[4]
HOLD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from net.transfer.common.private_directory import PrivateDirectory
directory = PrivateDirectory()
(directory.path / "shm").touch()
print(directory.path, flush=True)
sys.stdin.read()
"""


def holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", HOLD, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mooncake-other").mkdir()
    (dead, left), (alive, kept) = holder(tmp_path), holder(tmp_path)
    with dead, alive:
        dead.kill()
        dead.wait()
        assert left.exists()
        ours = PrivateDirectory()
        assert not left.exists(), "made after the other was killed, it sweeps"
        assert kept.exists() and ours.path.exists()
        assert sweep(tmp_path) == 0, "both are held"
        ours.close()
        ours.close()
        alive.kill()
        alive.wait()
    assert sweep(tmp_path) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["mooncake-other"], "not ours by its name"


def test_two_that_sweep_at_once_do_not_take_each_others(tmp_path, monkeypatch):
    """One whose directory was swept between its making and its locking makes another."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def swept_at_once(prefix: str) -> str:
        path = tmp_path / f"{prefix}{len(made)}"
        path.mkdir()
        if not made:
            assert sweep(tmp_path) == 1
        made.append(path)
        return str(path)

    monkeypatch.setattr("tempfile.mkdtemp", swept_at_once)
    directory = PrivateDirectory()
    assert (directory.path, len(made)) == (made[1], 2)
    directory.close()
    assert list(tmp_path.iterdir()) == []
