"""The backend mooncake of torch.distributed between real processes: every collective next to gloo's, and faults."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lab.conformance.answers import ours
from tests.modules import ROOT

TCP = {"MC_FORCE_TCP": "1"}


@pytest.fixture(scope="module")
def forks():
    """Runs a scenario (scenarios.py) in forked ranks; answers [exit code, text] per rank."""
    command = [sys.executable, "-m", "tests.connect.process_group.forked_ranks"]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(scenario, ranks, env=None, joiners=()):
        order = {"scenario": scenario, "ranks": ranks, "joiners": list(joiners), "env": env or {}}
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield run
    server.stdin.close()
    assert server.wait(20) == 0


def told(answer):
    """The texts of ranks that all ended well."""
    assert [code for code, _ in answer] == [0] * len(answer), "\n".join(text for _, text in answer)
    return [text for _, text in answer]


def test_a_program_finds_the_backend_under_upstreams_name():
    code = "import torch, torch.distributed as dist, mooncake.pg as pg\n"
    code += "dist.init_process_group('mooncake-cpu', store=dist.HashStore(), rank=0, world_size=1)\n"
    code += "x = torch.ones(2)\ndist.all_reduce(x)\nprint(x.tolist(), pg.get_active_ranks(), dist.get_backend())\n"
    code += "dist.destroy_process_group()"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd="/", env=ours(), capture_output=True, text=True)
    assert done.stdout == "[1.0, 1.0] tensor([1], dtype=torch.int32) mooncake-cpu\n", done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_gloo_gives_through_shared_memory(forks, ranks):
    assert told(forks("against_gloo", ranks)) == ["shared memory"] * ranks


def test_every_collective_gives_what_gloo_gives_over_sockets(forks):
    assert told(forks("against_gloo", 4, TCP)) == ["sockets"] * 4


@pytest.mark.parametrize("env", [{}, TCP], ids=["shm", "tcp"])
def test_a_killed_rank_ends_the_call_of_the_others_who_then_go_on(forks, env):
    answer = forks("killed", 3, env)
    assert answer.pop()[0] == -9
    for text in told(answer):  # which a rank sees by itself, or hears first from the other one
        assert "rank 2 has ended" in text or "others have lost rank 2" in text


@pytest.mark.parametrize("env", [{}, TCP], ids=["shm", "tcp"])
def test_a_stopped_rank_is_removed_and_learns_it(forks, env):
    *others, last = told(forks("stopped", 3, env))
    assert others == ["1", "1"]
    assert "has removed this rank (2)" in last


def test_calls_go_on_among_the_living(forks):
    answer = forks("killed_among_calls", 3)
    assert answer.pop(1)[0] == -9
    one, other = told(answer)
    assert one == other and int(one) > 0


def test_receives_end_without_their_source(forks):
    answer = forks("killed_sender", 3)
    assert answer.pop(1)[0] == -9
    for text in told(answer):
        assert "rank 1 has ended" in text and "came in time" in text


def test_survivors_go_on_although_a_killed_rank_sent_more_than_they_have_room_for(forks):
    answer = forks("killed_with_messages_unread", 3)
    assert answer.pop(1)[0] == -9
    assert told(answer) == ["[1, 0, 1]"] * 2


@pytest.mark.parametrize("env", [{}, TCP], ids=["shm", "tcp"])
def test_a_new_process_takes_the_place_of_a_rank_and_another_joins(forks, env):
    answer = forks("rejoined", 3, env, joiners=[1, 3])
    assert answer.pop(1)[0] == -9
    assert told(answer) == ["[1, 1, 1, 1]"] * 4
