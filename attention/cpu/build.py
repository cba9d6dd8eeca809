"""C++ for the CPU, compiled at first use: no torch headers, called through ctypes with data_ptr().

`load` compiles with the g++, c++ or clang++ on PATH, which takes half a minute. net/compiled.py keeps the result for
these sources, all headers next to them and in the given folders, this compiler version, these flags and this OpenMP
runtime.

The OpenMP runtime is the one that torch has loaded. A second runtime in the process would start its own threads, and
two pools that spin on the same cores are several times slower than one. So objects are compiled with -fopenmp but
linked against torch's file; the compiler chooses only if torch ships none.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from net.compiled import NotCompiled, kept, opened, path_of, run

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
    "asimddp": "-march=armv8.2-a+dotprod",
}
"""Feature as /proc/cpuinfo spells it -> the flag of g++ and clang++ that lets code use it."""

AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512_VNNI = (*AVX512, "avx512_vnni")
AVX512_BF16 = (*AVX512_VNNI, "avx512_bf16")
AMX_BF16 = ("amx_tile", "amx_bf16")

COMPILERS = ("g++", "c++", "clang++")

Recipe = tuple[str, list[Path], Sequence[str], Sequence[str], list[Path]]
"""The arguments of `load`."""

_lock = threading.Lock()
_loaded: dict[Path, ctypes.CDLL] = {}


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str  # the whole output of --version

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features that every CPU of this machine has, as /proc/cpuinfo spells them; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    sets = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(set.intersection(*sets)) if sets else frozenset()


def require(features: Sequence[str]) -> None:
    """Raises NotCompiled naming the features that this CPU lacks."""
    missing = [name for name in features if name not in cpu_features()]
    if missing:
        raise NotCompiled(f"this CPU lacks {', '.join(missing)}")


@functools.cache
def compiler() -> Compiler:
    """The first C++ compiler on PATH that runs. Raises NotCompiled."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        if done.returncode == 0:
            return Compiler(path, done.stdout)
    raise NotCompiled(f"no C++ compiler on PATH ({', '.join(COMPILERS)}); install g++")


def openmp_runtime(clang: bool) -> Path | None:
    """The OpenMP library of torch, if code of this kind of compiler can use it."""
    torch = find_spec("torch")  # not imported: flags read the levels of the kernels without torch
    if torch is None or torch.origin is None:
        return None
    patterns = ("libomp*", "libiomp5*") if clang else ("libgomp*",)
    home = Path(torch.origin).parent
    folders = (home / "lib", home.parent / "torch.libs")
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

    name: the start of its file name in the cache. features: those that the code uses, as /proc/cpuinfo spells them;
    machine flags enable them. flags: more compiler flags. headers: folders of headers, which sources include by their
    path from there; headers in folders below count too. Raises NotCompiled.
    """
    require(features)
    cxx = compiler()
    runtime = openmp_runtime(cxx.is_clang)
    included = [*_flags(features, flags), *(f"-I{folder}" for folder in headers)]
    decides = _decides(sources, _flags(features, flags), headers, cxx)
    path = kept("cpu", name, decides, lambda path: _compile(cxx, sources, included, runtime, path))
    with _lock:
        if path not in _loaded:
            _loaded[path] = opened(path)
        return _loaded[path]


def is_compiled(
    name: str,
    sources: Sequence[Path],
    features: Sequence[str],
    flags: Sequence[str] = (),
    headers: Sequence[Path] = (),
) -> bool:
    """Whether `load` with these arguments finds the library in the cache."""
    try:
        return path_of("cpu", name, _decides(sources, _flags(features, flags), headers, compiler())).exists()
    except NotCompiled:
        return False


def _flags(features: Sequence[str], flags: Sequence[str]) -> list[str]:
    return [*FLAGS, *(MACHINE_FLAGS[feature] for feature in features if feature in MACHINE_FLAGS), *flags]


def _decides(sources: Sequence[Path], flags: Sequence[str], folders: Sequence[Path], cxx: Compiler) -> list[bytes]:
    """Everything that determines the library."""
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    headers |= {header for folder in folders for header in folder.rglob("*.h")}
    found = [repr((cxx.version, list(flags), str(openmp_runtime(cxx.is_clang)))).encode()]
    for file in [*sources, *sorted(headers)]:
        found += [file.name.encode(), file.read_bytes()]
    return found


def _compile(cxx: Compiler, sources: Sequence[Path], flags: Sequence[str], runtime: Path | None, out: Path) -> None:
    began = time.monotonic()
    log.info("compiling %s with %s: once, a minute or more if the cores are busy", out.name, cxx.path)
    objects = [out.parent / f"{i}-{source.stem}.o" for i, source in enumerate(sources)]
    pairs = zip(sources, objects, strict=True)
    run(*([cxx.path, *flags, "-c", str(source), "-o", str(target)] for source, target in pairs))
    omp = ["-fopenmp"] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    run([cxx.path, "-shared", *map(str, objects), *omp, "-o", str(out)])
    log.info("compiled %s with %s in %.1f s", out.name, cxx.path, time.monotonic() - began)
