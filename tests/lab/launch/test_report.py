"""Rendering of the nodes table and of a request's timeline."""

from __future__ import annotations

import io
import re

from rich.console import Console

from lab.launch.report import nodes_table, timeline


def text_of(renderable) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


SUMMARY = {
    "queue_ms": 0.0,
    "prefix_fetch_ms": None,
    "prefill_ms": 50.0,
    "transfer_ms": None,
    "ttft_ms": 60.0,
    "decode_ms": 40.0,
    "e2e_ms": 100.0,
    "nodes": {"acceptor": "a", "prefill": "a", "decode": "a"},
    "prompt_tokens": 5,
    "cached_tokens": 0,
    "output_tokens": 2,
    "bytes_moved": {"shm": 0},
    "placement": {"prefill": "a", "decode": "b", "estimates": {"ttft_s": 0.0015}, "asked": 2, "decision_s": 0.001},
}


def test_a_request_on_one_node():
    shown = text_of(timeline({"request_id": "r", "events": [], "summary": SUMMARY}))
    assert "nothing: all on one node" in shown
    assert re.search(r"^transfer +-", shown, re.M)
    assert "prefill on a, decode on b; first token expected after 1.5 ms; 2 nodes asked, decided in 1.0 ms" in shown
    assert "mooncake.py explain r" in shown
    bars = {line.split()[0]: line.count("█") for line in shown.splitlines() if "█" in line}
    assert bars["end"] == 2 * bars["prefill"] == 32
    assert "queue" not in bars


def test_events_are_in_order_of_time_whatever_node_sent_them():
    log = [
        {"t": 2.0, "node": "b", "event": "second", "detail": {"bytes": 3}},
        {"t": 1.5, "node": "a", "event": "first", "detail": {}},
    ]
    shown = text_of(timeline({"request_id": "r", "events": log, "summary": SUMMARY}))
    assert shown.index("first ") < shown.index("second")
    assert "500.0  b     second  bytes 3" in shown


def test_nodes_table_says_which_transport_is_used():
    node = {"name": "prefill-0", "role": "prefill", "url": "http://x:1", "pid": 7}
    paths = [{"peer": "b", "transport": "shm"}, {"peer": "c", "transport": "tcp"}, {"peer": "a", "transport": "shm"}]
    shown = text_of(nodes_table([node | {"paths": paths}, node | {"paths": []}]))
    assert "shm to a, b; tcp to c" in shown
    assert "none opened yet" in shown
