"""A cluster in one command: start the nodes here or over ssh, show where they are, stop them all at Ctrl-C.

scripts/up                                           prefill, decode and store node with the embedded model
scripts/up --nodes prefill=2,decode=1,store=2        another shape; roles of one node join by '+'
scripts/up --ask "What is the capital of France?"    ask once, print the answer and its timeline, stop
scripts/up --hosts FILE --model PATH                 a node on each host of the file, over ssh (docs/launchers.md)
scripts/up --model PATH --block-size 32              every other flag goes to every node
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from engine.config.config import Config
from engine.config.flag_values import flag_name
from engine.config.flags import UsageError, parse
from lab.flag_types import port, positive
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, POLL_S, ROOT, LocalCluster, NodeDied, Processes, StartTimeout, Where
from lab.launch.hosts import MAX_PORT, PORT, Host, read_hosts
from lab.launch.nodes import Node, parse_nodes
from lab.launch.remote import Remote, RemoteCluster
from lab.launch.report import nodes_table, timeline

START_S = 900.0  # large weights, or kernels that are compiled on busy cores; a person who looks on has Ctrl-C
STOP_S = 10.0  # how much longer a node on another host may take to end than its --drain-timeout-ms
OWN_FLAGS = ("--nodes", "--hosts", "--ssh", "--folder", "--follow", "--ask", "--max-tokens", "--port", "--ssd-path")
PLACED_FLAGS = {
    "role": "say --nodes prefill=2,decode=1,store=1",
    "node_id": "nodes are named after their role",
    "join": "the nodes join each other; to join another cluster start mooncake.py yourself",
    "control_port": "every node takes a free one",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], Config]:
    """(our own options, the flags for every node, the Config these make). Raises UsageError."""
    parser = _Parser(
        prog="scripts/up", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nodes", help=f"ROLE=COUNT,... (default: {DEFAULT_NODES})")
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="a line for each node: HOST ROLE [FLAGS]")
    parser.add_argument("--ssh", metavar="COMMAND", default="ssh", help="--hosts: ssh with its options (default: ssh)")
    parser.add_argument(
        "--folder", metavar="DIR", default=str(ROOT), help="--hosts: the checkout on every host (default: as here)"
    )
    parser.add_argument("--follow", action="store_true", help="print the log lines of all nodes as they come")
    parser.add_argument("--ask", metavar="TEXT", help="ask the cluster this once, show answer and timeline, and stop")
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="longest answer to --ask, tokens (default: 128)"
    )
    parser.add_argument(
        "--port", type=port, help=f"HTTP port of the first node (default: any free port; with --hosts {PORT})"
    )
    parser.add_argument("--ssd-path", metavar="PATH", help="LMDB tiers of the store nodes, one directory each inside")
    options, flags = parser.parse_known_args(list(argv))
    if options.hosts is not None:
        for name in ("nodes", "ssd_path"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is not for --hosts: its lines have roles and flags")
    options.nodes = DEFAULT_NODES if options.nodes is None else options.nodes
    options.port = options.port if options.port is not None else PORT if options.hosts else 0
    most = MAX_PORT if options.hosts else MAX_PORT - len(parse_nodes(options.nodes)) + 1
    if not 0 <= options.port <= most:
        raise UsageError(f"--port {options.port}: the nodes take ports from this one on; give 0 to {most}")
    flags = [flag for flag in flags if flag != "--"]
    config = parse(flags, OWN_FLAGS)
    for name, remedy in PLACED_FLAGS.items():
        if getattr(config, name) != getattr(Config(), name):
            raise UsageError(f"{flag_name(name)} is not for scripts/up: {remedy}")
    return options, flags, config


def own_key(config: Config) -> str | None:
    """For our own calls: --api-key, else the first of --api-key-file. Raises UsageError."""
    if config.api_key is not None or config.api_key_file is None:
        return config.api_key
    from engine.config.net_options import api_key  # a second of imports, which other starts avoid

    return api_key(config)


def main(argv: Sequence[str] | None = None, **cluster_options: Any) -> int:
    """Exit code 0 after Ctrl-C or a successful --ask, 1 if a node died or the request failed, 2 for wrong flags.

    `cluster_options` go to LocalCluster: the tests pass a stand-in for the node program. With --hosts they run the
    program of `processes` on the hosts.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        options, flags, config = read_arguments(sys.argv[1:] if argv is None else argv)
        cluster = made(options, flags, config, cluster_options)
    except UsageError as error:
        errors.print(f"scripts/up: {error}", markup=False, soft_wrap=True)
        return UsageError.exit_code
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    try:
        bring_up(cluster, console)
        if options.ask is not None:
            ask(cluster, options.ask, options.max_tokens, console)
        else:
            serve(cluster, console, options.follow)
    except KeyboardInterrupt:
        console.print("stopping ...")
    except (NodeDied, StartTimeout, rest.RestError) as error:
        errors.print(f"scripts/up: {error}", markup=False, soft_wrap=True)
        return 1
    finally:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: stop() has killed the remaining nodes
            cluster.stop()
    return 0


def made(options: argparse.Namespace, flags: list[str], config: Config, more: dict[str, Any]) -> LocalCluster:
    """The cluster that the command line describes, not started. Raises UsageError."""
    where: dict[str, Any] = {"run_dir": Path(tempfile.mkdtemp(prefix="mooncake-")), "api_key": own_key(config)}
    if options.hosts is None:
        ssd = {"store": ["--ssd-path", f"{options.ssd_path}/{{node}}"]} if options.ssd_path else {}
        more = {"processes": Processes(start_timeout_s=START_S)} | more
        return LocalCluster(options.nodes, flags, role_flags=ssd, where=Where(options.port), **where | more)
    hosts = hosts_of(options, flags)
    if options.ask is not None and where["api_key"] is None:
        raise UsageError(
            "--ask with --hosts shows the timeline, which other machines need a key for: add --api-key-file"
        )
    stop_s = config.drain_timeout_ms / 1000 + STOP_S
    processes = Processes(start_timeout_s=START_S, stop_timeout_s=stop_s)
    remote = Remote(ssh_of(options.ssh), options.folder, processes=processes)
    return RemoteCluster(hosts, replace(remote, **more), **where)


def ssh_of(text: str) -> list[str]:
    """The words of --ssh. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh {text!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--ssh {text!r}: no such program here; install OpenSSH's client, or name another one")
    return words


def hosts_of(options: argparse.Namespace, flags: list[str]) -> list[Host]:
    try:
        text = options.hosts.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hosts {options.hosts}: {error}") from None
    return read_hosts(text, str(options.hosts), flags, options.port)


def bring_up(cluster: LocalCluster, console: Console) -> None:
    """Start the nodes; print the progress of each, and when it is ready."""
    shape = ", ".join(name for name, _ in cluster.plan)
    console.print(f"starting {shape}; logs in {cluster.run_dir}", soft_wrap=True)
    announced: set[str] = set()
    with console.status("starting") as status:
        for _ in cluster.starting():
            announce(cluster, announced, console)
            status.update(doing(cluster))
            time.sleep(POLL_S)
    announce(cluster, announced, console)


def announce(cluster: LocalCluster, announced: set[str], console: Console) -> None:
    for node in cluster.nodes:
        if node.ready_s is not None and node.name not in announced:
            announced.add(node.name)
            console.print(f"  {node.name} ready after {node.ready_s:.1f} s")


def doing(cluster: LocalCluster) -> str:
    """Last log line of each node that is not ready yet; then, whether one does not answer here."""
    lines = [f"{node.name}: {(node.last_lines(1) or ['starting'])[0][:90]}" for node in cluster.nodes if not node.url]
    return ("\n".join(lines) or f"joining {cluster.unheard}".strip()).replace("[", r"\[")


def serve(cluster: LocalCluster, console: Console, follow: bool = False) -> None:
    """Print the addresses, then watch until Ctrl-C or until a node dies (NodeDied); on other hosts, until all have."""
    show_nodes(cluster, console)
    model = model_name(cluster)
    door = cluster.nodes[0].url
    key = f" -H 'Authorization: Bearer {cluster.api_key}'" if cluster.api_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    console.print("\ntry it (any node takes requests):", style="bold")
    console.print(f"  curl -s {door}/v1/chat/completions{key} -H 'Content-Type: application/json' \\", soft_wrap=True)
    console.print(f"    -d {shlex.quote(body)}", soft_wrap=True)
    console.print("\nCtrl-C stops all nodes")
    gone: set[str] = set()
    read: dict[str, int] = {}
    while True:
        cluster.check()
        for node in cluster.nodes:
            if follow:
                show_log(node, read, console)
            if not node.alive and node.name not in gone:
                gone.add(node.name)
                words = f"{node.name} has left" if node.left else cluster.last_words(node)
                console.print(f"{words}; {len(cluster.living)} nodes go on", markup=False, soft_wrap=True)
        time.sleep(0.2)


def show_log(node: Node, read: dict[str, int], console: Console) -> None:
    """Print the log lines that came since the last call; `read`: bytes of each node's log that were printed."""
    with node.log.open("rb") as file:
        file.seek(read.get(node.name, 0))
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    read[node.name] = read.get(node.name, 0) + len(whole)
    for line in whole.decode(errors="replace").splitlines():
        console.print(f"{node.name}: {line}", markup=False, soft_wrap=True)


def ask(cluster: LocalCluster, text: str, max_tokens: int, console: Console) -> None:
    """Print one chat completion at temperature 0 and its timeline. Raises RestError, NodeDied."""
    door, key = cluster.nodes[0].url, cluster.api_key
    body = {
        "model": model_name(cluster),
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    try:
        answer = rest.post(f"{door}/v1/chat/completions", body, key)
    except rest.RestError:
        cluster.check()
        raise
    record = rest.get(f"{door}/debug/requests/{answer['id']}", key)
    show_nodes(cluster, console)  # after the request, because its transfers open the paths
    console.print(f"\n{answer['choices'][0]['message']['content']}\n", style="bold", markup=False)
    console.print(timeline(record))


def show_nodes(cluster: LocalCluster, console: Console) -> None:
    hosts = cluster.hosts if isinstance(cluster, RemoteCluster) else {}
    rows: list[dict[str, Any]] = []
    for node in cluster.nodes:
        told = not hosts or cluster.api_key is not None  # without keys, /debug answers only its own machine
        paths = rest.get(f"{node.url}/debug/state", cluster.api_key)["paths"] if told else None
        place = {"host": hosts[node.name].target} if hosts else {"pid": node.pid}
        rows.append({"name": node.name, "role": node.role, "url": node.url, "paths": paths} | place)
    console.print(nodes_table(rows))


def model_name(cluster: LocalCluster) -> str:
    return str(rest.get(f"{cluster.nodes[0].url}/v1/models", cluster.api_key)["data"][0]["id"])


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGHUP of a closing terminal and SIGTERM of a service manager act like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
