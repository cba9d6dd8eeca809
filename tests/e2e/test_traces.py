"""A cluster whose keys are in a file and whose requests are traced: one trace over prefill and decode node."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator

import pytest

from engine.doctor.run import main as doctor
from engine.observe.explain import main as explain
from lab.launch.cluster import LocalCluster
from lab.tools.perfetto import main as trace
from tests.e2e.conftest import Start
from tests.otlp_collector import Collector, collecting_aside

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEY = "first-of-the-file"
BODY = b'{"model": "tiny", "prompt": "the way of a request", "max_tokens": 8, "ignore_eos": true}'


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting_aside() as running:
        yield running


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# one a line\n{KEY}\nanother-key\n")
    return str(path)


@pytest.fixture(scope="module")
def cluster(start: Start, tiny_model, collector, keys) -> Iterator[LocalCluster]:
    """Nodes join by the first key of the file: it is their only flag of keys."""
    flags = ("--served-model-name", "tiny", "--api-key-file", keys, "--otlp-traces-endpoint", collector.url)
    with start("prefill=1,decode=1", *tiny_model, *flags, api_key=KEY) as running:
        yield running


def ask(url: str, request_id: str, **headers: str) -> None:
    headers |= {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Request-Id": request_id}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", BODY, headers), timeout=60) as answer:
        assert answer.status == 200


def test_one_trace_over_prefill_and_decode(cluster, collector):
    ask(cluster["decode-0"].url, "traced", traceparent=f"00-{TRACE}-{PARENT}-01")
    deadline = time.monotonic() + 20
    while not any(span.name == "llm_request" and span.trace == TRACE for span in collector.spans):
        assert time.monotonic() < deadline, collector.spans
        time.sleep(0.05)
    spans = [span for span in collector.spans if span.trace == TRACE]
    (root,) = (span for span in spans if span.name == "llm_request")
    assert (root.node, root.parent, root.attributes["gen_ai.request.id"]) == ("decode-0", PARENT, "traced")
    assert root.attributes["gen_ai.usage.completion_tokens"] == 8
    where = {(span.node, span.name) for span in spans}
    assert {("prefill-0", name) for name in ("state waiting", "prefill chunk", "kv transfer")} <= where
    assert {("decode-0", name) for name in ("place", "reserve blocks", "decode", "stream")} <= where
    assert {span.parent for span in spans if span is not root} == {root.span}
    assert all(root.begin - 0.01 <= span.begin <= span.end <= root.end + 0.01 for span in spans), "nodes of one host"


def test_the_commands_take_the_key_from_the_file(cluster, keys, tmp_path, capsys):
    """`explain` and scripts/tools.py perfetto ask the node that did not accept the request."""
    ask(cluster["decode-0"].url, "asked")
    other = cluster["prefill-0"].url.removeprefix("http://")
    assert explain(["cmpl-asked", "--url", other, "--api-key-file", keys]) == 0
    assert "accepted by decode-0" in capsys.readouterr().out
    assert trace(["asked", "--url", other, "--api-key-file", keys, "-o", str(tmp_path / "trace.json")]) == 0
    assert "KV to the decode node" in (tmp_path / "trace.json").read_text()
    assert trace(["--minutes", "5", "--url", other, "--api-key-file", keys, "-o", str(tmp_path / "all.json")]) == 0
    found = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert "asked" in {event["args"].get("request") for event in found}
    assert explain(["asked", "--url", other]) == 2
    assert "missing or wrong API key" in capsys.readouterr().err


def test_doctor_tries_the_ways_to_a_node(cluster, keys, capsys):
    peer = cluster["prefill-0"].url.removeprefix("http://")
    assert doctor(["--peer", peer, "--api-key-file", keys]) == 0
    found = capsys.readouterr().out
    for name in ("shm", "tcp"):
        assert re.search(rf"ok +{name} to prefill-0 .*offered", found), found
    assert re.search(r"ok +path to prefill-0 +shm", found), found
