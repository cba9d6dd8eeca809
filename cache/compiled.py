"""C code next to its module, compiled on first use into the user's cache. What it does can also be done without it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-shared", "-fPIC")


class Unavailable(RuntimeError):
    """The C code cannot be had here; the message says why."""


def library(source: Path) -> ctypes.CDLL:
    """The code of `source`, which takes half a second the first time. Raises Unavailable."""
    path = _cached(source)
    try:
        if not path.exists():
            _compile(source, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(str(error)) from None


def _cached(source: Path) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    content = source.read_bytes() + repr((FLAGS, os.uname().machine)).encode()
    return Path(base) / "mooncake" / "cache" / f"{source.stem}-{hashlib.blake2b(content, digest_size=8).hexdigest()}.so"


def _compile(source: Path, path: Path) -> None:
    """Two processes at once do the work twice and agree."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unavailable("no C compiler on PATH (Debian: apt install gcc)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *FLAGS, str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"{compiler} cannot compile {source.name}: {done.stderr.strip()[-200:]}")
        built.replace(path)
