"""Runs batches: validates, answers line by line, writes the output and the error file.

What a batch has on disk (net/http/batches/folder.py) survives the process: a node that starts again goes on behind the
answers there. Lines of all batches run at once, as many as net/http/batches/pace.py lets.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from net.http.batches.answering import answer
from net.http.batches.files import ID, Files
from net.http.batches.folder import Folder
from net.http.batches.journal import Journal
from net.http.batches.line import LineError, answered, unanswered
from net.http.batches.pace import Pace
from net.http.batches.places import Place, line_at, places
from net.http.batches.record import Batch, Counts
from net.http.common.frontend import Frontend, Overloaded, Unavailable
from net.loop.restarts import Restarts
from net.loop.tasks import awaited, keep

log = logging.getLogger("mooncake.batches")

LOOK_S = 0.2
"""Between two looks at the clock, a cancellation and the requests of others while lines run."""

SAVE_S = 1.0
"""Between two writes of a running batch's counts; after a restart they are counted again from its journal."""


DISK_RETRY_S = 10.0
ENDS = ("output", "error")
"""The two files of a batch that has ended."""


class PathInUse(Exception):
    """Another node uses the folder."""


class Batches:
    """All batches of one folder. All methods run on the event loop, except what it hands to threads."""

    def __init__(self, frontend: Frontend, folder: Path, at_once: int) -> None:
        """at_once: lines at once, at most. Raises OSError, PathInUse."""
        folder.mkdir(parents=True, exist_ok=True)
        self._others: Callable[[], int] = lambda: 0
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise PathInUse(f"another node uses {folder}") from None
        self.files = Files(folder / "files")
        self._frontend = frontend
        self._folder = Folder(folder / "batches")
        self._batches = self._folder.read()
        self._pace = Pace(at_once)
        self._wake = asyncio.Event()
        self._progress: dict[str, asyncio.Event] = {}  # by batch, of those that answer lines
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch
        self._task: asyncio.Task[None] | None = None

    # --- from the routes

    async def create(self, batch: Batch) -> None:
        """Raises OSError; FileNotFoundError if its input file is gone."""
        await self._folder.whole(self._create(batch))

    async def _create(self, batch: Batch) -> None:
        await asyncio.to_thread(self._folder.link, batch, self.files.path(batch.input_file_id))
        await self._folder.save(batch)
        self._batches[batch.id] = batch
        self._wake.set()

    def get(self, batch_id: str) -> Batch:
        """Raises KeyError."""
        if not ID.fullmatch(batch_id):
            raise KeyError(batch_id)
        return self._batches[batch_id]

    def all(self) -> list[Batch]:
        """Newest first."""
        return sorted(self._batches.values(), key=lambda batch: (-batch.created_at, batch.id))

    async def cancel(self, batch: Batch) -> None:
        """Its running lines end; the answers so far become its output. Idempotent; a batch that has ended stays. Raises
        OSError, and then it is cancelled until the node restarts."""
        if batch.status in ("validating", "in_progress"):
            batch.move("cancelling", int(time.time()))
            self._nudge()
            self._wake.set()
            await self._folder.save(batch)

    def _nudge(self) -> None:
        """Every running batch looks again."""
        for progress in self._progress.values():
            progress.set()

    # --- life

    def give_way(self, others: Callable[[], int]) -> None:
        """`others()`: number of requests of other clients that this server works on."""
        self._others = others

    def start(self) -> None:
        self._task = keep(self._run, "running batches", Restarts())

    async def close(self) -> None:
        """Running lines end; their batches go on at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._folder.settled()
        os.close(self._lock)

    async def _run(self) -> None:
        """Starts a task for every open batch; they share the pace."""
        try:
            while True:
                self._wake.clear()
                for batch in list(self._batches.values()):
                    if batch.open and batch.id not in self._tasks:
                        task = self._tasks[batch.id] = awaited(self._work(batch))
                        task.add_done_callback(partial(self._ended, batch.id))
                await self._wake.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[batch_id]
        self._wake.set()

    async def _work(self, batch: Batch) -> None:
        """One batch to its end. A disk that fails does not end it: it goes on after a while."""
        try:
            await self._through(batch)
        except OSError as error:
            log.warning("batch %s goes on in %g s: %s", batch.id, DISK_RETRY_S, error)
            await asyncio.sleep(DISK_RETRY_S)
        except Exception:
            log.exception("batch %s", batch.id)
            batch.errors = [{"code": "internal_error", "line": None, "message": "see the node's log", "param": None}]
            await self._move(batch, "failed")

    async def _through(self, batch: Batch) -> None:
        given = self._folder.path(batch, "input")
        try:
            await asyncio.to_thread(self._folder.link, batch, self.files.path(batch.input_file_id))
        except FileNotFoundError:  # of a batch that began before batches had links
            message = f"the file {batch.input_file_id} is gone"
            batch.errors = [{"code": "file_lost", "line": None, "message": message, "param": "input_file_id"}]
            await self._move(batch, "failed")
            return
        valid_for = None
        if batch.status == "validating":
            valid_for = batch.model = self._frontend.model_name
        lines, errors = await asyncio.to_thread(places, given, batch.endpoint, valid_for)
        batch.total = len(lines)
        if batch.status == "validating":
            batch.errors = errors
            await self._move(batch, "failed" if errors else "in_progress")
            if errors:
                return
        journal = Journal(self._folder.path(batch, "lines"))
        try:
            done, batch.counts = await asyncio.to_thread(_read, journal)
            if batch.status == "in_progress":
                await self._answer(batch, journal, [line for line in lines if line.number not in done])
            if batch.status == "cancelling":
                batch.end = "cancelled"
            elif batch.status == "in_progress":
                batch.end = "completed" if batch.counts.answered == batch.total else "expired"
                await self._move(batch, "finalizing")
            out, err = await asyncio.to_thread(self._write, batch, journal, lines)
            batch.output_file_id, batch.error_file_id = out, err
            await self._move(batch, batch.end)
        finally:
            journal.close()

    async def _move(self, batch: Batch, status: str) -> None:
        batch.move(status, int(time.time()))
        await self._folder.save(batch)

    # --- answers

    async def _answer(self, batch: Batch, journal: Journal, lines: list[Place]) -> None:
        """Returns when all lines are answered, or the batch is cancelled or has expired."""
        left, tasks, saved = lines[::-1], set[asyncio.Task[None]](), time.monotonic()
        progress = self._progress[batch.id] = asyncio.Event()
        try:
            while (left or tasks) and batch.status == "in_progress" and time.time() < batch.expires_at:
                progress.clear()
                pause_s = self._pace.pause_s(time.monotonic(), self._others())
                while left and pause_s == 0.0:
                    self._pace.started()
                    tasks.add(awaited(self._one(batch, journal, left.pop(), left)))
                    pause_s = self._pace.pause_s(time.monotonic(), self._others())
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    task.result()  # a full disk ends the batch's run here, and its next run goes on
                if time.monotonic() - saved > SAVE_S:
                    await self._folder.save(batch)
                    saved = time.monotonic()
                if not (left or tasks):
                    break
                try:
                    async with asyncio.timeout(min(LOOK_S, pause_s) if left and pause_s else LOOK_S):
                        await progress.wait()
                except TimeoutError:
                    continue
        finally:
            del self._progress[batch.id]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, batch: Batch, journal: Journal, place: Place, left: list[Place]) -> None:
        """Answer one line, or put it back if there is no room now."""
        had_token = False

        def first_token() -> None:
            nonlocal had_token
            had_token = True
            self._pace.first_token()
            self._nudge()

        try:
            await self._answer_one(batch, journal, place, first_token)
        except (Overloaded, Unavailable) as error:
            self._pace.refused(time.monotonic(), error.retry_after_s)
            left.append(place)
        except LineError as error:  # of a version of this server with other limits
            self._give_up(batch, journal, place, error.code, str(error))
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
                raise  # the disk: the whole batch goes on later
            log.exception("line %d of batch %s", place.number + 1, batch.id)
            self._give_up(batch, journal, place, "internal_error", "see the node's log")
        else:
            self._pace.went_well()
        finally:
            self._pace.ended(had_token)
            self._nudge()

    async def _answer_one(self, batch: Batch, journal: Journal, place: Place, first_token: Callable[[], None]) -> None:
        request_id = f"{batch.id}-{place.number}"
        given = self._folder.path(batch, "input")
        line = await asyncio.to_thread(line_at, given, place, batch.endpoint, batch.model or "")
        status, body = await answer(self._frontend, line, batch.endpoint, request_id, first_token)
        entry = answered(batch.id, place.number, place.custom_id, request_id, status, body)
        usage = _usage(entry)
        journal.add(place.number, status == 200, entry)
        batch.counts.add(status == 200, usage)

    def _give_up(self, batch: Batch, journal: Journal, place: Place, code: str, message: str) -> None:
        """The line ends with an error, and the others go on."""
        journal.add(place.number, False, unanswered(batch.id, place.number, place.custom_id, code, message))
        batch.counts.add(False, {})

    # --- ends

    def _write(self, batch: Batch, journal: Journal, lines: list[Place]) -> tuple[str | None, str | None]:
        """Write the output and the error file; returns their ids, None for one without lines. A node that was killed in
        the middle writes the same files again."""
        out, err = (f"file-{blake2b(f'{batch.id} {name}'.encode(), digest_size=12).hexdigest()}" for name in ENDS)
        counts, done = {True: 0, False: 0}, set()
        code, why = _UNANSWERED.get(batch.end, ("", ""))
        with self.files.path(out).open("wb") as good, self.files.path(err).open("wb") as bad:
            for number, ok, line in journal.entries():
                (good if ok else bad).write(orjson.dumps(line) + b"\n")
                counts[ok] += 1
                done.add(number)
            for one in lines:
                if one.number not in done:
                    counts[False] += 1
                    bad.write(orjson.dumps(unanswered(batch.id, one.number, one.custom_id, code, why)) + b"\n")
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
        for file_id, name, count in zip((out, err), ENDS, (counts[True], counts[False]), strict=True):
            if count:
                now = int(time.time())
                self.files.add(file_id, f"{batch.id}_{name}.jsonl", "batch_output", now, batch.output_expires_s)
            else:
                self.files.path(file_id).unlink()
        return out if counts[True] else None, err if counts[False] else None


_UNANSWERED = {
    "expired": ("batch_expired", "this request did not run before the batch expired"),
    "cancelled": ("batch_cancelled", "this request did not run before the batch was cancelled"),
}


def _read(journal: Journal) -> tuple[set[int], Counts]:
    """(numbers of the answered lines, their counts)"""
    done, counts = set(), Counts()
    for number, ok, line in journal.entries():
        done.add(number)
        counts.add(ok, _usage(line))
    return done, counts


def _usage(line: dict[str, Any]) -> dict[str, Any]:
    """The usage in an answer; {} without one."""
    response = line["response"]
    return dict(response["body"].get("usage") or {}) if response is not None else {}
