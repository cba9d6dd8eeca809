"""The runner of fault scenarios: flags, clusters, the checks that follow every fault, the result, the exit code."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.config.flags import UsageError
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.faults.checks import Memory, blocks_held, differences, growth_row, settle
from lab.faults.client import Body, Load, Stream, each_once, random_bodies
from lab.faults.networks.namespaces import Namespaces, NoNamespaces
from lab.faults.tiny import tiny_model
from lab.flag_types import natural
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied, Processes, Where

UNAVAILABLE = 3
"""Exit code if network namespaces are not available."""

API_KEY = "of-the-lab"
"""/debug/ is open to other hosts with a key only, and nodes in namespaces have separate addresses."""

WRONG_SHOWN = 20

TINY, EMBEDDED = "tiny", "embedded"
"""Values of --model: random weights that load at once, and the model that nodes serve by default."""


class Sent(Protocol):
    """A load that is over."""

    @property
    def requests(self) -> Sequence[tuple[int, Stream]]:
        """(index of the body, its result)"""

    @property
    def streams(self) -> Sequence[Stream]:
        """The results, in the same order."""


@dataclass
class Run:
    """One run of a scenario: its flags, its clusters, and its results so far."""

    args: Namespace
    node_flags: list[str]
    """Flags of the command line that the scenario does not know."""
    scratch: Path
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Entries of the result's config in addition to flags."""
    memory: Memory = field(default_factory=Memory)

    def folder(self) -> Path:
        """A new folder, which is deleted after the run."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def tiny(self) -> list[str]:
        """Flags for a model that loads immediately, with arenas of 350,000 tokens."""
        return [*tiny_model(self.folder()), "--max-model-len", "4096", "--kv-cache-bytes", "256M"]

    def model_flags(self) -> list[str]:
        """Flags for the model that --model names."""
        self.facts["dtype"] = "float32"
        if self.args.model == TINY:
            return self.tiny()
        named = [] if self.args.model == EMBEDDED else ["--model", self.args.model]
        return [*named, "--dtype", "float32"]

    @contextmanager
    def cluster(
        self,
        nodes: str,
        flags: Sequence[str],
        *,
        role_flags: Mapping[str, Sequence[str]] | None = None,
        network: Namespaces | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = Processes.start_timeout_s,
    ) -> Iterator[LocalCluster]:
        """The nodes run during the block; at its end no node may have died by itself, and none may hold anything."""
        key, before = (API_KEY if network else None), len(self.wrong)
        made = LocalCluster(
            nodes,
            flags,
            run_dir=self.folder(),
            role_flags=role_flags,
            where=Where(network=network),
            processes=Processes(env or {}, start_timeout_s=start_timeout_s),
            api_key=key,
        )
        try:
            with made as cluster:
                yield cluster
                try:
                    cluster.check()
                except NodeDied as death:
                    self.wrong.append(str(death))
                self.settle(cluster)
                if len(self.wrong) > before:
                    _tell_logs(cluster)
        except Exception:
            _tell_logs(made)
            raise

    def bodies(self, cluster: LocalCluster, count: int, prompt_tokens: int, tokens: int, seed: int) -> list[Body]:
        """Random requests for the model of the cluster."""
        model = rest.get(f"{cluster.nodes[0].url}/v1/models", cluster.api_key)["data"][0]["id"]
        return [body | {"model": model} for body in random_bodies(count, prompt_tokens, tokens, seed)]

    def calm(
        self, cluster: LocalCluster, door: str, bodies: Sequence[Body], at_once: int | None = None
    ) -> list[Stream]:
        """The results of the bodies on the undisturbed cluster, and the first sample of its memory."""
        streams = asyncio.run(each_once(cluster[door].url, bodies, "calm", cluster.api_key, at_once))
        for body, one in zip(bodies, streams, strict=True):
            wanted = body["max_tokens"]
            if one.error or len(one.tokens) != wanted:
                self.wrong.append(f"undisturbed: {one.error or f'{len(one.tokens)} of {wanted} tokens'}")
        self.memory.growth(cluster)
        return streams

    def judge(self, case: str, cluster: LocalCluster, calm: Sequence[Stream], load: Load) -> None:
        """What must hold after every fault, with a row for each: `compare`, and no process has grown since its first
        sample."""
        self.compare(case, cluster, calm, load)
        row, grown = growth_row(case, self.memory.growth(cluster))
        self.rows.append(row)
        self.wrong += grown

    def compare(self, case: str, cluster: LocalCluster, calm: Sequence[Stream], load: Sent) -> None:
        """Each request of the load returned the tokens of its undisturbed body, and no node holds anything."""
        found = differences(case, [calm[body] for body, _ in load.requests], load.streams)
        self.wrong += found if load.requests else [f"{case}: no request was sent, so nothing was compared"]
        self.settle(cluster)
        failed = sum(bool(one.error) for one in load.streams)
        none = {"goal": 0.0}
        self.rows += [
            Row(case, "requests", "", float(len(load.streams))),
            Row(case, "errors", "", float(failed), limits=none),
            Row(case, "wrong tokens", "", float(len(found) - failed), limits=none),
            Row(case, "blocks held afterwards", "", float(blocks_held(cluster)), limits=none),
        ]
        print(f"{case}: {len(load.requests)} requests, {len(self.wrong)} wrong so far", file=sys.stderr)

    def settle(self, cluster: LocalCluster) -> None:
        """Check that soon no living node holds anything for a request, and that all books are balanced."""
        self.wrong += settle(cluster)


def _tell_logs(cluster: LocalCluster) -> None:
    """Print the end of every node's log: the logs are deleted after the run."""
    for node in cluster.nodes:
        print(f"--- {node.name}", *node.last_lines(30), sep="\n", file=sys.stderr)


@dataclass(frozen=True)
class Scenario:
    """A scenario: the faults of a cluster.

    about        the docstring of its module: the text of --help
    add_flags    adds its own flags to those that every scenario has: --seed, --quick, --json
    play         starts clusters with Run.cluster, causes faults, and adds to Run.rows and Run.wrong
    quick        with --quick, numbers here are upper bounds of the flags, and other values replace them
    passes_flags pass flags that the scenario does not know to every node
    check        raises ValueError or UsageError for flags that do not fit each other
    """

    about: str
    add_flags: Callable[[ArgumentParser], None]
    play: Callable[[Run], None]
    quick: Mapping[str, Any]
    passes_flags: bool = False
    check: Callable[[Namespace], object] | None = None


def add_model_flag(parser: ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--model",
        default=default,
        help=f"{EMBEDDED}, {TINY} (random weights), or a model as --model of a node (default: {default})",
    )


def run(scenario: Scenario, argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if a check failed, UNAVAILABLE if network namespaces are not available."""
    parser = ArgumentParser(description=scenario.about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=natural, default=1)
    scenario.add_flags(parser)
    add_result_flags(parser)
    args, others = parser.parse_known_args(argv)
    if others and not scenario.passes_flags:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    quicken(args, **scenario.quick)
    if scenario.check is not None:
        try:
            scenario.check(args)
        except (ValueError, UsageError) as error:
            parser.error(str(error))
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        this = Run(args, others, Path(scratch))
        try:
            scenario.play(this)
        except NoNamespaces as reason:
            print(f"no network namespaces: {reason}", file=sys.stderr)
            return UNAVAILABLE
        except UsageError as error:
            parser.error(str(error))
        except Exception as error:  # a scenario that breaks off has failed, and what it has found so far is told
            traceback.print_exc()
            this.wrong.append(f"the scenario broke off: {error!r}")
    config = {name: value for name, value in vars(args).items() if name not in ("json", "quick")}
    report(config | this.facts | {"wrong": len(this.wrong)}, this.rows, args.json)
    for text in this.wrong[:WRONG_SHOWN]:
        print(f"WRONG: {text}", file=sys.stderr)
    if len(this.wrong) > WRONG_SHOWN:
        print(f"WRONG: {len(this.wrong) - WRONG_SHOWN} more", file=sys.stderr)
    return 1 if this.wrong else 0
