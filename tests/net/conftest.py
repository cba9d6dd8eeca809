"""Every asyncio test of net/ runs under both event loops, and fails on anything the loop complained about."""

import asyncio
import logging

import pytest
import uvloop


@pytest.fixture(params=["uvloop", "asyncio"], autouse=True)
def event_loop_policy(request):
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


PROVOKED = ("net.gossip", "net.http", "aiohttp.server")
"""Loggers whose errors tests provoke on purpose: crashing callbacks, crashing frontends, broken requests."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    """No 'Task exception was never retrieved', no unexpected error line; tests that expect one clear caplog."""
    yield
    records = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    noise = [record for record in records if not record.name.startswith(PROVOKED)]
    assert not noise, [record.getMessage() for record in noise]
