"""The kernels of every level of this architecture compile, also those of CPUs that this machine lacks. A change
that was made on an AVX2 machine once broke the levels with products of bytes, and nodes with such a CPU computed by a
slower level for a day."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from platform import machine

import pytest
import torch

from attention.cpu import build, delta_rule, library
from attention.cpu.level import LEVELS, best, levels_here
from engine.model.ops import cpu
from net.compiled import NotCompiled, RefusedByCompiler

OF_ARM = [level for level in LEVELS if level.startswith("neon")]
LEVELS_OF_ARCHITECTURE = [level for level in LEVELS if (level in OF_ARM) == (machine() == "aarch64")]


def recipes(level: str, dtype: torch.dtype) -> Iterator[build.Recipe]:
    yield library.recipe(level)
    yield delta_rule.recipe(level)
    yield cpu.recipe(level, dtype, "elements")
    yield cpu.recipe(level, dtype, "groups")
    yield cpu.recipe(level, dtype, "bytes")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(torch.float32, marks=pytest.mark.heavy),
        pytest.param(torch.float16, marks=pytest.mark.heavy),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS_OF_ARCHITECTURE)
def test_the_kernels_of_a_level_compile(level: str, dtype: torch.dtype) -> None:
    """Without optimisation: the same errors, in a third of the time."""
    done = set[Path]()
    for _, sources, features, flags, headers in recipes(level, dtype):
        given = [build.MACHINE_FLAGS[each] for each in features if each in build.MACHINE_FLAGS]
        found = [f"-I{folder}" for folder in headers]
        for source in set(sources) - done:
            command = [build.compiler().path, *build.FLAGS, *given, *flags, "-O0", "-Werror", *found, "-c", str(source)]
            compiled = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True, check=False)
            assert compiled.returncode == 0, compiled.stderr
            done.add(source)


@pytest.mark.skipif(not levels_here(), reason="no level has kernels for this CPU")
@pytest.mark.parametrize("products", ["elements", "groups", "bytes"])
def test_auto_takes_the_best_level_of_this_cpu(products: cpu.Products) -> None:
    assert cpu.CpuOps(products=products).level == levels_here()[0]


@pytest.mark.parametrize(
    "refused", [pytest.param(True, marks=pytest.mark.expects_error("no kernels of level avx512_vnni")), False]
)
def test_a_level_that_the_compiler_refuses_is_an_error_in_the_log(
    refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def offers(level: str) -> None:
        if level == "avx512_vnni":
            raise RefusedByCompiler("opened.h: error") if refused else NotCompiled("Linux refuses")

    monkeypatch.setattr("attention.cpu.level.levels_here", lambda: ["avx512_vnni", "avx2"])
    with caplog.at_level(logging.ERROR):
        assert best(offers) == "avx2"
    assert ("no kernels of level avx512_vnni, so those of a slower level compute: opened.h" in caplog.text) == refused
