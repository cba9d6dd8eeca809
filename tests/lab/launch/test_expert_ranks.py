"""Processes of ranks: their signals, their exit codes, and that none outlives the launcher."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from lab.launch.expert_ranks import ROOT, ExpertRanks


def test_processes_are_started_signalled_and_ended():
    with ExpertRanks(["--join", "127.0.0.1:1"]) as ranks:
        ranks.start("a")
        ranks.send("a", signal.SIGTERM)
        assert ranks.code("a") == -signal.SIGTERM
        ranks.start("refused", "--rank", "64")
        assert ranks.code("refused") == 2
        ranks.start("a")
        first = ranks._processes["a"]
        ranks.start("a")
        assert first.poll() == -signal.SIGKILL
        last = ranks._processes["a"]
    assert last.poll() == -signal.SIGKILL
    with pytest.raises(KeyError):
        ranks.code("a")


def test_a_killed_launcher_leaves_no_rank_behind():
    code = (
        "import time; from lab.launch.expert_ranks import ExpertRanks\n"
        "ranks = ExpertRanks(['--join', '127.0.0.1:1']); ranks.start('a')\n"
        "print(ranks._processes['a'].pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as launcher:
        pid = int(launcher.stdout.readline())
        rank = os.pidfd_open(pid)
        try:
            while Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] != sys.executable.encode():
                assert not select.select([rank], [], [], 0.0)[0]  # until setpriv has become the rank
            launcher.kill()
            assert select.select([rank], [], [], 60.0)[0], "the rank outlives its launcher"
        finally:
            launcher.kill()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank, signal.SIGKILL)
            os.close(rank)
