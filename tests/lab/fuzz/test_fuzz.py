"""A short fuzz of every decoder with a new seed each time, and the fuzzer itself: it repeats, and it finds."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from lab.fuzz import decoders as command
from lab.fuzz import leases
from lab.fuzz.gossip import GossipTarget
from lab.fuzz.mutate import mutated
from lab.fuzz.targets import Target, fuzz, run_all, targets

ROOT = Path(__file__).resolve().parents[3]
INPUTS = 150


def test_no_decoder_raises_what_it_does_not_declare():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    names = []
    assert run_all(INPUTS, seed, names.append) == []
    assert len(names) >= 20


def test_the_same_seed_makes_the_same_inputs():
    corpus = [b"hello world", bytes(40)]
    first, second = ([mutated(rng, corpus) for _ in range(50)] for rng in (Random(3), Random(3)))
    assert first == second
    assert len(set(first)) > 40


def test_another_process_starts_from_the_same_gossip():
    """Its corpus is what two cores say: with keys by hash(), which differs between processes, no seed is replayed."""
    code = "from lab.fuzz.gossip import GossipTarget; print(b''.join(GossipTarget.corpus()).hex())"
    here = b"".join(GossipTarget.corpus()).hex()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def test_a_handler_that_fails_is_found(monkeypatch):
    """Its peer gets `internal error` as an answer, as it gets every refusal."""

    async def fails() -> None:
        raise KeyError("lease")

    monkeypatch.setattr(leases, "_begun", lambda channel, message: [asyncio.ensure_future(fails())])
    with pytest.raises(AssertionError, match="a handler failed: KeyError"):
        leases.LeasesTarget().feed(leases.LeasesTarget.corpus[0])


def test_a_decoder_that_breaks_is_found_with_its_input():
    def breaks(data: bytes) -> None:
        if len(data) > 3 and data[3] == 0xFF:
            raise IndexError("beyond")

    crash = fuzz(Target("breaks", breaks, (ValueError,), [bytes(8)]), 2000, 1)
    assert crash is not None and isinstance(crash.error, IndexError)
    with pytest.raises(IndexError):
        breaks(crash.data)


def test_the_command(capsys, tmp_path):
    assert command.main(["--inputs", "20", "--seed", "4", "--only", "spans", "--json", str(tmp_path / "x.json")]) == 0
    assert "seed 4" in capsys.readouterr().out
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["config"]["seed"] == 4 and [row["case"] for row in written["rows"]] == ["spans"] * 2
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])


def test_every_decoder_takes_what_it_starts_from(tmp_path):
    """Else a mutation seldom gets beyond the first check."""
    for target in targets(tmp_path):
        for data in target.corpus:
            target.decode(data)
