"""scripts/bench.py burst: its client against a server whose answers are known, and its rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lab.bench.burst import Asked, burst, flags, largest_fall, percentile, requests, rows_of
from lab.bench.common.results import Row
from lab.bench.common.workload import TokenSource
from net.http import Output, Overloaded
from tests.net.fake_frontend import FakeFrontend, serving


class Full(FakeFrontend):
    """Has 10 places, and begins its answers after 20 refusals."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.02)
        self.places, self.refused, self.go = 10, 0, asyncio.Event()

    def check_room(self, arriving: int) -> None:
        try:
            super().check_room(arriving)
        except Overloaded:
            self.refused += 1
            if self.refused == 20:
                self.go.set()
            raise

    async def _generate(self, prompt: list[int], sampling: dict[str, Any]) -> AsyncGenerator[Output, None]:
        await self.go.wait()
        async for output in super()._generate(prompt, sampling):
            yield output


async def test_a_burst_on_a_real_server():
    """Of 30 requests a server with 10 places serves 10 and refuses 20, whose prompts it never sees."""
    frontend = Full()
    async with serving(frontend) as url:
        sent = requests(url, TokenSource(1, 256), 30, 1, 8, 3)
        asked = await burst(url, sent)
    rows = {row.metric: row for row in rows_of(30, [asked])}
    assert (rows["served"].ours, rows["served"].limits) == (10.0, {"offered": 30.0})
    assert len(frontend.calls) == 10
    served = [one for one in asked if one.served]
    assert all(0.02 <= one.first_token_s < one.end_s for one in served)
    assert rows["refusal p99"].ours > 0 and rows["TTFT p99"].ours >= 20


async def test_a_request_without_an_answer_is_no_refusal():
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asked = await burst(url, requests(url, TokenSource(1, 256), 2, 1, 4, 2))
    assert [one.status for one in asked] == [0, 0]
    with pytest.raises(ValueError, match=r"neither an answer nor 429: \{0: 2\}"):
        rows_of(2, [asked])


async def test_a_stream_that_breaks_off_is_not_served():
    one = Asked()
    one.data_received(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n")
    assert one.status == 200 and not one.served
    one.data_received(b"data: [DO")
    one.data_received(b"NE]\n\n")
    assert one.served


def test_percentiles_and_falls():
    assert percentile([], 0.5) is None
    assert percentile([3, 1, 2], 0.5) == 2 and percentile([3, 1, 2], 0.99) == 3
    rows = [Row("x", "served", "requests", float(count)) for count in (100, 257, 250, 254)]
    assert largest_fall(rows).ours == 7.0
    assert largest_fall(rows[:2]).ours == 0.0


def test_a_quick_run_has_two_sizes():
    assert flags(["--quick"]).offered == [100, 200]
    assert flags(["--offered", "500", "100"]).offered == [100, 500]
