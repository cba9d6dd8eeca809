"""Every asyncio test of net/ runs under both event loops."""

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
