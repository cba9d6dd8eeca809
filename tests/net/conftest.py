"""Every asyncio test of net/ runs under both event loops. Nodes serve and move KV under uvloop alone, so the tests of
HTTP and of transfers under asyncio's own loop are heavy."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

HERE = Path(__file__).parent
ONLY_NODES = (HERE / "http", HERE / "transfer")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    if callspec is None or asyncio.new_event_loop not in callspec.params.values():
        return
    if any(folder in item.path.parents for folder in ONLY_NODES):
        item.add_marker(pytest.mark.heavy)
