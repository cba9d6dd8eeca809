"""Service classes where all seats of the only decode node are taken, in the shape that everybody starts with."""

from __future__ import annotations

import asyncio

import aiohttp

from lab.launch import rest
from tests.e2e.conftest import Start, model_of, settled, timeline

SEATS, STREAMS, TOKENS = 4, 16, 160
MOST_STEPS = 3
"""Steps of the decode node between the hand-over of an interactive request and the step with its second token."""


def gaps(metrics: str, service_class: str) -> int:
    """Gaps between successive tokens of all requests of the class."""
    lines = [line for line in metrics.splitlines() if line.startswith("mooncake:inter_token_latency_seconds_count{")]
    [line] = [line for line in lines if f'service_class="{service_class}"' in line]
    return int(float(line.rpartition(" ")[2]))


def tokens_before(url: str, chat: str, others: list[str]) -> int:
    """Tokens of other requests that decode-0 computed in steps after the hand-over of `chat` and before its seat."""
    here = {
        name: [one for one in timeline(url, name)["events"] if one["node"] == "decode-0"] for name in (chat, *others)
    }
    at = {event["event"]: event["t"] for event in here[chat]}
    computed = [event for name in others for event in here[name] if event["event"] == "computed"]
    steps = [(event["t"] - ago, count) for event in computed for ago, _, count in event["detail"]["intervals"]]
    assert steps, "the timelines have no steps"
    return sum(count for begun, count in steps if at["waiting"] <= begun < at["running"])


async def test_an_interactive_request_overtakes_sixteen_batch_streams(start: Start, tiny_model):
    """Orders of events, not times: while it got its tokens only streams that held a seat can have ended."""
    begun, ended = [], []

    async def stream(session: aiohttp.ClientSession, door: str, number: int, service_class: str, count: int) -> str:
        body = {"model": model_of_door, "prompt": [number + 5] * 30, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "service_class": service_class}
        text, headers = "", {"X-Request-Id": f"{service_class}-{number}"}
        async with session.post(f"{door}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                assert b'"error"' not in line, line
                if line.startswith(b"data: {"):
                    if not text:
                        begun.append(number)
                    text += line.decode()
        ended.append(number)
        return text

    flags = ["--max-num-seqs", str(SEATS), "--max-waiting-requests", "64", "--rejection", "none"]
    with start("prefill=1,decode=1,store=1", *tiny_model, *flags) as cluster:
        door = cluster["prefill-0"].url
        model_of_door = await asyncio.to_thread(model_of, door)
        async with aiohttp.ClientSession() as session, asyncio.timeout(200):
            batch = [asyncio.create_task(stream(session, door, n, "batch", TOKENS)) for n in range(STREAMS)]
            while len(begun) < STREAMS:  # noqa: ASYNC110 - all are at the decode node, or on their way
                await asyncio.sleep(0.01)
            before = len(ended)
            text = await stream(session, door, 99, "interactive", 20)
            during = len(ended) - 1 - before
            texts = await asyncio.gather(*batch)
        assert text.count("data: {") >= 20
        assert during <= SEATS, f"{during} batch streams ended before an interactive request had 20 tokens"
        assert all(one.count("data: {") >= TOKENS for one in texts)
        others = [f"batch-{n}" for n in range(STREAMS)]
        assert await asyncio.to_thread(tokens_before, door, "interactive-99", others) <= MOST_STEPS * SEATS
        state = rest.get(f"{cluster['decode-0'].url}/debug/state")["engine"]
        assert state["preemptions"] >= 1 and state["integrity"] is None
        async with aiohttp.ClientSession() as session, session.get(f"{door}/metrics") as response:
            metrics = await response.text()
        assert gaps(metrics, "interactive") == 19 and gaps(metrics, "batch") == STREAMS * (TOKENS - 1)
        settled(cluster)
