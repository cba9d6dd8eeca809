"""The shell of the width: it calls the command for the node's ranks, says who does not come, and ends what it began."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.flags import UsageError, parse
from engine.scaling.rank_scaler import RankScaler
from net.metrics.events import Metrics
from sched.gossip.record import NodeRecord
from sched.scaling.width import Rank
from tests.engine.scaling.test_scaler import member, record

SIZES = ["--expert-parallel-size", "2", "--max-expert-parallel-size", "3"]
TIMES = ["--scale-out-ms", "100", "--scale-in-ms", "400"]
WAIT_S = 60.0


class Played:
    """A node whose load and ranks the test sets, and a command that writes its arguments into a file."""

    def __init__(self, folder: Path, *flags: str, fails: bool = False) -> None:
        self.path, self.joined = folder / "calls", list[Rank]()
        self.records: dict[str, NodeRecord] = {}
        script = self.script = folder / "command"
        script.write_text(f'#!/bin/sh\necho "$@" >>{self.path}\n' + "echo no host is free; exit 1\n" * fails)
        script.chmod(0o755)
        command = f"{script} {{action}} {{role}} {{name}} {{join}}"
        config = parse(["--node-id", "n", *SIZES, *TIMES, *flags, "--expert-scale-command", command])
        gossip: Any = SimpleNamespace(me=member("n"), records=self.records)
        ranks: Any = SimpleNamespace(where="10.0.0.1:9100", joined=lambda: self.joined, experts_s=0.0)
        self.metrics = Metrics("m", "n")
        self.shell = RankScaler(config, gossip, ranks, self.metrics)

    def load(self, running: int) -> None:
        self.records["n"] = record(running)

    @property
    def calls(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.calls) < count:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)

    async def done(self, action: str) -> None:
        """Until the command has ended once for this action: one that is cut off is repeated at the end."""
        async with asyncio.timeout(WAIT_S):
            while not any(  # noqa: ASYNC110 - another task
                line.startswith("mooncake:scaling_actions_total{") and f'action="{action}"' in line and "done" in line
                for line in self.metrics.text().decode().splitlines()
            ):
                await asyncio.sleep(0.01)

    async def counts(self, name: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.shell.state()[name] != count:  # noqa: ASYNC110 - another task
                await asyncio.sleep(0.01)


START, STOP = (f"{action} expert-rank n-rank-0 10.0.0.1:9100" for action in ("start", "stop"))


async def test_a_rank_starts_with_the_load_and_ends_with_it(tmp_path):
    played = Played(tmp_path)
    played.load(running=4)
    played.shell.start()
    try:
        await played.until(1)
        played.joined.append(Rank(2, "n-rank-0", True))
        played.load(running=0)
        await played.until(2)
        assert played.calls == [START, STOP]
        await played.counts("draining", 1)
        draining = [line for line in played.metrics.text().decode().splitlines() if 'state="draining"' in line]
        assert len(draining) == 1 and 'role="expert-rank"' in draining[0] and draining[0].endswith(" 1.0")
        played.joined.clear()
        await played.until(3)
        await played.done("stop")
    finally:
        await played.shell.close()
    assert played.calls == [START, STOP, STOP], "the second one frees what it ran on"


async def test_a_rank_that_does_not_come_is_told_in_one_line_and_asked_for_again(tmp_path, caplog):
    played = Played(tmp_path, "--scale-start-ms", "200")
    played.load(running=4)
    played.shell.start()
    try:
        async with asyncio.timeout(WAIT_S):
            while played.calls.count(START) < 2 or STOP not in played.calls:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
    finally:
        await played.shell.close()
    told = [line for line in caplog.text.splitlines() if "n-rank-0 was not ready 0.2 s after its start" in line]
    assert told and "given up: 3 needed, 2 ready" in told[0]


async def test_a_command_that_fails_is_called_again(tmp_path, caplog):
    played = Played(tmp_path, fails=True)
    played.load(running=4)
    played.shell.start()
    try:
        await played.until(2)
    finally:
        await played.shell.close()
    assert (
        played.calls[:2] == [START, START] and "could not start n-rank-0: exit code 1: no host is free" in caplog.text
    )


async def test_a_node_that_stops_ends_the_ranks_that_it_started(tmp_path):
    played = Played(tmp_path)
    played.load(running=0)
    played.joined += [Rank(2, "n-rank-0", True)]
    played.shell.start()
    await played.counts("ready", 3)
    await played.shell.close()
    assert set(played.calls) == {STOP}


async def test_a_node_that_stops_repeats_a_stop_that_its_end_cut_off(tmp_path):
    played = Played(tmp_path, "--scale-start-ms", "200")
    played.script.write_text(
        f'#!/bin/sh\necho "$@" >>{played.path}\n'
        f'[ "$1" = start ] || [ -e {tmp_path}/hung ] || {{ touch {tmp_path}/hung; exec sleep 600; }}\n'
    )
    played.load(running=4)
    played.shell.start()
    async with asyncio.timeout(WAIT_S):
        while not (tmp_path / "hung").exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    before = played.calls.count(STOP)
    await played.shell.close()
    assert before == 1 and played.calls.count(STOP) == 2


async def test_a_node_that_is_not_ready_starts_nobody(tmp_path):
    """It does so with the same load once it is ready."""
    played = Played(tmp_path)
    played.records["n"] = record(4, blocks_total=0)
    played.shell.start()
    try:
        await played.counts("needed", 3)
        await asyncio.sleep(0.5)
        assert played.calls == []
        played.load(running=4)
        await played.until(1)
    finally:
        await played.shell.close()
    assert played.calls[0] == START


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give --max-expert-parallel-size"),
        (["--expert-parallel-size", "2"], "give --max-expert-parallel-size"),
        (["--expert-parallel-size", "2", "--max-expert-parallel-size", "2"], "give --max-expert-parallel-size"),
        ([*SIZES, "--expert-scale-command", "run {action} {role}"], "does not use {name}"),
    ],
)
def test_flags_that_cannot_be(flags, words):
    with pytest.raises(UsageError, match=words.replace("{", r"\{")):
        parse(["--expert-scale-command", "run {action} {role} {name}", *flags])
