"""Processes of ranks: their signals, their exit codes, and that none outlives the launcher."""

from __future__ import annotations

import signal

import pytest

from lab.launch.expert_ranks import ExpertRanks


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
