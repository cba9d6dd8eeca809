"""A client that hangs up while its long prompt is being computed: the node sees it between two steps, which
--max-step-ms bounds, and the rest of the prompt is never computed."""

from __future__ import annotations

import asyncio
import re

import aiohttp

from lab.launch import rest
from tests.e2e.conftest import Start, complete, model_of, settled

PROMPT = 6000
STEP_MS = "50"
ONE_STEP = ("--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--kv-cache-bytes", "400M")
"""Without --max-step-ms the whole prompt would be one step."""


def total(metrics: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return int(float(found[1]))


async def steps_of(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Steps so far, and tokens computed in them."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return total(text, "vllm:iteration_tokens_total_count"), total(text, "vllm:iteration_tokens_total_sum")


async def test_a_prompt_whose_client_hung_up_is_not_computed_to_its_end(start: Start):
    with start("mixed=1", *ONE_STEP, "--max-step-ms", STEP_MS) as cluster:
        url = cluster["mixed-0"].url
        body = {"model": await asyncio.to_thread(model_of, url), "max_tokens": 2, "temperature": 0, "stream": True}
        async with aiohttp.ClientSession() as session, asyncio.timeout(240):
            steps, computed = await steps_of(session, url)
            prompt = [100 + i % 4000 for i in range(PROMPT)]
            asked = asyncio.create_task(session.post(f"{url}/v1/completions", json=body | {"prompt": prompt}))
            while (await steps_of(session, url))[0] == steps:
                assert not asked.done() or (await asked).status == 200
                await asyncio.sleep(0.005)
            if not asked.cancel():  # closes the connection
                (await asked).close()
            short = await asyncio.to_thread(complete, url, "The capital of France is", 3)
            assert short["usage"]["completion_tokens"] == 3
            settled(cluster)
            after = await steps_of(session, url)
        ours = short["usage"]["prompt_tokens"] + short["usage"]["completion_tokens"]
        assert 0 < after[1] - computed - ours < PROMPT, "the prompt was computed for nobody"
        assert rest.get(f"{url}/debug/state")["engine"]["integrity"] is None
