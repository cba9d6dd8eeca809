"""The same tokens however a prompt's KV gets to the decode node, a prefill node that dies while it is read, and a
trace in which all of it overlaps."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from engine.observe.intervals import shared
from engine.observe.timeline import spans_of
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.tools import perfetto as trace
from tests.e2e.conftest import Start, complete, settled, timeline

PROMPT = list(range(100, 430))
CHUNKED = ("--max-num-batched-tokens", "100", "--no-enable-prefix-caching", "--transport", "tcp")


def test_push_and_pull_by_layer_by_chunk_and_at_the_end(start: Start, tiny_model):
    with start("prefill=1,decode=1", *tiny_model, *CHUNKED) as cluster:
        texts = []
        for how, overlap in (("push", "layer"), ("push", "none"), ("pull", "layer"), ("pull", "chunk")):
            if texts:
                cluster.restart("prefill-0", "--kv-transfer", how, "--kv-overlap", overlap)
            url = cluster["decode-0"].url
            answer = complete(url, PROMPT, 8, ignore_eos=True)
            texts.append(answer["choices"][0]["text"])
            record = timeline(url, answer["id"])
            (moved,) = [e["detail"] for e in record["events"] if e["event"] == "kv_moved"]
            assert (moved["how"], moved["overlap"]) == (how, overlap)
            assert sum(nbytes for _, _, nbytes in moved["intervals"]) == moved["bytes"]
            assert (moved["batches"] == 1) == (overlap == "none")
            transfer = spans_of(e for e in record["events"] if e["event"] == "kv_moved")
            compute = spans_of(e for e in record["events"] if e["event"] == "computed" and e["node"] == "prefill-0")
            assert len(compute) == 4, "a step per 100 tokens"
            if overlap == "none":
                assert shared(transfer, compute) == 0.0 == record["summary"]["transfer_hidden_ms"]
            else:  # what is ready leaves while the rest is computed
                assert min(transfer)[0] < max(compute)[1]
            settled(cluster)
        assert len(set(texts)) == 1

        # a long prompt is being pulled when its source dies: the decode node's blocks come back, and the request
        # waits for the next prefill node. Its steps are small, so that there is a middle.
        slow = ("--kv-transfer", "pull", "--max-num-batched-tokens", "4", "--max-num-seqs", "4")
        cluster.restart("prefill-0", *slow)
        prompt = list(range(100, 2000))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, cluster["decode-0"].url, prompt, 2, ignore_eos=True)
            wait_until_reserved(cluster)
            cluster.kill("prefill-0")
            settled(cluster, 40.0)
            assert not answer.done()
            cluster.restart("prefill-0")
            assert answer.result(60.0)["usage"]["completion_tokens"] == 2
        settled(cluster)


def wait_until_reserved(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + 20
    while not rest.get(cluster["decode-0"].url + "/debug/state")["engine"]["held_for_requests"]["incoming"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_trace_of_a_long_prefill_shows_loads_computing_and_pushes_at_once(start: Start, tiny_model, tmp_path):
    """The file that scripts/tools.py perfetto writes, read back: a prefix that is in the store only, on rails of 4
    MB/s."""
    flags = (
        "--max-num-batched-tokens",
        "100",
        "--transport",
        "tcp",
        "--prefix-fetch",
        "always",
        "--rail-limit",
        "4000000",
    )
    with start("prefill=1,decode=1,store=1", *tiny_model, *flags) as cluster:
        url = cluster["decode-0"].url
        complete(url, list(range(100, 900)), 2, ignore_eos=True)
        settled(cluster)
        cluster.restart("prefill-0")
        answer = complete(url, list(range(100, 1900)), 4, ignore_eos=True)
        settled(cluster)
        path = tmp_path / "trace.json"
        assert trace.main([answer["id"], "--url", url, "-o", str(path)]) == 0
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    rows = {row: [(one["ts"], one["ts"] + one["dur"]) for one in events if one["cat"] == row] for row in trace.ROWS}
    assert all(rows.values()), {row: len(found) for row, found in rows.items()}
    loads, computing, pushes = rows["prefix loads"], rows["prefill compute"], rows["KV to the decode node"]
    assert shared(loads, computing) > 0, "the prefix arrives while it is used"
    assert shared(pushes, computing) > 0, "KV travels while the rest is computed"
    assert shared(loads, pushes) > 0
