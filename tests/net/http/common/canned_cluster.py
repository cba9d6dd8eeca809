"""A cluster of three nodes for the live page, without nodes: what they would answer."""

from __future__ import annotations

import time
from typing import Any

from engine.observe.history import INTERVAL_S, KEPT, History, number
from engine.observe.merged import merged
from tests.net.fake_frontend import FakeFrontend

MIB = 1 << 20
REASON = "refused: the queue of this node is longer than its share of the objective allows"
ESTIMATES = dict.fromkeys(("wait_s", "transfer_s", "prefill_s", "ttft_s", "handover_s", "step_s", "score"), 0.0125)


class Cluster(FakeFrontend):
    """prefill-0, decode-0 and store-0. One request has ended; decode-1 was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_after: list[int] = []
        begin = time.time() - 20 * INTERVAL_S
        self.history = History("prefill-0", begin)
        for i in range(20):
            now = begin + (i + 1) * INTERVAL_S
            self.history.first_token(0.1 + i / 100, 64, 48)
            self.history.next_token(0.02)
            self.history.count("answered")
            self.history.load(i % 4, i % 2)
            moved = {"bytes_read": 0, "bytes_written": i * MIB, "failures": 0, "rails": []}
            rows = [{"peer": "decode-0", "transport": "shm", **moved}]
            self.history.close(now, rows, {"kv": (i * MIB, 64 * MIB), "dram": (32 * MIB, 128 * MIB)})
        self.history.mark(begin + 50, "fault", "decode-1", "was lost")
        self.history.mark(begin + 70, "role", "prefill-0", "takes new requests for decode")

    async def live(self) -> dict[str, Any]:
        nodes = [self._node("prefill-0", "decode-0"), self._node("decode-0", "store-0"), self._node("store-0", None)]
        return {"unix_s": time.time(), "node_id": "prefill-0", "nodes": nodes}

    async def live_history(self, after: int) -> dict[str, Any]:
        self.asked_after.append(after)
        now = time.time()
        told = merged([self.history.since(max(after, number(now) - KEPT - 1))])
        return told | {"unix_s": now, "interval_s": INTERVAL_S, "kept": KEPT, "silent": ["decode-1"]}

    async def find_timeline(self, request_id: str) -> dict[str, Any]:
        stages = {"prefill": ESTIMATES, "decode": {"step_s": 0.01, "token_s": 0.02}}
        rows = [{"stage": stage, "node": node} | found for stage, found in stages.items() for node in ("a", "b")]
        rows[0]["skipped"] = REASON
        choice = {"prefill": "b", "decode": "a", "prefix_source": "pool", "prefix_tokens": 48, "considered": rows}
        summary = {"nodes": {"prefill": "b", "decode": "a"}, "placement": choice, "ttft_ms": 120.0, "queue_ms": 1.0}
        counts = {"prompt_tokens": 64, "cached_tokens": 48, "output_tokens": 8}
        return {"request_id": request_id, "events": [], "clocks": {}, "summary": summary | counts}

    def _node(self, node_id: str, peer: str | None) -> dict[str, Any]:
        role = node_id.partition("-")[0]
        computes = role != "store"
        load = {"does": [role], "running": 1, "waiting": 2, "work_s": 0.01}
        moved = {"bytes_read": 0, "bytes_written": 9 * MIB, "p50_ms": 1.0, "p99_ms": 2.0, "retries": 0, "failures": 0}
        sources = {"hbm": 16, "arena": 0, "dram": 32, "ssd": 0, "computed": 16}
        row = {"id": "cmpl-1", "ended": time.time(), "class": "standard", "reason": "stop", "ttft_ms": 120.0}
        row |= {"tpot_ms": None, "prompt_tokens": 64, "output_tokens": 8, "tokens_from": sources}
        row |= {"nodes": {"prefill": "b", "decode": "a"}}
        nothing = dict.fromkeys(sources, 0)
        mine = node_id == "prefill-0"
        return {
            "node_id": node_id,
            "roles": [role],
            "status": "alive",
            "http": f"http://{node_id}:8000",
            "loading": None,
            "load": load if computes else None,
            "blocks": {"total": 64, "held": 4, "cached": 40, "free": 20} if computes else None,
            "block_bytes": MIB,
            "slot_bytes": MIB,
            "tiers": {"dram": {"blocks": 32, "capacity": 128}},
            "tenants": {"team-a": {"bytes": 9 * MIB, "quota": 12 * MIB, "refused": 3}} if role == "store" else {},
            "paths": [{"peer": peer, "transport": "shm", "why": "same host", "gb_per_s": 3.0} | moved] if peer else [],
            "recent": {"requests": [row] if mine else [], "tokens_from": sources if mine else nothing},
        }
