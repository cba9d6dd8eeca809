"""tests/heavy.py: what --skip-heavy leaves out, and what the end of a run says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.heavy import best_first, one_in, seeds

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

@pytest.mark.heavy
@pytest.mark.parametrize("number", range(3))
def test_long(number):
    pass

def test_short():
    pass
"""


def test_every_pair_of_values_is_left():
    axes = "abcd", "xyz", "123"
    left = [tuple(param.values) for param in one_in(3, *axes) if not param.marks]
    assert len(left) * 3 == len(one_in(3, *axes)) == 36
    for i, j in combinations(range(3), 2):
        assert {(values[i], values[j]) for values in left} == set(product(axes[i], axes[j]))


def test_the_best_level_is_left_with_every_type_and_every_level_with_one():
    params = best_first("abcd", "xyz")
    left = ["".join(param.values) for param in params if not param.marks]
    assert len(params) == 12 and left == ["ax", "ay", "az", "by", "cz", "dx"]


def test_the_first_seeds_are_left():
    assert [param.values[0] for param in seeds(2, 5)] == [0, 1, 2, 3, 4]
    assert [param.values[0] for param in seeds(2, 5) if not param.marks] == [0, 1]


@pytest.mark.parametrize(
    ("flags", "left_out", "outcome"),
    [(["--skip-heavy"], True, "1 passed, 3 skipped"), ([], False, "4 passed")],
)
def test_heavy_tests_are_left_out_by_a_flag_and_counted(tmp_path, flags, left_out, outcome):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = heavy\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.heavy", "-p", "no:cacheprovider", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    told = "3 tests marked heavy were left out; scripts/test --all and .ci/run --all run them"
    assert (told in done.stdout.splitlines()) == left_out
    assert outcome in done.stdout.splitlines()[-1]
