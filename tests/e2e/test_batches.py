"""/v1/files and /v1/batches with OpenAI's own client on a real node, which is killed in the middle."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete

FLAGS = ("--served-model-name", "tiny", "--calibration-ms", "0", "--trust-request-chat-template")
LINES, TOKENS = 40, 150


def client_of(cluster: LocalCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.nodes[0].url}/v1", api_key="none", max_retries=0)


def completion(number: int, tokens: int = TOKENS, **body: Any) -> dict[str, Any]:
    prompt = [5 + number, 6, 7, 8]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def file_of(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def begun(client: openai.OpenAI, path: Path, endpoint: str = "/v1/completions") -> Any:
    with path.open("rb") as file:
        given = client.files.create(file=file, purpose="batch")
    return client.batches.create(
        input_file_id=given.id, endpoint=endpoint, completion_window="24h", metadata={"run": "test"}
    )


def until(client: openai.OpenAI, batch_id: str, *states: str) -> Any:
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch_id)).status not in states:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def lines_of(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def cluster(start: Start, tiny_model, kept):
    with start("mixed=1", *tiny_model, *FLAGS, "--batch-path", str(kept), "--batch-concurrency", "4") as running:
        yield running


def test_a_batch_from_upload_to_answers(cluster, tmp_path):
    client = client_of(cluster)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    chat |= {"chat_template": template, "ignore_eos": True}
    lines = [
        {"custom_id": f"chat-{number}", "method": "POST", "url": "/v1/chat/completions", "body": chat | extra}
        for number, extra in enumerate(({}, {"temperature": 0}, {"max_tokens": -1}))
    ]
    batch = begun(client, file_of(tmp_path, lines), "/v1/chat/completions")
    assert batch.status == "validating" and batch.metadata == {"run": "test"}
    done = until(client, batch.id, "completed")
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    assert done.in_progress_at and done.finalizing_at and done.completed_at and done.usage.output_tokens == 8
    good, bad = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert sorted(line["custom_id"] for line in good) == ["chat-0", "chat-1"]
    assert all(line["response"]["body"]["choices"][0]["message"]["role"] == "assistant" for line in good)
    assert bad[0]["custom_id"] == "chat-2" and bad[0]["response"]["status_code"] == 400
    assert "max_tokens" in bad[0]["response"]["body"]["error"]["message"]
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert [one.id for one in client.batches.list()] == [batch.id]


def test_a_file_that_no_batch_can_run(cluster, tmp_path):
    client = client_of(cluster)
    lines = [completion(0), completion(0), completion(1) | {"method": "GET"}, completion(2, model="other")]
    failed = until(client, begun(client, file_of(tmp_path, lines)).id, "failed")
    found = [(error.line, error.code, error.param) for error in failed.errors.data]
    assert found == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_method", "method"),
        (4, "model_not_found", "body.model"),
    ]
    with pytest.raises(openai.BadRequestError, match="no such file"):
        client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"{}", purpose="fine-tune")


def test_a_cancelled_batch_keeps_its_answers(cluster, tmp_path):
    client = client_of(cluster)
    batch = begun(client, file_of(tmp_path, [completion(number) for number in range(LINES)]))
    while client.batches.retrieve(batch.id).request_counts.completed < 3:
        time.sleep(0.05)
    assert client.files.delete(batch.input_file_id).deleted, "a batch has its input file of its own"
    client.batches.cancel(batch.id)
    over = until(client, batch.id, "cancelled")
    good, bad = lines_of(client, over.output_file_id), lines_of(client, over.error_file_id)
    assert len(good) >= 3
    assert len({line["custom_id"] for line in good + bad}) == len(good) + len(bad) == LINES
    assert {line["error"]["code"] for line in bad} == {"batch_cancelled"}


def test_a_killed_node_goes_on_where_it_was(cluster, tmp_path):
    client = client_of(cluster)
    batch = begun(client, file_of(tmp_path, [completion(number) for number in range(LINES)]))
    while not client.batches.retrieve(batch.id).request_counts.completed >= 5:
        time.sleep(0.02)
    cluster.restart("mixed-0")
    client = client_of(cluster)
    early = client.batches.retrieve(batch.id)
    assert early.status == "in_progress"
    done = until(client, batch.id, "completed")
    lines = lines_of(client, done.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{number}" for number in range(LINES))
    assert done.request_counts.completed == LINES and done.error_file_id is None
    by_id = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    for number in (0, LINES - 1):
        given = completion(number)["body"]
        alone = complete(cluster.nodes[0].url, given["prompt"], TOKENS, ignore_eos=True)
        assert by_id[f"line-{number}"] == alone["choices"][0]["text"]
