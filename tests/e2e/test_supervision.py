"""A node whose engine loop dies says why, leaves the cluster, ends with exit code 1; no client sees more than a pause.
A full disk under a record ends the record."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from lab.launch import rest
from tests.e2e.conftest import Start, complete, model_of, settled

POLICY = '''
from cache.pool.policy import PLAIN, LRU


class Wrong(LRU):
    """Right for a while; then it raises, as a policy that somebody is working on may."""

    def __init__(self):
        super().__init__()
        self.left = 200

    def added(self, item, facts=PLAIN):
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("my policy")
        super().added(item, facts)
'''


async def _stream(session: aiohttp.ClientSession, url: str, body: dict) -> int:
    """Tokens of one stream that ended well."""
    tokens = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            assert b'"error"' not in line, line
            tokens += line.startswith(b"data: {")
    return tokens


@pytest.mark.expects_error(
    "background task 'engine loop' failed and is not started again[\\s\\S]*ZeroDivisionError: my policy",
    "ZeroDivisionError: my policy",  # in the store's share of that node too
    "this node leaves",
    "--record-steps /dev/full: No space left on device",
)
async def test_a_policy_that_raises_costs_its_node_and_no_request(start: Start, tiny_model, tmp_path: Path):
    policy = tmp_path / "wrong.py"
    policy.write_text(POLICY)
    flags = {"decode-0": ["--eviction", f"{policy}:Wrong"], "prefill-0": ["--record-steps", "/dev/full"]}
    with start("prefill=1,decode=2,store=1", *tiny_model, role_flags=flags) as cluster:
        door, wrong = cluster["prefill-0"].url, cluster["decode-0"]
        body = {"model": model_of(door), "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session:
            works = []
            async with asyncio.timeout(120):
                while wrong.alive:  # clients come and go until its policy has had enough
                    number = len(works)
                    works.append(asyncio.create_task(_stream(session, door, body | {"prompt": [number + 3] * 40})))
                    await asyncio.sleep(0.05)
                counts = await asyncio.gather(*works)
        assert set(counts) == {120}
        assert await asyncio.to_thread(wrong.process.wait, 20) == 1
        wrong.expected_dead = True
        deadline = time.monotonic() + 20
        while cluster.members("prefill-0") != {"prefill-0", "decode-1", "store-0"}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert "decode-0 is down: left" in "\n".join(cluster["prefill-0"].last_lines(400)), "it said good-bye"
        assert complete(door, "still here", 4)["usage"]["completion_tokens"] == 4
        settled(cluster)
        assert rest.get(f"{door}/debug/state")["engine"]["integrity"] is None
