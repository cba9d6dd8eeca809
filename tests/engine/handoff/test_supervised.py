"""Every loop of an engine node, killed by an exception that it does not expect: it goes on, or the node hears of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache.pool.block_pool import BlockPool
from engine.core.step_recorder import StepRecorder
from engine.handoff.reuse import Publisher
from engine.scaling.role_changes import RoleChanges
from net.channel.channel import BACKLOG_MAX, Channel
from net.errors import RemoteError
from net.loop.restarts import Restarts
from net.loop.supervisor import Supervisor
from net.metrics.events import Metrics
from sched.membership.member import Member
from tests.engine.core.test_worker import make, request, until
from tests.engine.scaling.test_role_changes import record


@contextmanager
def supervised():
    counted: list[str] = []
    reasons: list[str] = []
    supervisor = Supervisor(counted.append, reasons.append)
    supervisor.install()
    try:
        yield SimpleNamespace(counted=counted, reasons=reasons)
    finally:
        supervisor.remove()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Restarts after a millisecond."""
    monkeypatch.setattr("net.loop.tasks.Restarts", partial(Restarts, first_pause_s=0.001))


# --- the engine loop


class Raising:
    """A batching policy of the user's own that raises after n steps."""

    decodes_wait = False

    def __init__(self, after: int) -> None:
        self.left = after

    def prefill_tokens(self, load) -> int:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("my policy")
        return load.budget


@pytest.mark.expects_error("background task 'engine loop' failed and is not started again[\\s\\S]*my policy")
async def test_a_policy_that_raises_ends_the_node_and_no_request_waits_for_ever():
    worker, _ = make()
    got = []
    with supervised() as told:
        worker.start(got.extend)
        for i in range(4):
            worker.add(request(f"r{i}", max_tokens=500, token=i + 1))
        await until(lambda: len(got) > 8)
        worker.batcher._planner._policy = Raising(0)
        worker.add(request("last", token=9))
        await until(lambda: told.reasons)
        assert told.reasons == ["background task 'engine loop' failed: ZeroDivisionError: my policy"]
        ended = {e.request.request_id for e in got if e.error is not None}
        assert ended == {"r0", "r1", "r2", "r3", "last"}, "their acceptors place them again"
        with pytest.raises(RemoteError, match="cannot compute any more: ZeroDivisionError"):
            worker.add(request("late"))
        await worker.close()
    assert told.counted == ["engine loop"]
    assert worker.batcher.pool.references() == {"request": 0, "transfer": 0}


@pytest.mark.expects_error("background task 'engine loop' failed")
async def test_blocks_of_a_running_step_are_free_only_behind_it():
    """Handing out raises while the engine thread computes the next step."""
    worker, runner = make()
    repaired = asyncio.Event()

    def broken(emissions):
        if not repaired.is_set():
            runner.gate.clear()
            raise ConnectionError("the acceptor is gone")

    with supervised():
        worker.start(broken)
        worker.add(request("r", max_tokens=50))
        await until(lambda: not runner.gate.is_set())
        await asyncio.sleep(0.02)
        held = worker.batcher.pool.usage()["held"]
        repaired.set()
        runner.gate.set()
        await until(lambda: not worker.batcher.requests)
        assert held > 0 and worker.batcher.pool.usage()["held"] == 0
        await worker.close()


# --- records on a full disk


@pytest.mark.expects_error("--record-steps /dev/full: No space left on device; the recording ends here")
async def test_a_full_disk_ends_the_record_and_nothing_else():
    worker, _ = make()
    worker._recorder = StepRecorder(Path("/dev/full"))
    got = []
    worker.start(got.extend)
    worker.add(request("r", max_tokens=8))
    await until(lambda: len(got) == 8)
    await worker.close()
    assert worker.lost is None


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_whole_lines(tmp_path):
    path = tmp_path / "record"
    code = (
        "import resource, sys; from pathlib import Path; from engine.observe.line_file import LineFile\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); file = LineFile(Path({str(path)!r}), '--record-x')\n"
        "for i in range(200): file.add(b'%08d\\n' % i)\n"
        "assert not file.is_open; file.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert path.read_bytes() == b"".join(b"%08d\n" % i for i in range(111))


# --- what it tells others


async def test_a_post_never_raises_for_a_peer_that_is_gone():
    channel, lost = Channel("a", {}), []
    await channel.start("127.0.0.1")
    channel.introduce("b", ("127.0.0.1", 1))
    channel.on_lost(lost.append)
    for number in range(BACKLOG_MAX + 10):
        channel.post("b", "tokens", {"n": number})
    await until(lambda: lost)
    await channel.close()


# --- publishing, roles


@pytest.mark.expects_error("background task 'publishing blocks' failed and is started again")
async def test_publishing_goes_on_behind_a_batch_that_failed():
    pool, puts = BlockPool(8), []

    class Blocks:
        async def put(self, keys, blocks, facts, ttl_s):
            puts.append(blocks)
            if len(puts) == 1:
                raise KeyError("bug")
            return len(blocks)

    publisher = Publisher(pool, Blocks(), Metrics("m", "n"))
    with supervised() as told:
        publisher.start()
        blocks = pool.allocate(2)
        publisher.publish([(bytes(16), blocks[0], None)])
        await until(lambda: told.counted == ["publishing blocks"])
        publisher.publish([(bytes(16), blocks[1], None)])
        await until(lambda: len(puts) == 2 and publisher.backlog == 0)
        await publisher.close()
    assert pool.references()["transfer"] == 0 and told.reasons == []


@pytest.mark.expects_error("background task 'changing the role' failed")
async def test_role_changes_go_on_behind_a_look_that_failed():
    looks = []

    class Gossip:
        me = Member("p", ("h", 1), roles=("prefill", "decode"))
        members = (me,)

        @property
        def records(self):
            looks.append(len(looks))
            if len(looks) == 1:
                raise RuntimeError("bug")
            return {"p": record(0.0, "prefill")}

    shell = RoleChanges(Gossip(), SimpleNamespace(does=frozenset()), hold_s=0.02)
    with supervised() as told:
        shell.start()
        await until(lambda: len(looks) > 2)
        await shell.close()
    assert (told.counted, told.reasons) == (["changing the role"], [])
