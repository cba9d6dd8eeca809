"""Programs of scripts/bench.py connect: processes that answer JSON questions, line by line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def program(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """It is killed at the end."""
    process = subprocess.Popen(
        list(command),
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd="/",
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], question: Mapping[str, Any]) -> None:
    """Raises OSError if it has ended."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> Any:
    """The next answer; other lines on standard output are not ours. Raises RuntimeError if the program has ended."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(("[", '"')):
            return json.loads(text)
    raise RuntimeError(f"a program ended with {process.wait()}")
