"""The builder of C++ kernels: cached by content, clear errors, one OpenMP runtime in the process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from attention.cpu import build as cpu_build
from attention.cpu.build import load
from net.compiled import NotCompiled, folder

THREADS = """
#include <omp.h>
extern "C" int threads(int n) { int seen = 0;
#pragma omp parallel num_threads(n) reduction(+ : seen)
  seen += 1;
  return seen * FACTOR; }
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "factor.h").write_text("#define FACTOR 10\n")
    path = tmp_path / "threads.cpp"
    path.write_text('#include "factor.h"\n' + THREADS)
    return path


def test_compiles_once_and_again_when_a_source_a_header_or_a_flag_changes(source):
    assert load("t", [source], ()).threads(2) == 20
    (first,) = folder("cpu").iterdir()
    written = first.stat().st_mtime_ns
    load("t", [source], ())
    assert [(path, path.stat().st_mtime_ns) for path in folder("cpu").iterdir()] == [(first, written)]
    (source.parent / "factor.h").write_text("#define FACTOR 100\n")
    assert load("t", [source], ()).threads(2) == 200
    load("t", [source], (), ["-DNOTHING"])
    assert len(list(folder("cpu").iterdir())) == 3


def test_headers_of_other_folders_are_found_by_their_path_and_compiled_again_when_they_change(source, tmp_path):
    below = tmp_path / "headers" / "below"
    below.mkdir(parents=True)
    (below / "factor.h").write_text("#define FACTOR 7\n")
    source.write_text('#include "below/factor.h"\n' + THREADS)
    assert load("t", [source], (), headers=[below.parent]).threads(1) == 7
    (below / "factor.h").write_text("#define FACTOR 8\n")
    assert load("t", [source], (), headers=[below.parent]).threads(1) == 8


def test_shares_the_openmp_runtime_of_torch(source):
    torch.ones(1 << 20).sum()
    assert load("t", [source], ()).threads(2) == 20
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
    runtimes = {path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1, runtimes


def _load_in_child(source: Path) -> int:
    return load("t", [source], ()).threads(1)


def test_of_processes_at_once_one_compiles(source, tmp_path, monkeypatch):
    """A compiler that is slow and counts its calls comes first on PATH."""
    tools, real = tmp_path / "tools", cpu_build.compiler().path
    tools.mkdir()
    (tools / "g++").write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >>{tmp_path}/calls; sleep 0.5 ;; esac\nexec {real} "$@"\n'
    )
    (tools / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_load_in_child, [source] * 2, chunksize=1) == [10, 10]
    assert len(list(folder("cpu").iterdir())) == 1
    assert (tmp_path / "calls").read_text() == "x\n"


def test_a_failing_compile_shows_the_end_of_the_output(source):
    source.write_text("int broken( { return missing_name; }")
    with pytest.raises(NotCompiled, match=r"(?s)compiling failed.*threads\.cpp.*error"):
        load("t", [source], ())
    assert list(folder("cpu").iterdir()) == []


def test_a_library_with_unknown_symbols_is_unavailable(source):
    source.write_text('extern "C" int nowhere(); extern "C" int call() { return nowhere(); }')
    with pytest.raises(NotCompiled, match=r"cannot load .*nowhere"):
        load("t", [source], ())


def test_missing_features_and_compilers_are_named(source, monkeypatch):
    monkeypatch.setattr(cpu_build, "cpu_features", lambda: frozenset({"avx2"}))
    with pytest.raises(NotCompiled, match="lacks avx512f, amx_tile"):
        load("t", [source], ("avx2", "avx512f", "amx_tile"))
    monkeypatch.setenv("PATH", "")
    cpu_build.compiler.cache_clear()
    try:
        with pytest.raises(NotCompiled, match=r"no C\+\+ compiler on PATH"):
            load("t", [source], ("avx2",))
    finally:
        cpu_build.compiler.cache_clear()


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotCompiled, match="set XDG_CACHE_HOME"):
        load("t", [source], ())
