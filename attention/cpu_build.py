"""C++ kernels of this machine: compiled by g++ at first use, kept by content, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wall", "-Wno-maybe-uninitialized"]


@cache
def load(source: str) -> ctypes.CDLL:
    """The shared object of ROOT / source, which may include the headers beside it."""
    path = ROOT / source
    inputs = [path, *sorted(path.parent.glob("*.h"))]
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    key = hashlib.blake2b(repr([FLAGS, cpu, *(p.read_text() for p in inputs)]).encode(), digest_size=12).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake"
    home.mkdir(parents=True, exist_ok=True)
    built = home / f"{path.stem}-{key}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            made = Path(scratch) / built.name
            libraries = Path(torch.__file__).parent / "lib"
            done = subprocess.run(
                ["g++", *FLAGS, str(path), "-o", str(made), f"-L{libraries}"], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"g++ cannot compile {source}: {done.stderr[-2000:]}")
            made.rename(built)
    return ctypes.CDLL(str(built))
