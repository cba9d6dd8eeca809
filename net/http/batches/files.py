"""Files of clients and of batches on disk: `ID` has the bytes, `ID.json` what the API shows.

A file exists once its JSON is there, which is written last and at once; what a killed process leaves without it is
deleted at the next start.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Any

import orjson

ID = re.compile(r"(file|batch)-[0-9a-f]{24}")


def new_id(kind: str) -> str:
    """A name that nobody can guess. kind: file or batch."""
    return f"{kind}-{secrets.token_hex(12)}"


def write_at_once(path: Path, value: Any) -> None:
    """Replace a JSON file; readers and other writers see whole values, also after a kill. Raises OSError, TypeError
    if `value` is not JSON."""
    data, fresh = orjson.dumps(value), path.with_suffix(f".{secrets.token_hex(4)}.new")
    try:
        with fresh.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


class Files:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        known = {path.stem for path in folder.glob("*.json")}
        for path in folder.iterdir():
            if path.suffix != ".json" and path.stem not in known:
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Of its bytes. Raises KeyError for a name that is no file's."""
        if not ID.fullmatch(file_id) or not file_id.startswith("file-"):
            raise KeyError(file_id)
        return self._folder / file_id

    def add(self, file_id: str, filename: str, purpose: str, now: int, expires_s: int | None) -> dict[str, Any]:
        """Publish a file whose bytes are at `path`. Raises OSError, and then they are deleted."""
        shown = {
            "id": file_id,
            "object": "file",
            "bytes": self.path(file_id).stat().st_size,
            "created_at": now,
            "expires_at": None if expires_s is None else now + expires_s,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        try:
            write_at_once(self._json(file_id), shown)
        except OSError:
            self.path(file_id).unlink(missing_ok=True)
            raise
        return shown

    def get(self, file_id: str, now: int) -> dict[str, Any]:
        """What the API shows. Raises KeyError."""
        try:
            shown: dict[str, Any] = orjson.loads(self._json(file_id).read_bytes())
        except FileNotFoundError:
            raise KeyError(file_id) from None
        if shown["expires_at"] is not None and shown["expires_at"] <= now:
            self.remove(file_id)
            raise KeyError(file_id)
        return shown

    def all(self, now: int) -> list[dict[str, Any]]:
        """Newest first."""
        found = []
        for path in self._folder.glob("*.json"):
            try:
                found.append(self.get(path.stem, now))
            except KeyError:
                continue
        return sorted(found, key=lambda one: (-one["created_at"], one["id"]))

    def remove(self, file_id: str) -> None:
        """Raises KeyError."""
        try:
            self._json(file_id).unlink()
        except FileNotFoundError:
            raise KeyError(file_id) from None
        self.path(file_id).unlink(missing_ok=True)

    def _json(self, file_id: str) -> Path:
        return self.path(file_id).with_suffix(".json")
