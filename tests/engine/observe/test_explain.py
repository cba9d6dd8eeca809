"""Estimates next to the truth, and the table that shows them."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from engine.config.config import Config
from engine.front.declined import no_placement, turned_away
from engine.front.placed import Placed, ProbeAnswer
from engine.front.placement_policy import placement_policy
from engine.observe.explain import main, table
from engine.observe.timeline import Timeline
from sched.gossip.intents import Coming
from sched.gossip.record import NodeRecord
from sched.membership.member import Member
from sched.placement.choice import PlacementPolicy
from sched.placement.view import View
from sched.rejection import Estimate, rejections
from tests.engine.front.test_placing import DEMAND, MeasuredLinks, accepted, node


def record() -> dict:
    return json.loads(json.dumps(record_timeline().as_dict()))


def record_timeline(policy: PlacementPolicy | None = None) -> Timeline:
    """A request that was placed twice: node a was lost before it prefilled."""
    policy = policy or placement_policy(Config(), random.Random(0))
    timeline = Timeline("r-1", 1000, output_tokens=5, cached_tokens=0)
    timeline.add(10.0, "acc", "accepted")
    for attempt, names in enumerate((("a", "b"), ("b",))):
        view = View(0.0, [node(name, 0.5 * i) for i, name in enumerate(names)], MeasuredLinks(), 256)
        decision = accepted(policy.place(0.0, DEMAND, view, view.none))
        answer = ProbeAnswer(Member("b", ("h", 1)), NodeRecord().pack(), 0.0, None, 16, 0.001, None, None, 0)
        coming = {"b": Coming(7, 0.5)} if attempt else {}
        timeline.decisions.append(Placed(decision, [answer], 2, 0.003, computing=coming))
        timeline.nodes |= {"acceptor": "acc", "prefill": decision.prefill, "decode": decision.decode}
        timeline.add(10.1 + attempt, "acc", "placed", attempt=attempt)
    timeline.add(11.11, "b", "waiting")
    timeline.add(11.2, "b", "running")
    timeline.add(12.1, "acc", "first_token")
    timeline.add(12.5, "acc", "answered")
    return timeline


def test_truth_stands_beside_the_estimates_of_the_last_decision():
    truth = record()["truth"]
    assert truth["ttft_s"]["estimated_s"] == pytest.approx(1.0)
    assert truth["ttft_s"]["measured_s"] == pytest.approx(1.0), "from that decision, not from the first"
    assert truth["wait_s"]["measured_s"] == pytest.approx(0.09) and truth["wait_s"]["error"] == pytest.approx(1.0)
    assert truth["step_s"]["measured_s"] == pytest.approx(0.1)
    assert truth["step_s"]["error"] == pytest.approx(0.9)


def test_the_truth_does_not_depend_on_the_nodes_clocks():
    ahead = record_timeline()
    for event in ahead.events:
        if event["node"] == "b":
            event["t"] += 100.0
    ahead.clocks = {"b": {"offset_s": 100.0, "error_s": 0.001}}
    told, real = ahead.as_dict()["truth"], record()["truth"]
    assert told.keys() == real.keys()
    for name, values in told.items():
        assert values["measured_s"] == pytest.approx(real[name]["measured_s"]), name


def test_the_share_of_other_prompts_in_its_steps_is_waiting():
    timeline = record_timeline()
    timeline.add(12.0, "b", "computed", intervals=[[0.8, 0.0, 64]], others_s=0.3)
    timeline.add(12.4, "a", "computed", intervals=[[0.1, 0.0, 1]], others_s=9.0)  # not the prefill node
    truth = timeline.as_dict()["truth"]
    assert truth["wait_s"]["measured_s"] == pytest.approx(0.09 + 0.3)
    assert truth["prefill_s"]["measured_s"] == pytest.approx(0.9 - 0.3)
    assert truth["ttft_s"]["measured_s"] == pytest.approx(1.0)


def test_a_request_that_lost_its_node_in_the_middle_teaches_nothing():
    timeline = record_timeline()
    timeline.add(12.2, "acc", "attempt_failed", attempt=1, reason="node b was lost")
    timeline.add(12.3, "acc", "placed", attempt=2)
    assert timeline.as_dict()["truth"] == {}


def test_what_did_not_happen_has_no_truth():
    timeline = Timeline("r-2", 10)
    timeline.add(1.0, "acc", "accepted")
    assert timeline.as_dict()["truth"] == {}


def test_the_table_names_candidates_probes_and_errors():
    text = table(record())
    assert "decision 1 of 2" in text and "decision 2 of 2" in text
    lines = text.splitlines()
    assert any(line.startswith("* a") for line in lines) and any(line.startswith("  b") for line in lines)
    assert any(line.split() == ["step_s", "0.01", "0.1", "0.09", "90", "%"] for line in lines)
    assert [line for line in lines if "computing" in line] == ["b was computing 7 blocks of it, ready in 0.5 s"]
    assert "asked 2" in text and "decided in 3.00 ms, no claim" in text


def test_the_table_has_prices_if_placement_is_by_cost():
    assert "node_cost" not in table(record())
    prices = {"a": 2.0, "b": 0.5}
    policy = placement_policy(Config(placement="mooncake-cost"), random.Random(0), prices.__getitem__)
    lines = table(json.loads(json.dumps(record_timeline(policy).as_dict()))).splitlines()
    heads = [line.split() for line in lines if "node_cost" in line]
    assert heads and all("cost" in head for head in heads)
    assert [line.split()[0] for line in lines if line.startswith("* ") and " 0.5 " in line]


def test_the_table_has_the_loads_of_the_prefix_beside_what_was_expected():
    timeline = record_timeline()
    detail = {
        "blocks": 12,
        "tiers": {"dram": 8, "ssd": 4},
        "sources": {"s": 12},
        "seconds": 0.0031,
        "estimated_s": 0.0025,
    }
    timeline.add(12.0, "b", "prefix_fetched", transports={}, bytes=0, **detail)
    text = table(json.loads(json.dumps(timeline.as_dict())))
    assert "loaded 12 blocks (8 dram, 4 ssd) from s in 3.10 ms, expected 2.50 ms" in text
    assert "ssd_tokens" in text


def refused_record(refuse) -> dict:
    timeline = Timeline("r-3", 1000)
    timeline.nodes["acceptor"] = "acc"
    timeline.add(10.0, "acc", "accepted")
    view = View(0.0, [node("a", 9.0), node("b", 8.0)], MeasuredLinks(), 256)
    policy = placement_policy(Config(), random.Random(0))
    declined = refuse(policy, view).declined
    timeline.decisions.append(declined.kept())
    timeline.refused = declined.refused
    return json.loads(json.dumps(timeline.as_dict()))


def test_a_request_that_was_turned_away_shows_its_candidates_and_what_it_missed():
    def late(policy, view):
        decision = accepted(policy.place(0.0, DEMAND, view, view.none))
        wait_s = decision.estimates["wait_s"]
        estimate = Estimate(
            service_class="standard", ttft_s=9.0, wait_s=wait_s, step_s=0.0, step_soon_s=0.0, step_alone_s=0.0,
            decode_s=0.0,
        )  # fmt: skip
        return turned_away(rejections["early"]().at_arrival(estimate), decision, [], 2, 0.001)

    text = table(refused_record(late))
    assert "refused: estimated time to first token 9.00 s" in text and "retry after 4 s" in text
    assert "missed ttft of standard: 5 s, estimated 9 s" in text
    assert any(line.startswith("* b") for line in text.splitlines()) and "asked 2" not in text


def test_a_request_that_found_full_queues_or_no_node_is_explained():
    def full(policy, view):
        view.waiting[:] = view.max_waiting
        view.open_at[:] = float("inf")
        return no_placement(policy.place(0.0, DEMAND, view, view.none), [], 0, 0.001)

    text = table(refused_record(full))
    assert "refused: the queues of all prefill nodes are full" in text
    assert sum("queue full" in line for line in text.splitlines()) == 2

    def absent(policy, view):
        view.decodes = view.decodes & False
        view.closed_decode[:] = float("inf")
        return no_placement(policy.place(0.0, DEMAND, view, view.none), [], 0, 0.001)

    assert "no node with the role decode is alive and ready" in table(refused_record(absent))


class Node(BaseHTTPRequestHandler):
    """Knows one request, as any node of its cluster does; `recent` is what /live says of it."""

    recent: ClassVar[list[dict]] = []
    refused: ClassVar[dict | None] = None

    def do_GET(self) -> None:
        errors = {"ttft_s": {"requests": 12, "error_s": 0.005, "shares": 12, "mape": 0.07}}
        recent = {"requests": self.recent, "refused": self.refused, "estimates": errors}
        nodes = [{"error": "no answer in 1 s"}, {"recent": recent}]
        choices = {f"/live/requests/many-{k}": record() | {"request_id": f"many-{k}"} for k in range(3)}
        body = ({"/live/requests/r-1": record(), "/live": {"nodes": nodes}} | choices).get(self.path)
        data = json.dumps(body or {}).encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_command_finds_the_node_that_accepted_it(url, capsys):
    assert main(["r-1", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "accepted by acc" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("ttft_s") and "%" in line and "12" in line]
    assert line.split() == ["ttft_s", "12", "0.005", "7", "%"] and "estimates of the last 5 minutes" in shown
    assert main(["r-1", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == "r-1"
    assert main(["r-9", "--url", url]) == 1
    assert "no node knows r-9" in capsys.readouterr().err


def test_all_choices_of_a_request_are_explained(url, capsys):
    assert main(["many", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert [f"request many-{k}:" in shown for k in range(4)] == [True, True, True, False]
    assert main(["many", "--url", url, "--json"]) == 0
    assert [one["request_id"] for one in json.loads(capsys.readouterr().out)] == ["many-0", "many-1", "many-2"]
    assert main(["many-1", "--url", url]) == 0
    assert "request many-1:" in capsys.readouterr().out


def test_a_node_that_is_not_there_is_named(capsys):
    assert main(["r-1", "--url", "http://127.0.0.1:9"]) == 2
    assert "--url of a running node" in capsys.readouterr().err


def test_without_an_id_it_is_the_request_that_ended_last(url, capsys, monkeypatch):
    assert main(["--url", url]) == 1
    assert "no request has ended or was refused yet" in capsys.readouterr().err
    monkeypatch.setattr(Node, "recent", [{"id": "r-0", "ended": 4.0}, {"id": "r-1", "ended": 5.0}])
    assert main(["--url", url]) == 0
    assert "request r-1:" in capsys.readouterr().out
    monkeypatch.setattr(Node, "recent", [{"id": "r-0", "ended": 4.0}])
    monkeypatch.setattr(Node, "refused", {"id": "r-1", "ended": 5.0})
    assert main(["--url", url]) == 0, "one that was refused is asked for more than any other"
    assert "request r-1:" in capsys.readouterr().out


def test_moves_between_decode_nodes_are_told_with_their_pause():
    timeline = record_timeline()
    detail = {"to": "c", "reason": "drain", "pause_s": 0.02, "stages": 2, "bytes": 4096}
    timeline.extend([{"t": 12.3, "node": "b", "event": "moved", "detail": detail}])
    told = json.loads(json.dumps(timeline.as_dict()))
    assert told["summary"]["moves"] == 1 and told["summary"]["move_pauses_ms"] == 20
    assert "moved from b to c (drain): paused 20.0 ms, 4096 bytes, 2 copies while it decoded" in table(told)
