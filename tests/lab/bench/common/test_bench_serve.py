"""The whole script against real sockets."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import orjson
import pytest

from lab.bench.common.client import Client, Outcome, Server
from lab.bench.common.serve_flags import parse
from lab.bench.common.workload import Spec
from tests.net.fake_frontend import FakeFrontend, serving

SCRIPT = [str(Path(__file__).parents[4] / "scripts" / "bench.py"), "serve"]
SMALL = ["--vocab-size", "256", "--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "6"]


async def bench(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *SCRIPT, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()


def metric(data, name):
    return next(row for row in data["rows"] if row["metric"] == name)


async def test_quick_run_writes_the_result_format(tmp_path):
    frontend = FakeFrontend()
    async with serving(frontend) as url:
        path = tmp_path / "out.json"
        code, out, err = await bench(
            "--quick", "--base-url", url, "--vocab-size", "256", "--request-rate", "100", "--json", str(path)
        )
    assert code == 0, err
    data = orjson.loads(path.read_bytes())
    assert metric(data, "completed")["ours"] == 16
    assert metric(data, "total_output_tokens")["ours"] == 16 * 16
    assert metric(data, "total_input_tokens")["ours"] == 16 * 64
    assert metric(data, "total_cached_tokens")["ours"] == 16 * 32
    assert metric(data, "request_throughput")["limits"]["offered"] == pytest.approx(100)
    assert {"mean_ttft", "p90_ttft", "p99_tpot", "median_itl", "p90_tbt", "std_e2el"} <= {
        row["metric"] for row in data["rows"]
    }
    assert data["config"]["servers"][0]["model"] == "fake"
    assert "p90_ttft" in out
    sampling = frontend.calls[-1]["sampling"]
    assert (sampling["max_tokens"], sampling["ignore_eos"], sampling["temperature"]) == (16, True, 0.0)


async def test_peers_are_measured_and_missing_ones_named(tmp_path):
    ours, peer = FakeFrontend(), FakeFrontend()
    path = tmp_path / "out.json"
    async with serving(ours) as url, serving(peer) as peer_url:
        code, out, err = await bench(
            *SMALL, "--base-url", url, "--peer", f"twin={peer_url}", "--peer", "ghost=http://127.0.0.1:9",
            "--goodput", "ttft:60000", "tpot:60000", "--json", str(path)
        )  # fmt: skip
    assert code == 0, err
    data = orjson.loads(path.read_bytes())
    row = metric(data, "request_goodput")
    assert row["ours"] > 0 and row["peers"]["twin"] > 0 and row["peers"]["ghost"] is None
    assert "ghost is missing" in row["note"] and "ghost" in data["config"]["peers_missing"]
    assert "ours/twin" in out and "missing" in out
    assert [call["prompt"] for call in ours.calls] == [call["prompt"] for call in peer.calls]
    assert len(ours.calls) == 1 + 6


async def test_trace_replay_leaves_out_what_does_not_fit(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 3000, "output_length": 3, "hash_ids": [1, 2, 3, 4, 5, 6]},
        {"timestamp": 20, "input_length": 513, "output_length": 2, "hash_ids": [1, 2]},
    ]
    trace, path = tmp_path / "t.jsonl", tmp_path / "out.json"
    trace.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    frontend = FakeFrontend()
    async with serving(frontend) as url:
        code, _, err = await bench(
            "--dataset-name", "trace", "--dataset-path", str(trace), "--vocab-size", "256",
            "--base-url", f"{url}/v1", "--json", str(path)
        )  # fmt: skip
    assert code == 0, err
    row = metric(orjson.loads(path.read_bytes()), "completed")
    assert row["ours"] == 2 and "1 requests longer than the context" in row["note"]
    first, second = (call["prompt"] for call in frontend.calls[1:])
    assert first[:513] == second


async def test_chat_backend_sends_text():
    frontend = FakeFrontend()
    async with serving(frontend) as url:
        code, out, err = await bench(*SMALL, "--base-url", url, "--backend", "openai-chat", "--max-concurrency", "1")
    assert code == 0, err
    assert "total_output_tokens" in out
    assert all(chr(token).isalpha() or token == 32 for token in frontend.calls[-1]["prompt"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--dataset-name", "trace", "--dataset-path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--goodput", "itl:5"], "METRIC:MS"),
        (["--peer", "ours=http://x"], "NAME=URL"),
        (["--request-rate", "0"], "--request-rate"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio"),
        (["--metric-percentiles", "101"], "0..100"),
        (["--percentile-metrics", "ttft,speed"], "speed"),
        (["--num-prompts", "0"], "at least 1"),
        (["--extra-body", "[]"], "JSON object"),
    ],
)
async def test_mistakes_are_one_clear_line(arguments, words):
    code, out, err = await bench(*arguments)
    assert code == 2 and not out
    assert words in err and "Traceback" not in err


async def test_a_model_that_is_not_served_and_a_refused_request():
    async with serving(FakeFrontend()) as url:
        code, _, err = await bench("--base-url", url, "--model", "other")
        assert code == 2 and "serves no model 'other'" in err
        code, _, err = await bench("--base-url", url, "--vocab-size", "50000")
        assert code == 2 and "test request" in err and "not in the vocabulary" in err
        code, _, err = await bench("--base-url", url, "--vocab-size", "256", "--random-input-len", "5000")
        assert code == 2 and "no request fits" in err


@pytest.mark.expects_error("request .* failed")
async def test_failures_are_counted_by_cause():
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession() as session:
        client = Client(session, Server("ours", url, "fake", None), "openai", {})
        prompts = ["!late death", "!crash", "!overloaded", "fine"]
        specs = [Spec(list(prompt.encode()), 9) for prompt in prompts]
        outcomes, _ = await client.run(specs, None, float("inf"), lambda: None)
    assert [outcome.error is None for outcome in outcomes] == [False, False, False, True]
    assert "the decode node died" in (outcomes[0].error or "")
    assert (outcomes[2].error or "").startswith("status 429")
    assert outcomes[3].output_tokens == 9 and len(outcomes[3].itl_s) == 8


async def test_the_deadline_gives_up():
    frontend = FakeFrontend()
    async with serving(frontend) as url, aiohttp.ClientSession() as session:
        client = Client(session, Server("ours", url, "fake", None), "openai", {})
        specs = [Spec(list(b"!hang"), 9), Spec(list(b"ok"), 2, at_s=1e9)]
        outcomes, _ = await client.run(specs, None, 0.2, lambda: None)
        async with asyncio.timeout(10):
            await frontend.idle.wait()
    assert [outcome.error for outcome in outcomes] == ["not finished before the deadline", "not sent"]


async def test_an_unreachable_server_is_an_outcome():
    async with aiohttp.ClientSession() as session:
        outcome = Outcome()
        await Client(session, Server("x", "http://127.0.0.1:9", "m", None), "openai", {}).send(Spec([1], 1), outcome)
    assert outcome.error and "Connect" in outcome.error


def test_given_flags_win_over_quick():
    args = parse(["--quick", "--num-prompts", "3"], "")
    assert (args.num_prompts, args.request_rate, args.rounds) == (3, 8.0, 1)
    assert parse(["--peer", "a=http://x"], "").rounds == 2
