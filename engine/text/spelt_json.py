"""JSON in the spelling of templates and prompts, with spaces after commas and colons."""

from __future__ import annotations

import json
from typing import Any


def spelt_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The result of json.dumps, which holds the interpreter lock for up to 100 ms with the longest list of tools that a
    client may send. This function is slower, but lets other threads run."""
    return "".join(json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options).iterencode(value))
