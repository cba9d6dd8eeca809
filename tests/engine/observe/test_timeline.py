"""The summary of a timeline, read off events that nodes sent in any order."""

from __future__ import annotations

import pytest

from engine.observe.timeline import Timeline


def told() -> Timeline:
    timeline = Timeline("r", 100)
    timeline.nodes = {"acceptor": "s", "prefill": "p", "decode": "d"}
    fetch = {"seconds": 0.010, "bytes": 640, "transports": {"shm": 640}}
    push = {"how": "push", "seconds": 0.020, "exposed_seconds": 0.001, "bytes": 360, "transport": "tcp"}
    push["intervals"] = [[0.060, 0.030, 300], [0.020, 0.010, 60]]  # 1.240 .. 1.270 and 1.280 .. 1.290
    timeline.add(1.000, "s", "accepted")
    timeline.add(1.300, "p", "kv_moved", **push)
    timeline.add(1.002, "s", "placed")
    timeline.add(1.003, "p", "waiting")
    timeline.add(1.020, "p", "prefix_fetched", **fetch)
    timeline.add(1.050, "p", "running")
    timeline.add(1.250, "p", "computed", intervals=[[0.200, 0.100, 64], [0.100, 0.0, 36]])
    timeline.add(1.251, "d", "computed", intervals=[[0.200, 0.0, 1]])  # others' decodes hide nothing
    timeline.add(1.250, "s", "first_token")
    timeline.add(1.260, "p", "finished")
    timeline.add(1.900, "s", "answered")
    return timeline


def test_summary_of_a_disaggregated_request():
    summary = told().summary()
    rounded = {name: round(value) for name, value in summary.items() if name.endswith("_ms")}
    assert rounded == {
        "placement_ms": 2,
        "queue_ms": 37,  # 47 until it ran, less the 10 of the prefix fetch
        "prefix_fetch_ms": 10,
        "prefill_ms": 200,
        "other_prompts_ms": 0,
        "transfer_ms": 20,
        "transfer_exposed_ms": 1,
        "transfer_hidden_ms": 10,
        "ttft_ms": 250,
        "decision_to_token_ms": 248,
        "move_pauses_ms": 0,
        "decode_ms": 650,
        "e2e_ms": 900,
    }
    assert summary["overlap_efficiency"] == pytest.approx(0.25, abs=0.001)
    assert summary["bytes_moved"] == {"shm": 640, "tcp": 360}


def test_a_request_on_its_way_has_no_end():
    timeline = Timeline("r", 100)
    timeline.add(1.0, "s", "accepted")
    assert timeline.summary()["e2e_ms"] is None
    assert timeline.as_dict()["events"][0]["event"] == "accepted"
