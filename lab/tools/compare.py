"""Two checkouts on the same benchmarks, in turns: is the changed one as fast as the other one?

  git worktree add ../old main
  scripts/tools.py compare --other ../old "scripts/bench.py host --quick" "scripts/bench.py sched --quick"
  scripts/tools.py compare --other ../old --rounds 5 --json ab.json "scripts/bench.py host"

Each command runs --rounds times in each of the two checkouts, in turns, so that other load on the machine affects both.
A command is a script of the checkout with its flags; the tool adds --json. The table has the median of each figure that
both checkouts write, matched by case and metric. "spread" is the largest of our own rounds over the smallest: a ratio
within it is noise. If a command has another name in the other checkout, give --other-command once per command, in the
same order.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.common.results import Row, report
from lab.flag_types import file_to_write, positive

HERE = Path(__file__).resolve().parents[2]
Figures = Mapping[tuple[str, str], Mapping[str, Any]]
"""(case, metric) -> the row of a result file."""


class RunFailed(RuntimeError):
    """A benchmark wrote no result; the message has its command and the end of its output."""


def figures(result: Mapping[str, Any]) -> Figures:
    """The rows of a result file that contain a number."""
    return {(row["case"], row["metric"]): row for row in result["rows"] if isinstance(row["ours"], int | float)}


def compared(ours: Sequence[Figures], others: Sequence[Figures]) -> list[Row]:
    """One row per figure that all rounds of both contain: the medians, and the spread of our own rounds."""
    rows = []
    for name, row in ours[0].items():
        if not all(name in one for one in (*ours, *others)):
            continue
        values = [one[name]["ours"] for one in ours]
        other = median(one[name]["ours"] for one in others)
        spread = f"spread {max(values) / min(values):.2f}" if min(values) > 0 else ""
        rows.append(Row(*name, row["unit"], median(values), {"other": other}, note=spread))
    return rows


def run(checkout: Path, command: str, path: Path) -> dict[str, Any]:
    """The result that the command writes. Raises RunFailed when it writes none."""
    words = [sys.executable, *shlex.split(command), "--json", str(path)]
    done = subprocess.run(words, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not path.exists():
        raise RunFailed(f"{command!r} wrote no result in {checkout} (exit {done.returncode}):\n{done.stdout[-2000:]}")
    if done.returncode:  # for example because a goal was missed; the measurement still counts
        print(f"compare: {command!r} ended with exit code {done.returncode}", file=sys.stderr)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help='as "scripts/bench.py host --quick"')
    parser.add_argument("--other", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--other-command", action="append", default=[], metavar="COMMAND", help="its name there")
    parser.add_argument("--rounds", type=positive, default=3, help="of each command per checkout (default %(default)s)")
    parser.add_argument("--json", type=file_to_write, metavar="PATH", help="also write the results to PATH as JSON")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not args.other.is_dir():
        parser.error(f"--other: {args.other} is not a folder")
    args.other_command = args.other_command or args.commands
    if len(args.other_command) != len(args.commands):
        parser.error(f"{len(args.commands)} commands, but --other-command is given {len(args.other_command)} times")
    return args


def in_turns(checkouts: Sequence[tuple[Path, str]], rounds: int, path: Path) -> list[list[dict[str, Any]]]:
    """The results of one command, `rounds` for each (checkout, its name of the command). Raises RunFailed."""
    found: list[list[dict[str, Any]]] = [[] for _ in checkouts]
    for number in range(rounds):
        for results, (checkout, command) in zip(found, checkouts, strict=True):
            print(f"compare: round {number + 1} of {rounds}: {command} in {checkout.name}", file=sys.stderr)
            results.append(run(checkout, command, path))
            path.unlink()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    rows: list[Row] = []
    commits: set[str] = set()
    failed = False
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for command, other_command in zip(args.commands, args.other_command, strict=True):
            checkouts = ((HERE, command), (args.other, other_command))
            try:
                ours, others = in_turns(checkouts, args.rounds, Path(folder) / "result.json")
            except RunFailed as error:  # the other commands are still compared
                print(f"compare: {error}", file=sys.stderr)
                failed = True
                continue
            commits |= {result["commit"] for result in others}
            found = compared([figures(one) for one in ours], [figures(one) for one in others])
            if not found:
                print(f"compare: {command!r} and {other_command!r} have no figure in common", file=sys.stderr)
                failed = True
            rows += found
    config = {"commands": args.commands, "other_commands": args.other_command, "rounds": args.rounds}
    report(config | {"other_commits": sorted(commits)}, rows, args.json)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
