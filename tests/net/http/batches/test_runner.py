"""Batches over HTTP without a model: refusals, waits, ends, a full disk, and one owner of a folder."""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from net.http import create_app
from net.http.batches import runner
from net.http.batches.answering import answer
from net.http.batches.files import write_at_once
from net.http.batches.folder import Folder
from net.http.batches.journal import Journal
from net.http.batches.line import Line
from net.http.batches.record import Batch
from net.http.batches.runner import Batches, PathInUse
from net.http.server import HttpServer
from tests.net.fake_frontend import FakeFrontend


class Api:
    """One server with a folder, and its client."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, batches: Batches | None, frontend: FakeFrontend
    ) -> None:
        self._session, self._url = session, url
        self.batches, self.frontend = batches, frontend

    async def json(self, method: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        async with self._session.request(method, self._url + path, **body) as answer:
            found = await answer.json()
            assert answer.status == status, found
            return found

    async def lines(self, file_id: str) -> list[dict[str, Any]]:
        async with self._session.get(f"{self._url}/v1/files/{file_id}/content") as answer:
            return [orjson.loads(line) for line in (await answer.read()).splitlines()]

    async def upload(self, data: bytes, status: int = 200, purpose: str = "batch") -> dict[str, Any]:
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", data, filename="a.jsonl")
        return await self.json("POST", "/v1/files", status, data=form)

    async def send(self, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        """An upload with this body: (status, answer)."""
        headers = {"Content-Type": "multipart/form-data; boundary=b"} | headers
        async with self._session.post(f"{self._url}/v1/files", data=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def begin(self, *prompts: str, **fields: Any) -> dict[str, Any]:
        given = await self.upload(b"\n".join(line(str(n), prompt) for n, prompt in enumerate(prompts)))
        body = {"input_file_id": given["id"], "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        return await self.json("POST", "/v1/batches", json=body)

    async def until(self, batch: dict[str, Any], *states: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (found := await self.json("GET", f"/v1/batches/{batch['id']}"))["status"] not in states:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found


def line(custom_id: str, prompt: str) -> bytes:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 5}
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


@asynccontextmanager
async def served(
    folder: Path | None, at_once: int = 4, model: str = "fake", origins: Sequence[str] = ()
) -> AsyncIterator[Api]:
    frontend = FakeFrontend()
    frontend.model_name = model
    batches = None if folder is None else Batches(frontend, folder, at_once)
    server = HttpServer(create_app(frontend, batches=batches, allowed_origins=origins))
    host, port = await server.start("127.0.0.1")
    try:
        async with aiohttp.ClientSession() as session:
            yield Api(session, f"http://{host}:{port}", batches, frontend)
    finally:
        await server.close()


@pytest.mark.expects_error("request batch-[0-9a-f]*-2 failed")
async def test_answers_errors_and_classes(tmp_path):
    async with served(tmp_path) as api:
        done = await api.until(await api.begin("hello", "!invalid x", "!crash x", metadata={"a": "b"}), "completed")
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        assert done["metadata"] == {"a": "b"} and done["model"] == "fake"
        (good,) = await api.lines(done["output_file_id"])
        bad, crashed = sorted(await api.lines(done["error_file_id"]), key=lambda one: one["custom_id"])
        assert good["response"]["body"]["choices"][0]["text"] == "hello"
        assert bad["custom_id"] == "1" and bad["response"]["status_code"] == 400
        assert crashed["response"]["status_code"] == 500, "a line that fails costs no other one"
        assert {call["service_class"] for call in api.frontend.calls} == {"batch"}
        await api.json("POST", f"/v1/batches/{done['id']}/cancel", 409)


@pytest.mark.expects_error("request batch-1-0 failed")
async def test_a_body_that_cannot_be_written_costs_no_other_line():
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    given = Line(0, "a", {"model": "fake", "prompt": deep})
    status, body = await answer(FakeFrontend(), given, "/v1/completions", "batch-1-0", lambda: None)
    assert status == 500 and "batch-1-0" in body["error"]["message"]


@pytest.mark.expects_error("line 2 of batch batch-")
@pytest.mark.parametrize("where", ["line_at", "answer", "answered"])
async def test_an_unforeseen_failure_of_a_line_costs_no_other_one(tmp_path, monkeypatch, where):
    plain = getattr(runner, where)

    def fails(*arguments: Any) -> Any:
        if any(getattr(one, "custom_id", one) == "1" for one in arguments):
            raise RuntimeError("nobody thought of it")
        return plain(*arguments)

    monkeypatch.setattr(runner, where, fails)
    async with served(tmp_path) as api:
        done = await api.until(await api.begin("a", "b", "c"), "completed", "failed")
        assert done["status"] == "completed" and done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert sorted(one["custom_id"] for one in await api.lines(done["output_file_id"])) == ["0", "2"]
        (bad,) = await api.lines(done["error_file_id"])
    assert bad["custom_id"] == "1" and bad["response"] is None and bad["error"]["code"] == "internal_error"


async def test_a_body_that_is_too_deep_is_named(tmp_path):
    async with served(tmp_path) as api:
        deep = line("deep", "x").replace(b'"x"', b"[" * 300 + b"]" * 300)
        given = await api.upload(line("a", "x") + b"\n" + deep)
        body = {"input_file_id": given["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        failed = await api.until(await api.json("POST", "/v1/batches", json=body), "failed")
    assert [(one["line"], one["code"]) for one in failed["errors"]["data"]] == [(2, "invalid_value")]


async def test_a_line_without_room_runs_later(tmp_path):
    async with served(tmp_path) as api:
        turns = 0
        plain = api.frontend._generate

        async def busy(prompt, sampling):
            nonlocal turns
            turns += 1
            word = "!overloaded" if turns <= 3 else api.frontend.decode(prompt)
            async for output in plain(api.frontend.encode(word), sampling):
                yield output

        api.frontend._generate = busy
        done = await api.until(await api.begin("a", "b", "c"), "completed")
        assert done["request_counts"]["completed"] == 3
        assert len(await api.lines(done["output_file_id"])) == 3 and turns == 6


async def test_a_full_disk_delays_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "DISK_RETRY_S", 0.05)
    add, failures = Journal.add, [OSError("disk full")]

    def full_once(self, *entry):
        if failures:
            raise failures.pop()
        add(self, *entry)

    monkeypatch.setattr(Journal, "add", full_once)
    async with served(tmp_path) as api:
        done = await api.until(await api.begin("a", "b"), "completed")
        lines = await api.lines(done["output_file_id"])
    assert sorted(one["custom_id"] for one in lines) == ["0", "1"]


async def test_an_expired_batch_says_what_did_not_run(tmp_path):
    async with served(tmp_path) as api:
        given = await api.upload(line("late", "x"))
        batch = Batch("batch-" + "0" * 24, "/v1/completions", given["id"], "24h", 1000)
        await api.batches.create(batch)
        over = await api.until({"id": batch.id}, "expired")
        (bad,) = await api.lines(over["error_file_id"])
    assert bad["error"]["code"] == "batch_expired" and over["output_file_id"] is None and not api.frontend.calls


@pytest.mark.parametrize("status", ["in_progress", "cancelling", "finalizing"])
async def test_what_a_killed_node_left_is_finished_at_the_next_start(tmp_path, status):
    async with served(tmp_path) as api:
        given = await api.upload(b"\n".join(line(str(n), "x") for n in range(3)))
    batch = Batch("batch-" + "1" * 24, "/v1/completions", given["id"], "24h", 2**31)
    batch.status, batch.total, batch.model = status, 3, "fake"
    write_at_once(tmp_path / "batches" / f"{batch.id}.json", batch.kept())
    journal = Journal(tmp_path / "batches" / f"{batch.id}.lines")
    entry = {"custom_id": "1", "response": {"status_code": 200, "body": {}}, "error": None}
    journal.add(1, True, entry)
    journal.close()
    async with served(tmp_path) as api:
        over = await api.until({"id": batch.id}, "completed", "cancelled")
        ran = {call["request_id"].rpartition("-")[2] for call in api.frontend.calls}
        assert entry in await api.lines(over["output_file_id"])
    assert over["status"] == ("cancelled" if status == "cancelling" else "completed")
    assert len(ran) == (2 if status == "in_progress" else 0)
    assert not (tmp_path / "batches" / f"{batch.id}.lines").exists()


async def test_a_node_with_another_model_answers_an_error_per_line(tmp_path):
    async with served(tmp_path) as api:
        given = await api.upload(b"\n".join(line(str(n), "x") for n in range(3)))
    batch = Batch("batch-" + "2" * 24, "/v1/completions", given["id"], "24h", 2**31, model="fake")
    batch.status, batch.total = "in_progress", 3
    write_at_once(tmp_path / "batches" / f"{batch.id}.json", batch.kept())
    async with served(tmp_path, model="other") as api:
        over = await api.until({"id": batch.id}, "completed")
        bad = await api.lines(over["error_file_id"])
    assert sorted(one["custom_id"] for one in bad) == ["0", "1", "2"] and over["model"] == "fake"
    assert all("does not exist" in one["response"]["body"]["error"]["message"] for one in bad)


@pytest.mark.parametrize("end", ["expires", "deleted"])
async def test_a_batch_keeps_an_input_file_that_is_gone(tmp_path, end):
    async with served(tmp_path, at_once=1) as api:
        plain, turns = api.frontend._generate, 0

        async def stops(prompt, sampling):
            nonlocal turns
            turns += 1
            if turns > 2:
                await asyncio.Event().wait()
            async for output in plain(prompt, sampling):
                yield output

        api.frontend._generate = stops
        given = await api.upload(b"\n".join(line(str(n), "x") for n in range(5)))
        body = {"input_file_id": given["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await api.json("POST", "/v1/batches", json=body)
        while (await api.json("GET", f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if end == "deleted":
            assert (await api.json("DELETE", f"/v1/files/{given['id']}"))["deleted"]
        else:
            path = tmp_path / "files" / f"{given['id']}.json"
            path.write_bytes(orjson.dumps(given | {"expires_at": 1000}))
        await api.json("GET", f"/v1/files/{given['id']}", 404)
        assert not (tmp_path / "files" / given["id"]).exists()
    async with served(tmp_path) as api:
        done = await api.until(batch, "completed")
        found = sorted(one["custom_id"] for one in await api.lines(done["output_file_id"]))
        assert found == ["0", "1", "2", "3", "4"] and len(api.frontend.calls) == 3
    assert [path.name for path in (tmp_path / "batches").iterdir()] == [f"{batch['id']}.json"]


async def test_what_batches_leave_is_tidied_at_the_next_start(tmp_path):
    over, torn = (Batch("batch-" + digit * 24, "/v1/completions", "file-1", "24h", 1000) for digit in "34")
    over.status = "completed"
    async with served(tmp_path):
        for batch in (over, torn):
            for suffix in ("lines", "input", "json.new"):
                (tmp_path / "batches" / f"{batch.id}.{suffix}").write_bytes(b"")
        write_at_once(tmp_path / "batches" / f"{over.id}.json", over.kept())
    async with served(tmp_path):
        assert [path.name for path in (tmp_path / "batches").iterdir()] == [f"{over.id}.json"]


async def test_the_last_state_of_a_batch_is_the_one_on_disk(tmp_path, monkeypatch):
    writers = most = 0

    def slow(path: Path, value: Any) -> None:
        nonlocal writers, most
        writers += 1
        most = max(most, writers)
        time.sleep(0.02)
        write_at_once(path, value)
        writers -= 1

    monkeypatch.setattr("net.http.batches.folder.write_at_once", slow)
    folder = Folder(tmp_path)
    batch = Batch("batch-" + "5" * 24, "/v1/completions", "file-1", "24h", 1000)
    saves = [asyncio.create_task(folder.save(batch)) for _ in range(4)]
    await asyncio.sleep(0.01)
    saves[0].cancel()  # its thread writes on
    batch.move("cancelling", 1001)
    await asyncio.gather(folder.save(batch), *saves[1:])
    await folder.settled()
    assert most == 1 and folder.read()[batch.id] == batch


def test_writers_of_one_file_do_not_meet(tmp_path):
    path, value = tmp_path / "a.json", "x" * 100_000
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: write_at_once(path, [number, value]), range(40)))
    assert orjson.loads(path.read_bytes())[1] == value and list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_at_once(path, "\ud800")
    assert list(tmp_path.iterdir()) == [path]


async def test_the_event_loop_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    plain, threads = os.fsync, set[int]()

    def noted(file: int) -> None:
        threads.add(threading.get_ident())
        plain(file)

    monkeypatch.setattr(os, "fsync", noted)
    async with served(tmp_path) as api:
        await api.until(await api.begin("a", "b"), "completed")
        await api.json("POST", f"/v1/batches/{(await api.begin('a'))['id']}/cancel")
    assert threads and threading.get_ident() not in threads


async def test_lists_and_refusals(tmp_path):
    async with served(tmp_path) as api:
        files = [(await api.upload(b"{}"))["id"] for _ in range(3)]
        page = await api.json("GET", "/v1/files?limit=2")
        assert page["has_more"] and {one["id"] for one in page["data"]} < set(files)
        rest = await api.json("GET", f"/v1/files?limit=2&after={page['last_id']}")
        assert not rest["has_more"] and len(rest["data"]) == 1
        for query in ("limit=0", "limit=x", "limit=" + "9" * 5000, "limit=²", "after=nobody", "order=up"):
            await api.json("GET", f"/v1/files?{query}", 400)
        await api.upload(b"", 400)
        await api.upload(b"{}", 400, purpose="fine-tune")
        await api.json("POST", "/v1/files", 415, json={})
        body = {"input_file_id": files[0], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        await api.json("POST", "/v1/batches", 400, json=body)
        for path in ("/v1/files/lock", "/v1/files/..%2Flock", "/v1/batches/x", f"/v1/batches/{files[0]}"):
            await api.json("GET", path, 404)
        assert (await api.json("DELETE", f"/v1/files/{files[0]}"))["deleted"]
        await api.json("GET", f"/v1/files/{files[0]}", 404)


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Parts of (headers after the name, value) behind the name that they begin with."""
    return b"".join(b"--b\r\n%s\r\n\r\n%s\r\n" % part for part in parts) + b"--b--\r\n"


def part(name: str, value: bytes) -> tuple[bytes, bytes]:
    return f'Content-Disposition: form-data; name="{name}"'.encode(), value


FILE, BATCH = part("file", b"{}"), part("purpose", b"batch")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([(FILE[0] + b'; filename="\xe9.jsonl"', b"{}"), BATCH], "not UTF-8"),
        ([(FILE[0] + b"\r\nX-Long: " + b"x" * 100_000, b"{}"), BATCH], "headers"),
        ([(FILE[0] + b"".join(b"\r\nX-%d: 1" % n for n in range(300)), b"{}"), BATCH], "headers"),
        ([part("_charset_", b"x" * 100), FILE, BATCH], "multipart"),
        ([FILE, BATCH, part("expires_after[seconds]", b"9" * 4095)], "from 3600 to 2592000"),
        ([FILE, BATCH, part("expires_after[seconds]", b"3599")], "from 3600 to 2592000"),
        ([FILE, BATCH, part("expires_after[anchor]", b"created_at")], "from 3600 to 2592000"),
        ([FILE, BATCH, part("expires_after[seconds]", b"3600"), part("expires_after[anchor]", b"now")], "created_at"),
        ([BATCH], "file is missing"),
    ],
)
async def test_a_form_that_is_refused(tmp_path, parts, why):
    async with served(tmp_path) as api:
        status, told = await api.send(form(*parts))
        assert status == 400 and why in told["error"]["message"], told
        assert not list((tmp_path / "files").iterdir())


async def test_a_compressed_form_is_refused(tmp_path):
    async with served(tmp_path) as api:
        status, told = await api.send(gzip.compress(form(FILE, BATCH)), **{"Content-Encoding": "gzip"})
        assert status == 415 and "not compressed" in told["error"]["message"], told


@pytest.mark.parametrize("full", [False, True])
async def test_a_client_that_hangs_up_leaves_a_whole_file_or_none(tmp_path, monkeypatch, full):
    began, go = threading.Event(), threading.Event()

    def slow(path: Path, value: Any) -> None:
        began.set()
        go.wait(20)
        if full:
            raise OSError(errno.ENOSPC, "disk full")
        write_at_once(path, value)

    monkeypatch.setattr("net.http.batches.files.write_at_once", slow)
    async with served(tmp_path) as api:
        client = asyncio.create_task(api.send(form(FILE, BATCH)))
        await asyncio.to_thread(began.wait, 20)
        client.cancel()
        await asyncio.sleep(0.1)  # the server notices
        go.set()
        folder, told = tmp_path / "files", "*" if full else "*.json"
        async with asyncio.timeout(20):
            while len(list(folder.glob(told))) != (not full):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if not full:
            (kept,) = (await api.json("GET", "/v1/files"))["data"]
            assert await api.lines(kept["id"]) == [{}]


async def test_other_fields_of_a_form_are_ignored(tmp_path):
    async with served(tmp_path) as api:
        others = [part(f"field{n}", b"x") for n in range(100)]
        status, kept = await api.send(form(*others, part("expires_after[seconds]", b"2592000"), FILE, BATCH))
        assert status == 200 and kept["expires_at"] - kept["created_at"] == 2_592_000


async def test_a_web_page_changes_nothing_without_a_key(tmp_path):
    page = {"Origin": "http://elsewhere.example"}
    async with served(tmp_path) as api:
        status, told = await api.send(form(FILE, BATCH), **page)
        assert status == 403 and told["error"]["code"] == "forbidden" and not list((tmp_path / "files").iterdir())
        batch = await api.begin("hello")
        await api.json("POST", "/v1/batches", 403, json={}, headers=page)
        await api.json("POST", f"/v1/batches/{batch['id']}/cancel", 403, headers=page)
        await api.until(batch, "completed")
    async with served(tmp_path, origins=[page["Origin"]]) as api:
        assert (await api.send(form(FILE, BATCH), **page))[0] == 200, "this page may call"
        assert (await api.send(form(FILE, BATCH), Origin="null"))[0] == 403


async def test_a_file_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("net.http.batches.upload.MAX_FILE_BYTES", 1000)
    async with served(tmp_path) as api:
        await api.upload(b"x" * 1001, 413)
        assert not list((tmp_path / "files").iterdir())


async def test_without_a_folder(tmp_path):
    async with served(None) as api:
        told = await api.json("GET", "/v1/batches", 404)
    assert "--batch-path" in told["error"]["message"]


async def test_one_node_uses_a_folder_at_a_time(tmp_path):
    async with served(tmp_path) as api:
        with pytest.raises(PathInUse):
            Batches(api.frontend, tmp_path, 1)
    Batches(FakeFrontend(), tmp_path, 1)
