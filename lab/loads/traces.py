"""The location of the released traces: shared/traces next to a parent of this checkout."""

from __future__ import annotations

from pathlib import Path

HINT = (
    "no released trace is available: take conversation_trace.jsonl from the directory FAST25-release/traces of "
    "github.com/kvcache-ai/Mooncake and give it by --trace, or put it into shared/traces next to this checkout"
)


def find_folder() -> Path | None:
    """None if it is missing."""
    folders = (parent / "shared/traces" for parent in Path(__file__).resolve().parents)
    return next((folder for folder in folders if folder.is_dir()), None)


def find_trace(name: str) -> Path | None:
    """The file of that trace; None if it is missing."""
    folder = find_folder()
    return None if folder is None else next(iter(sorted(folder.glob(f"{name}_trace.jsonl*"))), None)
