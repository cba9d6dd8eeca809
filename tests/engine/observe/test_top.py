"""`mooncake.py top` against a server that answers /live as a node does."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from engine.observe import top
from engine.observe.recent import Recent
from engine.observe.timeline import Timeline


def recent() -> dict:
    timeline = Timeline("req-7", 32)
    timeline.nodes.update(prefill="prefill-0", decode="decode-0")
    rows = Recent(16)
    rows.add(timeline, "interactive", "stop", 1.0)
    tokens = {"hbm": 16, "arena": 0, "dram": 0, "ssd": 0, "computed": 16}
    rows._rows[0].update(ttft_ms=120.0, tpot_ms=9.5, tokens_from=tokens)
    return rows.as_dict(0.0)


def live() -> dict:
    """Three nodes: one computes, one keeps blocks, one does not answer."""
    path = {"peer": "store-0", "transport": "shm", "why": "same host", "gb_per_s": 3.25, "bytes_read": 1024}
    path |= {"bytes_written": 5 << 20, "p50_ms": 0.5, "p99_ms": 2000.0, "retries": 0, "failures": 1}
    base = {"status": "alive", "version": "0", "block_size": 16, "loading": None, "tenants": {}}
    base |= {"block_bytes": 1 << 20, "slot_bytes": 1 << 19}  # the pool is quantized
    load = {"running": 3, "waiting": 2, "max_running": 64, "queued_tokens": 10, "work_s": 0.25}
    blocks = {"total": 100, "held": 25}
    computes = {"node_id": "prefill-0", "roles": ["prefill"], "load": load, "blocks": blocks, "tiers": None}
    keeps = {"node_id": "store-0", "roles": ["store"], "load": None, "blocks": None}
    keeps["tiers"] = {"dram": {"blocks": 512, "capacity": 1024}}
    mute = {"node_id": "decode-0", "roles": ["decode"], "status": "suspect", "error": "no answer in 1 s"}
    nodes = [base | computes | {"paths": [path], "recent": recent()}]
    nodes += [base | keeps | {"paths": [], "recent": Recent(16).as_dict(0.0)}, mute]
    return {"unix_s": 1.0, "node_id": "prefill-0", "nodes": nodes}


@pytest.fixture
def server():
    """Its address; it wants the key 'k'."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("Authorization") == "Bearer k"
            self.send_response(200 if known and self.path == "/live" else 401)
            self.end_headers()
            refused = {"error": {"message": "missing or wrong API key"}}
            self.wfile.write(json.dumps(live() if known else refused).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def drawn(seen: dict) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(top.picture(seen, 10))
    return console.export_text()


def test_the_picture_shows_every_node_in_its_own_words():
    text = drawn(live())
    assert "3 nodes, 3 requests running, 2 waiting; seen from prefill-0" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "no answer in 1 s" in lines["decode-0"] and "suspect" in lines["decode-0"]
    assert "512.0 MiB  50 %" in lines["store-0"]
    assert "TTFT p50 120 ms" in text and "arena 50 %" in text and "computed 50 %" in text
    assert "interactive" in lines["req-7"] and "9.5 ms" in lines["req-7"] and "50 %" in lines["req-7"]
    row = next(line for line in text.splitlines() if "shm" in line)
    assert " ".join(row.split()) == "prefill-0 store-0 shm 3.25 1.0 KiB 5.0 MiB 0.5 ms 2.00 s 0 1 same host"


def test_prices_are_shown_if_nodes_differ():
    seen = live()
    assert "cost/h" not in drawn(seen)
    for node, cost in zip(seen["nodes"], (2.5, 1.0, 0.3), strict=True):
        node["cost"] = cost
    text = drawn(seen)
    assert "cost/h" in text
    rows = {row[0]: row for line in text.splitlines() if {"alive", "suspect"} & set(row := line.split())}
    assert rows["prefill-0"][-1] == "2.5" and rows["store-0"][-1] == "1" and "0.3" in rows["decode-0"]


def test_a_cluster_without_requests_and_peers():
    seen = live()
    seen["nodes"] = seen["nodes"][1:2]
    assert "1 node, 0 requests running" in drawn(seen) and "TTFT" not in drawn(seen)


def test_once_and_json(server, capsys):
    assert top.main(["--url", server, "--api-key", "k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == live()
    assert top.main(["--url", f"http://{server}/", "--api-key", "k", "--once"]) == 0
    assert "seen from prefill-0" in capsys.readouterr().out


def test_no_answer_names_the_flag(server, capsys):
    assert top.main(["--url", server, "--once"]) == 2
    assert "401: missing or wrong API key (--api-key or --api-key-file here)" in capsys.readouterr().err
    assert top.main(["--url", "127.0.0.1:1", "--once"]) == 2
    assert "give --url of a running node" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--interval-ms=0", "--interval-ms=-5", "--requests=-1", "--requests=x"])
def test_values_without_a_meaning_are_refused(server, flag, capsys):
    """A negative pause ended the picture with a traceback, and none asked the node without end."""
    with pytest.raises(SystemExit):
        top.main(["--url", server, "--api-key", "k", "--once", flag])
    assert "is no whole number above 0" in capsys.readouterr().err


def test_following_survives_a_lost_answer(server, monkeypatch):
    """Two questions, one of them unanswered, then Ctrl-C."""
    sleeps = iter([None, None])

    def sleep(seconds):
        if next(sleeps, "over") == "over":
            raise KeyboardInterrupt

    class Node:
        answers = iter([live()])
        asked = 0

        def get(self, path):
            seen = next(self.answers, None)
            if seen is None:
                raise top.NoAnswer("gone")
            self.asked += 1
            return seen

    node = Node()
    monkeypatch.setattr(top.time, "sleep", sleep)
    top.follow(node, live(), 10, 0.0)
    assert node.asked == 1


@pytest.mark.parametrize(("value", "text"), [(None, ""), (0.25, "0.25 ms"), (12.4, "12 ms"), (1500.0, "1.50 s")])
def test_milliseconds(value, text):
    assert top.ms(value) == text


def test_tenants_are_added_up_over_the_nodes():
    seen = live()
    rows = [
        {"a": {"bytes": 1 << 20, "quota": 2 << 20, "refused": 0}, "other": {"bytes": 0, "quota": None, "refused": 0}},
        {"a": {"bytes": 2 << 20, "quota": 2 << 20, "refused": 7}, "b": {"bytes": 1 << 19, "quota": None, "refused": 0}},
    ]
    assert "tenant" not in drawn(seen)
    for node, row in zip(seen["nodes"], rows, strict=False):
        node["tenants"] = row
    lines = [line.split() for line in drawn(seen).splitlines()]
    assert ["a", "3.0", "MiB", "4.0", "MiB", "75", "%", "7", "2"] in lines
    assert ["b", "512.0", "KiB", "0", "1"] in lines and ["other", "0", "B", "0", "1"] in lines
