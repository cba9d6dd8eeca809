"""C++ for the CPU, compiled at first use: no torch headers, called through ctypes with data_ptr().

`load` compiles with the g++, c++ or clang++ on PATH into $XDG_CACHE_HOME/mooncake/cpu (or ~/.cache/mooncake/cpu). The
file's name is a hash of everything that decides what it holds: sources and the headers next to them, compiler version,
flags and the OpenMP runtime. It appears by rename; of processes that want it at once one compiles, for half a minute,
and the others wait.

The OpenMP runtime is the one that torch has loaded. A second one in the process would bring its own threads, and two
pools that spin for the same cores are several times slower than one. So objects are compiled with -fopenmp but linked
against torch's file; only where torch ships none does the compiler choose.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall")
MACHINE_FLAGS = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "f16c": "-mf16c",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
    "amx_int8": "-mamx-int8",
}
"""Feature as /proc/cpuinfo spells it -> the flag of g++ and clang++ that lets code use it."""

AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512_BF16 = (*AVX512, "avx512_bf16")
AMX_BF16 = ("amx_tile", "amx_bf16")

COMPILERS = ("g++", "c++", "clang++")
TAIL_LINES = 15  # of a failing compiler's output, in the error

_lock = threading.Lock()
_loaded: dict[Path, ctypes.CDLL] = {}


class Unavailable(RuntimeError):
    """Kernels cannot be had on this machine; the message says why: a missing CPU feature, no compiler, its error."""


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str  # all that --version prints

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features that every CPU of this machine has, as /proc/cpuinfo spells them; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    sets = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(set.intersection(*sets)) if sets else frozenset()


def require(features: Sequence[str]) -> None:
    """Raises Unavailable naming the features that this CPU lacks."""
    missing = [name for name in features if name not in cpu_features()]
    if missing:
        raise Unavailable(f"this CPU lacks {', '.join(missing)}")


@functools.cache
def compiler() -> Compiler:
    """The first C++ compiler on PATH that runs. Raises Unavailable."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        if done.returncode == 0:
            return Compiler(path, done.stdout)
    raise Unavailable(f"no C++ compiler on PATH ({', '.join(COMPILERS)}); install g++")


def openmp_runtime(clang: bool) -> Path | None:
    """The OpenMP library that torch brings and that this kind of compiler's code can use."""
    patterns = ("libomp*", "libiomp5*") if clang else ("libgomp*",)
    folders = (Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent / "torch.libs")
    found = [path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern))]
    return found[0] if found else None


def load(
    name: str,
    sources: Sequence[Path],
    features: Sequence[str],
    flags: Sequence[str] = (),
    headers: Sequence[Path] = (),
) -> ctypes.CDLL:
    """The shared library of `sources`, compiled if the cache does not hold it.

    name: how its file in the cache begins. features: what the code uses, as /proc/cpuinfo spells it; those with a
    machine flag are switched on. flags: more for the compiler. headers: other folders than the sources' to find headers
    in. Raises Unavailable.
    """
    require(features)
    machine = [MACHINE_FLAGS[feature] for feature in features if feature in MACHINE_FLAGS]
    path = _cached(name, sources, [*FLAGS, *machine, *flags], headers, compiler())
    with _lock:
        if path not in _loaded:
            try:
                _loaded[path] = ctypes.CDLL(str(path))
            except OSError as error:
                raise Unavailable(f"cannot load the compiled kernels: {error}") from error
        return _loaded[path]


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mooncake" / "cpu"


def _cached(name: str, sources: Sequence[Path], flags: Sequence[str], folders: Sequence[Path], cxx: Compiler) -> Path:
    runtime = openmp_runtime(cxx.is_clang)
    key = hashlib.sha256(repr((cxx.version, list(flags), str(runtime))).encode())
    headers = {header for folder in (*(s.parent for s in sources), *folders) for header in folder.glob("*.h")}
    for file in [*sources, *sorted(headers)]:
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    path = cache_dir() / f"{name}-{key.hexdigest()[:20]}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _turn(path.parent):
                if not path.exists():
                    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-") as scratch:
                        _compile(
                            cxx, sources, [*flags, *(f"-I{f}" for f in folders)], runtime, Path(scratch) / path.name
                        )
                        (Path(scratch) / path.name).replace(path)
        except OSError as error:
            raise Unavailable(f"cannot write {path.parent} ({error}); set XDG_CACHE_HOME") from error
    return path


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time; the lock of one that dies is free."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(cxx: Compiler, sources: Sequence[Path], flags: Sequence[str], runtime: Path | None, out: Path) -> None:
    began = time.monotonic()
    objects = [out.parent / f"{i}-{source.stem}.o" for i, source in enumerate(sources)]
    pairs = zip(sources, objects, strict=True)
    _run_all([[cxx.path, *flags, "-c", str(source), "-o", str(target)] for source, target in pairs])
    omp = ["-fopenmp"] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    _run_all([[cxx.path, "-shared", *map(str, objects), *omp, "-o", str(out)]])
    log.info("compiled %s with %s in %.1f s", out.name, cxx.path, time.monotonic() - began)


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Side by side. Raises Unavailable with the end of the first failing one's output."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            tail = "\n".join(output.splitlines()[-TAIL_LINES:])
            raise Unavailable(f"compiling failed ({' '.join(command)}):\n{tail}")
