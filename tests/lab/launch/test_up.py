"""scripts/up as its user meets it: exit codes, what is printed, and nothing left running. Nodes are fakes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.config.flags import UsageError
from lab.launch.cluster import ROOT
from lab.launch.up import made, read_arguments

MAIN = (
    "import sys; from lab.launch.cluster import Processes; from lab.launch.up import main; "
    "sys.exit(main(sys.argv[2:], processes=Processes(program=(sys.executable, sys.argv[1]))))"
)


def launch(fake, tmp_path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, fake["processes"].program[1], *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "160"},
        preexec_fn=interruptible,
    )


def interruptible() -> None:
    """Ctrl-C reaches the child also where pytest-xdist's worker ignores it, which children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, f"ended before {text!r}: {seen}"
        seen += line
    return seen


def pids_gone(text: str) -> bool:
    pids = re.findall(r"http://127\.0\.0\.1:\d+ +(\d+)", text)
    assert pids
    return not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


def test_ask_prints_answer_and_timeline_and_stops(fake, tmp_path):
    code, out, err = outcome(launch(fake, tmp_path, "--ask", "Hello?"))
    assert (code, err) == (0, "")
    assert "You said: Hello?" in out
    assert "37 prompt tokens (16 from cache), 8 output tokens" in out
    assert "1.7 MiB by shm" in out
    assert "decode decode-0" in out
    for phase in ("queue", "prefix fetch", "prefill", "transfer", "first token", "decode"):
        assert re.search(rf"^{phase} +[\d.]+ ", out, re.M), phase
    assert re.search(r"250\.0 +decode-0 +first_token", out)
    assert pids_gone(out)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_interrupted(fake, tmp_path, signum):
    process = launch(fake, tmp_path, "--nodes", "prefill=2,store=1")
    seen = read_until(process, "Ctrl-C stops")
    process.send_signal(signum)
    code, _, err = outcome(process)
    assert (code, err) == (0, "")
    assert re.search(r"prefill-1 +prefill +http://127", seen)
    assert "shm to prefill-1, store-0" in seen
    assert "curl -s http://127.0.0.1:" in seen
    assert pids_gone(seen)


def test_a_dying_node_ends_the_cluster_with_its_last_words(fake, tmp_path):
    process = launch(fake, tmp_path, "--nodes", "prefill=1,store=1")
    seen = read_until(process, "Ctrl-C stops")
    victim = re.search(r"store-0 +store +http://127\.0\.0\.1:\d+ +(\d+)", seen)
    assert victim is not None
    os.kill(int(victim[1]), signal.SIGKILL)
    code, _, err = outcome(process)
    assert code == 1
    assert "store-0 ended with exit code -9" in err
    assert "store-0: loading" in err
    assert "Traceback" not in err
    assert pids_gone(seen)


def test_a_node_that_leaves_is_said_and_the_others_go_on(fake, tmp_path):
    process = launch(fake, tmp_path, "--nodes", "prefill=1,store=1")
    seen = read_until(process, "Ctrl-C stops")
    leaver = re.search(r"store-0 +store +http://127\.0\.0\.1:\d+ +(\d+)", seen)
    assert leaver is not None
    os.kill(int(leaver[1]), signal.SIGTERM)
    read_until(process, "store-0 has left; 1 nodes go on")
    process.send_signal(signal.SIGINT)
    code, _, err = outcome(process)
    assert (code, err) == (0, "")
    assert pids_gone(seen)


def test_a_failed_question_exits_with_1(fake, tmp_path):
    code, _, err = outcome(launch(fake, tmp_path, "--nodes", "mixed=1", "--ask", "die"))
    assert code == 1
    assert "chat/completions" in err or "exit code 7" in err
    assert "Traceback" not in err


def test_a_node_that_refuses_its_flags_is_reported(fake, tmp_path):
    code, _, err = outcome(launch(fake, tmp_path, "--model", "missing"))
    assert code == 1
    assert "no model named missing; give a directory" in err


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--node", "prefill=2"], "did you mean --nodes?"),
        (["--blok-size", "16"], "did you mean --block-size?"),
        (["--nodes", "prefil=2"], "did you mean prefill?"),
        (["--role", "store"], "say --nodes"),
        (["--join", "a:1"], "start mooncake.py yourself"),
        (["--port", "x"], "--port"),
        (["--port", "70000"], "a port from 0 to 65535"),
        (["--nodes", "mixed=2", "--port", "65535"], "give 0 to 65534"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(fake, tmp_path, argv, remedy):
    code, out, err = outcome(launch(fake, tmp_path, *argv))
    assert (code, out) == (2, "")
    assert err.startswith("scripts/up: ")
    assert remedy in err
    assert err.count("\n") == 1


def test_other_flags_go_to_every_node():
    options, flags, config = read_arguments(["--nodes", "mixed=1", "--block-size", "32", "--", "--seed", "7"])
    assert options.nodes == "mixed=1"
    assert flags == ["--block-size", "32", "--seed", "7"]
    assert (config.block_size, config.seed) == (32, 7)
    with pytest.raises(UsageError):
        read_arguments(["--block", "32"])


def test_nodes_that_compile_their_kernels_on_busy_cores_are_waited_for(monkeypatch, tmp_path):
    """For as long as --scale-start-ms waits for a node. They were stopped after three minutes, and began again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    options, flags, config = read_arguments([])
    assert made(options, flags, config, {}).start_timeout_s >= config.scale_start_ms / 1000
