"""Run unmodified stock clients against a cluster of three nodes, and report which of them worked.

  scripts/tools.py stock-clients --openai ~/venvs/openai/bin/python --lm-eval ~/venvs/lm-eval/bin/python
  scripts/tools.py stock-clients --guidellm PYTHON --aiperf PYTHON --vllm PYTHON --json lab/results/stock-clients.json

Give for each client the interpreter of a virtual environment that has it, or the program; docs/clients.md shows how to
make them. The cluster is a prefill, a decode and a store node with the embedded model. Exit code 1 if a client failed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.common.results import write_result
from lab.clients import agents, runs
from lab.clients.runs import Run, Target, Unexpected
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.tools.export_hf import export_tokenizer

NODES = "prefill=1,decode=1,store=1"
RUN_S = 400.0
CLIENTS: dict[str, tuple[str, Callable[[str, Target], Iterator[Run]]]] = {
    "openai": ("openai", runs.openai_package),
    "anthropic": ("anthropic", runs.library("anthropic_checks")),
    "openai_agents": ("openai-agents", runs.library("agents_checks")),
    "instructor": ("instructor", runs.library("instructor_checks")),
    "langchain_openai": ("langchain-openai", runs.library("langchain_checks")),
    "litellm": ("litellm", runs.library("litellm_checks")),
    "llm": ("llm", runs.library("llm_checks")),
    "outlines": ("outlines", runs.library("outlines_checks")),
    "pydantic_ai": ("pydantic-ai-slim", runs.library("pydantic_ai_checks")),
    "lm_eval": ("lm-eval", runs.lm_eval),
    "guidellm": ("guidellm", runs.guidellm),
    "aiperf": ("aiperf", runs.aiperf),
    "vllm": ("vllm", runs.vllm_bench),
    "codex": ("@openai/codex", agents.codex),
}
"""Flag -> (package, its runs)."""

PROGRAMS = frozenset({"codex"})
"""Clients that are programs; the others are packages of an interpreter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one client. The first fields are those of every result file (lab/bench/common/results.py)."""

    case: str
    metric: str
    unit: str
    ours: float  # 1 = passed
    client: str
    version: str
    note: str
    command: str
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    asked = [flag for flag in CLIENTS if getattr(args, flag) is not None]
    versions = {flag: version_of(flag, getattr(args, flag)) for flag in asked}  # before the cluster starts
    with tempfile.TemporaryDirectory(prefix="stock-clients-") as folder:
        scratch = Path(folder)
        tokenizer = scratch / "tokenizer"
        export_tokenizer(args.model, tokenizer)
        with LocalCluster(NODES, ["--model", args.model, *args.flags], run_dir=scratch) as cluster:
            url = cluster["decode-0"].url
            name = rest.get(f"{url}/v1/models")["data"][0]["id"]
            target = Target(url, name, tokenizer, scratch)
            outcomes = [
                outcome for flag in asked for outcome in attend(flag, getattr(args, flag), versions[flag], target)
            ]
            cluster.check()
    show(outcomes)
    if args.json is not None:
        config = {"benchmark": "stock_clients", "nodes": NODES, "model": args.model, "flags": args.flags}
        write_result(config, outcomes, args.json)
    return 0 if all(outcome.ours for outcome in outcomes) else 1


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    for flag, (package, runs_of) in CLIENTS.items():
        kind, verb = ("PROGRAM", "of") if flag in PROGRAMS else ("PYTHON", "has")
        parser.add_argument(f"--{flag.replace('_', '-')}", metavar=kind, help=f"{verb} {package}: {runs_of.__doc__}")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the embedded one, or a GGUF file")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to PATH as JSON")
    args, flags = parser.parse_known_args(argv)
    args.flags = flags
    if not any(getattr(args, flag) for flag in CLIENTS):
        parser.error("give the interpreter of at least one client")
    return args


def attend(flag: str, python: str, version: str, target: Target) -> Iterator[Outcome]:
    """Every run of one client."""
    package, runs_of = CLIENTS[flag]
    for run in runs_of(python, target):
        begin = time.monotonic()
        passed, note = carry_out(run, target)
        seconds = time.monotonic() - begin
        print(f"{package} {version}, {run.what}: {'passed' if passed else 'FAILED'} ({seconds:.0f} s): {note}")
        command = " ".join(run.argv).replace(str(target.scratch), "SCRATCH").replace(python, "python")
        command = command.replace(str(runs.HERE), "lab/clients").replace(target.url, "URL")
        yield Outcome(f"{package}: {run.what}", "passed", "bool", passed, package, version, note, command, seconds)


def version_of(flag: str, program: str) -> str:
    """Version of the client. Raises SystemExit."""
    package = CLIENTS[flag][0]
    try:
        return told_version(program) if flag in PROGRAMS else distribution_version(program, package)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"stock_clients: {program} has no {package}: {error}") from None


def told_version(program: str) -> str:
    """The last word of `program --version`. Raises OSError, SubprocessError."""
    found = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.split()[-1]


def distribution_version(python: str, package: str) -> str:
    """Version of the distribution, or of its build for CPUs. Raises OSError, SubprocessError."""
    code = (
        "import importlib.metadata as m; "
        "found = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}; "
        f"print(found.get({package!r}) or found[{package + '-cpu'!r}])"
    )
    found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.strip()


def carry_out(run: Run, target: Target) -> tuple[bool, str]:
    """(passed, the client's result or its failure)."""
    log = target.scratch / "client.log"
    with log.open("w") as stderr:
        try:
            done = subprocess.run(
                run.argv, cwd=target.scratch, env=environment(run, target), stdout=subprocess.PIPE, stderr=stderr,
                stdin=subprocess.DEVNULL, text=True, timeout=RUN_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"not over after {RUN_S:g} s; {_end(log)}"
    try:
        found = run.read(done.stdout)
    except (Unexpected, OSError, ValueError, KeyError) as error:
        return False, f"{type(error).__name__}: {error}; exit code {done.returncode}; {done.stdout[-2000:]} {_end(log)}"
    if done.returncode != 0:
        return False, f"exit code {done.returncode}; {_end(log)}"
    return True, found


def environment(run: Run, target: Target) -> dict[str, str]:
    """This process's environment without variables that would lead a client to our packages, to a hub or through a
    proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("PYTHONPATH", None)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if run.offline else {}
    return (
        kept
        | offline
        | {
            "HF_HOME": str(target.scratch / "hf"),
            "OPENAI_API_KEY": "none",
            "TOKENIZERS_PARALLELISM": "false",
            "NO_COLOR": "1",
        }
        | dict(run.env)
    )


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def show(outcomes: Sequence[Outcome]) -> None:
    table = Table("client", "version", "what ran", "result", "found")
    for outcome in outcomes:
        _, _, what = outcome.case.partition(": ")
        table.add_row(outcome.client, outcome.version, what, "passed" if outcome.ours else "FAILED", outcome.note[:200])
    Console().print(table)
