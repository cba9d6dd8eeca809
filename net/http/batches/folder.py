"""Batches on disk: `ID.json` has the record of one, `ID.input` links to its input file, `ID.lines` is its journal.

With this link, a batch can read its input after the file has expired or was deleted. All records are written
here, one after the other, so the last state is the one that stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import orjson

from net.http.batches.files import write_at_once
from net.http.batches.record import Batch
from net.loop.tasks import awaited

log = logging.getLogger("mooncake.batches")


class Folder:
    """The batches of one folder."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._writing = asyncio.Lock()
        self._works = set[asyncio.Task[None]]()
        path.mkdir(exist_ok=True)

    def path(self, batch: Batch, suffix: str) -> Path:
        return self._path / f"{batch.id}.{suffix}"

    def read(self) -> dict[str, Batch]:
        """All batches by id. Deletes what a killed node left of batches that have ended or never began, and of
        records."""
        found = dict[str, Batch]()
        for path in self._path.glob("*.json"):
            try:
                batch = Batch.of(orjson.loads(path.read_bytes()))
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                log.error("%s is not the record of a batch, and is left alone: %s", path, error)
            else:
                found[batch.id] = batch
        for path in self._path.iterdir():
            if path.suffix == ".new" or (path.suffix in (".lines", ".input") and self._over(path, found)):
                path.unlink()
        return found

    def _over(self, path: Path, batches: Mapping[str, Batch]) -> bool:
        batch = batches.get(path.stem)
        return not path.with_suffix(".json").exists() if batch is None else not batch.open

    def link(self, batch: Batch, source: Path) -> None:
        """Keep the bytes of `source` for the batch, if it has none. Raises OSError, FileNotFoundError if they are
        gone."""
        own = self.path(batch, "input")
        if not own.exists():
            os.link(source, own)

    async def save(self, batch: Batch) -> None:
        """Write the record as it is when its turn comes; of a batch that has ended only the record stays. Raises
        OSError."""
        await self.whole(self._save(batch))

    async def _save(self, batch: Batch) -> None:
        async with self._writing:
            await asyncio.to_thread(self._write, batch, batch.kept(), batch.open)

    def _write(self, batch: Batch, kept: dict[str, Any], is_open: bool) -> None:
        write_at_once(self.path(batch, "json"), kept)
        if not is_open:
            for suffix in ("lines", "input"):
                self.path(batch, suffix).unlink(missing_ok=True)

    async def whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that goes on to its end if the caller is cancelled, as it is when its client hangs up."""
        task = awaited(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        await asyncio.shield(task)

    async def settled(self) -> None:
        """All writes have ended."""
        while self._works:
            await asyncio.gather(*self._works, return_exceptions=True)
