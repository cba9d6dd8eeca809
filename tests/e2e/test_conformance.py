"""Our modules answer as upstream's wheel does (lab/conformance/), except where docs/connect.md says why not."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lab.conformance.answers import ENDED, HERE, engine_answers, ours, store_answers, tensor_answers

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = json.loads(max(HERE.glob("upstream-*.json")).read_text())
ROW = re.compile(r"^\| `(?P<case>(?:[^`|]|\\\|)+)` \| (?P<theirs>[^|]+) \| (?P<ours>[^|]+) \|", re.MULTILINE)
ADDRESS = re.compile(r"0x[0-9a-f]+|\b\d{9,}\b")


@pytest.fixture(scope="module")
def pool(start):
    with start("store=3", "--model", "none", "--value-bytes", "64K", "--dram-bytes", "64M") as cluster:
        yield cluster["store-0"].url.removeprefix("http://")


@pytest.fixture(scope="module")
def store(pool) -> dict[str, str]:
    return store_answers(sys.executable, pool, ours())


@pytest.fixture(scope="module")
def engine() -> dict[str, str]:
    return engine_answers(sys.executable, ours())


def differences(theirs: dict[str, str], answers: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Case -> the two answers, without the number of the case. Where upstream's process ends, any answer is right."""
    assert list(theirs) == list(answers), "the cases have changed: record upstream's answers again"
    pairs = [(key.partition(" ")[2], theirs[key], answers[key]) for key in theirs]
    pairs = [pair for pair in pairs if pair[1] != ENDED or pair[2] == ENDED]
    return {case: (one, other) for case, one, other in pairs if ADDRESS.sub("N", one) != ADDRESS.sub("N", other)}


def intended() -> dict[str, tuple[str, str]]:
    """The rows of docs/connect.md."""
    rows = ROW.finditer((ROOT / "docs/connect.md").read_text().partition("## Answer by answer")[2])
    return {row["case"]: (row["theirs"].strip(" `"), row["ours"].strip(" `")) for row in rows}


def test_the_store_differs_only_where_the_docs_say_so(store):
    found = differences(UPSTREAM["store"], store)
    report = "\n".join(f"| `{case}` | `{one}` | `{other}` |" for case, (one, other) in found.items())
    assert found == {case: pair for case, pair in intended().items() if case in UPSTREAM_STORE}, report


def test_tensors_differ_only_where_the_docs_say_so(pool):
    answers = tensor_answers(sys.executable, pool, ours())
    assert ENDED not in answers.values()
    found = differences(UPSTREAM["tensors"], answers)
    report = "\n".join(f"| `{case}` | `{one}` | `{other}` |" for case, (one, other) in found.items())
    assert found == {case: pair for case, pair in intended().items() if case in UPSTREAM_TENSORS}, report


def test_the_transfer_engine_differs_only_where_the_docs_say_so(engine):
    found = differences(UPSTREAM["engine"], engine)
    report = "\n".join(f"| `{case}` | `{one}` | `{other}` |" for case, (one, other) in found.items())
    assert found == {case: pair for case, pair in intended().items() if case in UPSTREAM_ENGINE}, report


UPSTREAM_STORE = {key.partition(" ")[2] for key in UPSTREAM["store"]}
UPSTREAM_TENSORS = {key.partition(" ")[2] for key in UPSTREAM["tensors"]}
UPSTREAM_ENGINE = {key.partition(" ")[2] for key in UPSTREAM["engine"]}


def test_every_difference_in_the_docs_is_a_case():
    assert set(intended()) <= UPSTREAM_STORE | UPSTREAM_TENSORS | UPSTREAM_ENGINE


def test_no_call_of_ours_ends_the_process(store, engine):
    assert ENDED not in [*store.values(), *engine.values()]
