"""nixl-cu12 with its UCX back end and default transports (shared memory or cross-memory attach on one host).

Descriptor lists of all blocks are prepared once per size; each call makes a request from indices, posts it, polls it
and releases it, because every call moves other blocks.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from lab.bench.transfer.agent import Arena, Call, timed


def make(name: str, role: str, congestion: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # installed in the peer's interpreter

    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    return Owner(agent) if role == "owner" else Client(agent)


class Owner:
    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def start(self, remote: Arena) -> dict[str, Any]:
        self._registered = self._agent.register_memory([(remote.address, remote.nbytes, 0, "")], "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": remote.address}


class Client:
    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._lists: dict[int, tuple[Any, Any]] = {}

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        self._registered = self._agent.register_memory([(local.address, local.nbytes, 0, "")], "DRAM")
        self._owner = self._agent.add_remote_agent(base64.b64decode(info["metadata"]))
        self._here, self._there, self._nbytes = local.address, info["address"], local.nbytes

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        if size not in self._lists:
            self._lists[size] = (
                self._agent.prep_xfer_dlist("", self._blocks(self._here, size), "DRAM"),
                self._agent.prep_xfer_dlist(self._owner, self._blocks(self._there, size), "DRAM"),
            )
        here, there = self._lists[size]
        index = partial(np.array, dtype=np.int32)
        return [
            (here, index([a // size for a in ours]), there, index([b // size for b in theirs]))
            for ours, theirs in calls
        ]

    def _blocks(self, base: int, size: int) -> Any:
        count = self._nbytes // size
        blocks = np.zeros((count, 3), dtype=np.uint64)
        blocks[:, 0] = base + size * np.arange(count, dtype=np.uint64)
        blocks[:, 1] = size
        return blocks

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        return timed(partial(self._move, op.upper()), prepared, seconds)

    def _move(self, op: str, arguments: Any) -> None:
        agent = self._agent
        handle = agent.make_prepped_xfer(op, *arguments)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")
