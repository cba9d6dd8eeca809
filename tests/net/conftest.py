"""Every asyncio test of net/ runs under both event loops."""

import asyncio

import pytest
import uvloop


@pytest.fixture(params=["uvloop", "asyncio"], autouse=True)
def event_loop_policy(request):
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()
