"""Runs the cases of a module in processes of any interpreter, and collects their answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.conformance import engine_cases, store_cases, tensor_cases

HERE = Path(__file__).resolve().parent
SITE = HERE.parents[1] / "connect" / "site"
RUN_S = 120.0
ENDED = "ends the process"


def store_answers(python: str, address: str, env: Mapping[str, str]) -> dict[str, str]:
    """What mooncake.store answers to each case; `address` is the pool's."""
    cases = [*store_cases.BEFORE_SETUP, *store_cases.AFTER_SETUP]
    return _answers([python, str(HERE / "store_cases.py"), address], cases, env)


def tensor_answers(python: str, address: str, env: Mapping[str, str]) -> dict[str, str]:
    """What mooncake.store answers to the cases with tensors; the interpreter has torch."""
    cases = [*tensor_cases.BEFORE_SETUP, *tensor_cases.AFTER_SETUP]
    return _answers([python, str(HERE / "tensor_cases.py"), address], cases, env)


def engine_answers(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """What mooncake.engine answers to each case; the other program runs in the same interpreter."""
    cases = [*engine_cases.BEFORE, *engine_cases.CASES]
    program = [python, str(HERE / "engine_cases.py")]
    with _peer(program, env) as where:
        return _answers([*program, where], cases, env)


def ours() -> dict[str, str]:
    """The environment in which an interpreter with our packages has our modules."""
    return os.environ | {"PYTHONPATH": str(SITE)}


@contextmanager
def _peer(program: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        [*program, "peer"], env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert process.stdout is not None
        port, address = json.loads(next(line for line in process.stdout if line.startswith("[")))
        yield f"{port}:{address}"
    finally:
        process.kill()
        process.communicate()


def _answers(command: Sequence[str], cases: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """By number and case, because some cases occur twice."""
    found: list[str] = []
    while len(found) < len(cases):
        before = len(found)
        done = subprocess.run(
            [*command, str(before)], env=dict(env), capture_output=True, text=True, timeout=RUN_S, cwd="/"
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
        found += [answer for _, answer in lines]
        if len(found) < len(cases):
            if done.returncode >= 0 and not lines:
                raise RuntimeError(f"{cases[before]}: {done.stderr[-2000:]}")
            found.append(ENDED)
    return {f"{number} {case}": answer for number, (case, answer) in enumerate(zip(cases, found, strict=True))}
