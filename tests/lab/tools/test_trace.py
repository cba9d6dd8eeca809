"""A timeline becomes a Chrome trace: every activity on its node and row, on one clock."""

from __future__ import annotations

import json
from itertools import pairwise

from engine.observe.recent import MAX_RECENT_REQUESTS
from lab.ablations.live.kv import moved
from lab.tools.perfetto import STEPS, truncated, window_trace

RECORD = {
    "request_id": "r",
    "clocks": {"p": {"offset_s": 100.0, "error_s": 0.001}, "d": {"offset_s": 0.0, "error_s": 0.0}},
    "summary": {
        "nodes": {"acceptor": "d", "prefill": "p", "decode": "d"},
        "transfer_hidden_ms": 20.0,
        "overlap_efficiency": 0.5,
    },
    "events": [
        {"t": 1.00, "node": "d", "event": "accepted", "detail": {}},
        {"t": 1.01, "node": "d", "event": "placed", "detail": {}},
        {"t": 101.02, "node": "p", "event": "waiting", "detail": {}},
        {"t": 101.03, "node": "p", "event": "running", "detail": {"computed": 0}},
        {"t": 101.13, "node": "p", "event": "computed", "detail": {"intervals": [[0.10, 0.05, 64], [0.05, 0.0, 36]]}},
        {"t": 101.03, "node": "p", "event": "prefix_fetched", "detail": {"seconds": 0.01, "bytes": 7, "sources": {}}},
        {
            "t": 101.15,
            "node": "p",
            "event": "kv_moved",
            "detail": {"how": "push", "seconds": 0.04, "bytes": 90, "intervals": [[0.06, 0.02, 90]]},
        },
        {"t": 1.14, "node": "d", "event": "first_token", "detail": {}},
        {"t": 1.20, "node": "d", "event": "computed", "detail": {"intervals": [[0.03, 0.0, 1]]}},
        {"t": 1.21, "node": "d", "event": "answered", "detail": {}},
    ],
}


def test_every_activity_is_on_its_node_and_row():
    trace = json.loads(json.dumps(window_trace([RECORD])))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["d", "p (clock +-1.00 ms)"]
    seen = [
        (names[e["pid"]][0], e["cat"], e["name"], round(e["ts"] / 1000), round(e["dur"] / 1000))
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["cat"] != STEPS
    ]
    assert sorted(seen) == sorted(
        [
            ("d", "acceptor", "place", 0, 10),
            ("d", "acceptor", "first token", 10, 130),
            ("d", "acceptor", "stream", 140, 70),
            ("p", "state", "waiting", 20, 10),
            ("p", "prefix loads", "7 bytes", 20, 10),
            ("p", "prefill compute", "64 tokens", 30, 50),
            ("p", "prefill compute", "36 tokens", 80, 50),
            ("p", "KV to the decode node", "push 90 bytes", 90, 40),
            ("d", "decode", "1 tokens", 170, 30),
        ]
    )


def test_requests_of_a_window_share_the_rows_of_a_node_and_overlap_in_lanes():
    """The second one was accepted by p, whose clock is 100 s ahead, half a decode step after the first one."""
    later = json.loads(json.dumps(RECORD)) | {"request_id": "s", "clocks": {"d": {"offset_s": -100.0}}}
    later["summary"]["nodes"] = {"acceptor": "p", "prefill": "p", "decode": "d"}
    for event in later["events"]:
        event["t"] += 0.015
    trace = window_trace([RECORD, later])["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    decodes = [e for e in trace if e.get("cat") == "decode"]
    assert [(e["args"]["request"], round(e["ts"] / 1000), rows[e["pid"], e["tid"]]) for e in decodes] == [
        ("r", 170, "decode"),
        ("s", 185, "decode 2"),
    ]
    taken = {}
    for e in trace:
        if e["ph"] == "X":
            taken.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in taken.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans)), "a row shows one at a time"


def test_a_window_has_the_steps_of_a_node_and_the_depth_of_its_queue():
    """Two requests in the same steps of p, and one of them alone in the last one; both wait there at first."""
    other = json.loads(json.dumps(RECORD)) | {"request_id": "s"}
    computed = next(e for e in other["events"] if e["event"] == "computed" and e["node"] == "p")
    computed["detail"]["intervals"] = [[0.10, 0.05, 36]]
    trace = window_trace([RECORD, other])["traceEvents"]
    pid = next(e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"][0] == "p")
    steps = [e for e in trace if e.get("cat") == STEPS and e["pid"] == pid]
    assert [(e["name"], round(e["ts"] / 1000), round(e["dur"] / 1000)) for e in steps] == [
        ("100 tokens of 2 requests", 30, 50),
        ("36 tokens of 1 requests", 80, 50),
    ]
    assert steps[0]["args"] == {"requests": 2, "prompt tokens": 100, "decodes": 0}
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {titles[e["pid"], e["tid"]] for e in steps} == {STEPS}
    depths = [(round(e["ts"] / 1000), e["args"]["requests"]) for e in trace if e["ph"] == "C" and e["pid"] == pid]
    assert depths == [(20, 1), (20, 2), (30, 1), (30, 0)]


def test_a_node_that_has_forgotten_requests_of_the_window_is_named():
    def node(name: str, count: int, oldest: float):
        return {"node_id": name, "recent": {"requests": [{"id": "r", "ended": oldest + i} for i in range(count)]}}

    live = {"unix_s": 1000.0, "nodes": [node("full", MAX_RECENT_REQUESTS, 790.0), node("few", 3, 950.0)]}
    live["nodes"].append({"node_id": "gone", "error": "no answer"})
    assert truncated(live, 4) == ["full"] and truncated(live, 3) == []


def test_what_moved_is_read_off_the_timeline():
    assert moved(RECORD) == {"transfer_ms": 40.0, "hidden_ms": 20.0, "hidden_share": 0.5}
    nothing_hidden = RECORD | {"summary": {"transfer_hidden_ms": 0.0, "overlap_efficiency": 0.0}}
    assert moved(nothing_hidden) == {"transfer_ms": 40.0, "hidden_ms": 0.0, "hidden_share": 0.0}
