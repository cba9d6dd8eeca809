"""Fuzzes the API of a small cluster from its own OpenAPI document, with schemathesis, and judges every answer.

  python3 -m venv ~/clients/schemathesis && ~/clients/schemathesis/bin/pip install schemathesis
  scripts/tools.py fuzz-api --schemathesis ~/clients/schemathesis/bin/python
  scripts/tools.py fuzz-api --schemathesis PYTHON --examples 500 --seed 7 --json lab/results/fuzz-api.json

A prefill, a decode and a store node with a tiny random model. Failures are the findings of schemathesis (answers that
contradict the document, invalid bodies that are accepted), bodies that the document allows and a node refuses, every
5xx except a 503 that says when to try again, errors without an error body, requests without an answer, nodes that died,
and anything still held afterwards; then the exit code is 1. `POST /drain`, which ends the node, is excluded, and
`/v1/update_weights`, which needs tensors in the pool. A rule that JSON Schema cannot express, for example that a regex
must compile or a text must fit into the context, is no failure: UNSAID in net/http/openai/rules.py lists these rules,
and this script recognizes the refusals by their messages. Further flags go to every node.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.common.results import Row, add_result_flags, quicken, table, write_result
from lab.clients.command import version_of
from lab.faults.checks import settle
from lab.faults.tiny import tiny_model
from lab.flag_types import natural, positive
from lab.fuzz.answers import Judge
from lab.fuzz.promises import Promises
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied
from net.http.openai.routes import RESUME_HEADER
from net.http.openai.rules import UNSAID

NODES = "prefill=1,decode=1,store=1"
MAX_MODEL_LEN = "256"  # a chat without max_tokens may take all of it
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SPECIFICATION = "openapi.json"
PHASES = "examples,coverage,fuzzing,stateful"
NOT_CHECKED = "positive_data_acceptance"  # Promises checks it, with the rules that a schema cannot express
TIMEOUT_S = 600  # of one request: its duration is no finding, because this machine may be busy


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    version = version_of(args.schemathesis, "schemathesis")
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"schemathesis {version}, seed {seed}")
    with tempfile.TemporaryDirectory(prefix="fuzz-api-") as folder:
        scratch = Path(folder)
        flags = [*tiny_model(scratch), "--max-model-len", MAX_MODEL_LEN, *args.flags]
        (scratch / "chat_template.jinja").write_text(TEMPLATE)
        with LocalCluster(NODES, flags, run_dir=scratch) as cluster:
            url = cluster["decode-0"].url
            described = rest.get(f"{url}/openapi.json", timeout_s=TIMEOUT_S)
            judge = Judge(described["paths"], Promises(described, UNSAID))
            (scratch / SPECIFICATION).write_text(json.dumps(simplified(described)))
            begun = time.monotonic()
            code, log = fuzz(args.schemathesis, url, args.examples, seed, scratch)
            seconds = time.monotonic() - begun
            judge.take(json.loads((scratch / "answers.har").read_text())["log"]["entries"])
            faults = judge.faults + ([f"schemathesis ended with {code}"] if code else []) + after(cluster)
    if code:
        print(log)
    rows = [
        Row(operation, f"status {status}", "answers", count)
        for operation in judge.operations
        for status, count in judge.statuses(operation).items()
        if status != 405
    ]
    others = sum(count for (_, status), count in judge.seen.items() if status == 405)
    rows.append(Row("methods that a route does not have", "status 405", "answers", others))
    rows.append(Row("all", "all", "answers", judge.seen.total()))
    rows.append(Row("all", "faults", "answers", len(faults)))
    print(table(rows))
    for fault in faults[:20]:
        print(f"FAULT {fault}")
    if args.json is not None:
        config = {"benchmark": "fuzz_api", "nodes": NODES, "schemathesis": version, "seed": seed, "flags": args.flags}
        config |= {"examples": args.examples, "phases": PHASES, "not_checked": NOT_CHECKED, "seconds": round(seconds)}
        write_result(config, rows, args.json)
    return 1 if faults else 0


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--schemathesis", metavar="PYTHON", required=True, help="an interpreter that has it")
    parser.add_argument(
        "--examples", type=positive, default=100, help="most random examples per operation (default: 100)"
    )
    parser.add_argument("--seed", type=natural, help="default: a new one, printed")
    add_result_flags(parser)
    args, flags = parser.parse_known_args(argv)
    quicken(args, examples=3)
    args.flags = flags
    return args


def simplified(document: dict[str, Any]) -> dict[str, Any]:
    """The document from which schemathesis makes requests. It cannot satisfy several rules between fields, so it may
    send bodies that break them. The header with which clients continue at another node is removed, because the node
    would refuse most requests with it."""
    plain: dict[str, Any] = json.loads(json.dumps(document))
    for schema in plain["components"]["schemas"].values():
        if len(schema.get("allOf", ())) > 1:
            del schema["allOf"]
    for item in plain["paths"].values():
        for operation in item.values():
            given = operation.get("parameters", [])
            given[:] = [one for one in given if one["name"] != RESUME_HEADER]
    return plain


def fuzz(python: str, url: str, examples: int, seed: int, scratch: Path) -> tuple[int, str]:
    """(exit code, its output); its archive is answers.har in `scratch`."""
    command = [
        python,
        "-m",
        "schemathesis.cli",
        "run",
        SPECIFICATION,
        "--url",
        url,
        "--no-color",
        "--continue-on-failure",
    ]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--phases", PHASES, "--checks", "all"]
    command += ["--exclude-checks", NOT_CHECKED]
    command += ["--exclude-path", "/drain", "--exclude-path", "/v1/update_weights"]
    command += ["--request-timeout", str(TIMEOUT_S), "--max-response-time", str(TIMEOUT_S)]
    command += ["--generation-database", "none", "--suppress-health-check", "all"]
    command += ["--report", "har", "--report-har-path", str(scratch / "answers.har")]
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=scratch, env=kept, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def after(cluster: LocalCluster) -> list[str]:
    """The present faults of the nodes."""
    try:
        cluster.check()
    except NodeDied as error:
        return [str(error)]
    return settle(cluster)
