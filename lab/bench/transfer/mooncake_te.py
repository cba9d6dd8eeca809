"""mooncake-transfer-engine(-non-cuda) over TCP, with its batch calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lab.bench.transfer.agent import Arena, Call, timed


def make(name: str, role: str, congestion: str) -> Any:
    from mooncake.engine import TransferEngine  # installed in the peer's interpreter

    engine = TransferEngine()
    _check(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
    return Owner(engine) if role == "owner" else Client(engine)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} returned {status}")


class Owner:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def start(self, remote: Arena) -> dict[str, Any]:
        _check(self._engine.register_memory(remote.address, remote.nbytes), "register_memory")
        return {"target": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": remote.address}


class Client:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def connect(self, info: dict[str, Any], local: Arena) -> None:
        _check(self._engine.register_memory(local.address, local.nbytes), "register_memory")
        self._target, self._there, self._here = info["target"], info["address"], local.address

    def prepare(self, size: int, calls: Sequence[Call]) -> Sequence[Any]:
        return [
            ([self._here + a for a in ours], [self._there + b for b in theirs], [size] * len(ours))
            for ours, theirs in calls
        ]

    def measure(self, op: str, prepared: Sequence[Any], seconds: float) -> list[float]:
        many = len(prepared[0][0]) > 1
        kind = "batch_transfer_sync" if many else "transfer_sync"
        call = getattr(self._engine, f"{kind}_{op}")
        return timed(partial(self._many if many else self._one, call), prepared, seconds)

    def _many(self, call: Any, arguments: Any) -> None:
        _check(call(self._target, *arguments), "a transfer")

    def _one(self, call: Any, arguments: Any) -> None:
        (here,), (there,), (size,) = arguments
        _check(call(self._target, here, there, size), "a transfer")
