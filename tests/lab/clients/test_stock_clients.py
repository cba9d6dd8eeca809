"""scripts/tools.py stock-clients: a client that fails, hangs or writes nothing is not taken for one that worked."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from lab.clients import command as stock_clients
from lab.clients import openai_checks, runs
from lab.clients.openai_checks import Checks
from lab.clients.runs import Run, Target, Unexpected

TASKS = Path(runs.__file__).parent / "tasks"


@pytest.fixture
def target(tmp_path):
    return Target("http://127.0.0.1:1", "m", tmp_path / "tokenizer", tmp_path)


def python(code: str, read=lambda output: output.strip()) -> Run:
    return Run("something", [sys.executable, "-c", code], read)


def refuse(output: str) -> str:
    raise Unexpected("0 completed")


@pytest.mark.parametrize(
    ("run", "passed", "words"),
    [
        (python("print('fine')"), True, "fine"),
        (python("import os; print(os.environ.get('http_proxy'), os.environ['HF_HUB_OFFLINE'])"), True, "None 1"),
        (python("import sys; print('fine'); sys.exit('broken')"), False, "exit code 1; broken"),
        (python("print('x')", refuse), False, "Unexpected: 0 completed; exit code 0; x"),
        (python("", lambda output: json.loads(output)["completed"]), False, "JSONDecodeError"),
    ],
)
def test_outcomes(target, monkeypatch, run, passed, words):
    monkeypatch.setenv("http_proxy", "http://proxy")
    found = stock_clients.carry_out(run, target)
    assert found[0] is passed and words in found[1]


def test_a_client_that_hangs(target, monkeypatch):
    monkeypatch.setattr(stock_clients, "RUN_S", 0.5)
    assert stock_clients.carry_out(python("import time; time.sleep(30)"), target)[0] is False


def test_versions():
    assert stock_clients.distribution_version(sys.executable, "pytest") == pytest.__version__
    assert stock_clients.told_version(sys.executable) == platform.python_version()
    with pytest.raises(SystemExit, match="has no guidellm"):
        stock_clients.version_of("guidellm", sys.executable)
    with pytest.raises(SystemExit, match="has no @openai/codex"):
        stock_clients.version_of("codex", "/no/such/program")


@pytest.mark.parametrize("client", stock_clients.CLIENTS)
def test_every_run_names_the_server(client, target):
    _, runs_of = stock_clients.CLIENTS[client]
    told = [" ".join(run.argv) for run in runs_of("python", target)]
    written = [path.read_text() for path in target.scratch.rglob("*.toml")]
    assert told and all(target.url in text for text in written or told)
    for run in runs_of("python", target):
        with pytest.raises((Unexpected, OSError, ValueError)):
            run.read("")


def test_the_questions_have_one_right_answer():
    questions = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text().splitlines()]
    assert len(questions) == 12
    for question in questions:
        assert question["choices"][question["label"]] == question["city"] and len(set(question["choices"])) == 4


def test_the_openai_checks_say_which_failed(monkeypatch, capsys):
    monkeypatch.setattr(openai_checks, "CHECKS", ["models", "regex"])
    monkeypatch.setattr(Checks, "models", lambda self: None)
    assert openai_checks.main("http://127.0.0.1:1", "m") == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in told] == ["models", "regex"]
    assert told[0]["error"] is None and "Connection error" in told[1]["error"]


def test_no_client_is_a_mistake(capsys):
    with pytest.raises(SystemExit) as left:
        stock_clients.main([])
    assert left.value.code == 2 and "at least one client" in capsys.readouterr().err
