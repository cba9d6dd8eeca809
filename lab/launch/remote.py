"""A cluster of node processes on other hosts, started and stopped over ssh, for scripts/up --hosts.

Each node is the child of one ssh of ours. Its stdout and stderr come back into NAME.out and NAME.log. Signals go out as
lines on its stdin; the end of stdin is a SIGTERM too, so a node drains if this launcher or the connection is lost, and
is killed if it does not. Login is by key only (BatchMode): nothing asks for a password.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from lab.launch.cluster import ROOT, LocalCluster, NodeDied, Processes
from lab.launch.hosts import Host
from lab.launch.nodes import Node, execute, spawn

LOGIN_S = 10
LOST_S = 5
OPTIONS = ("BatchMode=yes", f"ConnectTimeout={LOGIN_S}", f"ServerAliveInterval={LOST_S}", "ServerAliveCountMax=3")
READY = "mooncake: ready to start"
HINTS = {
    "Host key verification failed": "connect once by hand, to accept its key",
    "Permission denied": "nothing may ask for a password: give it your key with ssh-copy-id",
}

START = """cd {folder} || exit 1
exec 3<&0
{{ while read -r signal; do kill -s "$signal" $$; done
kill -s TERM $$
left={end_s}
while kill -s 0 $$; do
[ $left -gt 0 ] || kill -s KILL $$
sleep 1
left=$((left - 1))
done; }} <&3 >/dev/null 2>&1 &
exec {argv} </dev/null 3<&-"""
"""`kill` goes to the shell that becomes the node. The descriptor 3 is there because a shell gives a program in the
background another stdin. A node that hears no SIGTERM is killed `end_s` seconds after the end of the connection."""

UNSAFE = re.compile("[^A-Za-z0-9_./:=-]")

CHECK = """cd {folder} && command -v {python} >/dev/null && exec echo {ready}
echo "no {python} in {folder}: clone the repository there and run scripts/setup, or name the folder with --folder" >&2
exit 1"""


class HostsFailed(NodeDied):
    """No node was started, because some hosts cannot start one; a line for each."""


@dataclass(frozen=True)
class Remote:
    """How hosts are reached. `ssh`: the command with its options; `folder`: the checkout on every host; `program`: what
    runs there in that folder, for which tests give a stand-in."""

    ssh: Sequence[str] = ("ssh",)
    folder: str = str(ROOT)
    program: Sequence[str] = (".venv/bin/python", "mooncake.py")
    processes: Processes = field(default_factory=Processes)

    def command(self, target: str, script: str) -> list[str]:
        """The ssh that runs a POSIX shell script on this host, whatever the login shell is: csh refuses lines in quotes
        and looks for a '!' even there, so the script goes as octal numbers."""
        options = [word for option in OPTIONS for word in ("-o", option)]
        octal = UNSAFE.sub(lambda found: "".join(f"\\0{byte:03o}" for byte in found[0].encode()), script)
        return [*self.ssh, *options, "-T", target, f"""exec sh -c 'eval "$(printf %b "$1")"' sh '{octal}'"""]


class RemoteProcess:
    """A program on another host, by the ssh that runs it, with the part of subprocess.Popen that launchers use."""

    def __init__(self, ssh: subprocess.Popen[bytes]) -> None:
        self._ssh = ssh
        self.pid = ssh.pid

    @property
    def returncode(self) -> int | None:
        return self._ssh.returncode

    def poll(self) -> int | None:
        return self._ssh.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        return self._ssh.wait(timeout)

    def send_signal(self, signum: int) -> None:
        """Nothing happens if the program has ended, or the connection."""
        assert self._ssh.stdin is not None
        with suppress(BrokenPipeError):
            self._ssh.stdin.write(f"{signal.Signals(signum).name.removeprefix('SIG')}\n".encode())
            self._ssh.stdin.flush()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def execute_there(
    role: str, argv: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> RemoteProcess:
    """Run the ssh `argv`."""
    return RemoteProcess(execute(role, argv, env, stdout, stderr, subprocess.PIPE))


class RemoteCluster(LocalCluster):
    """Starts, watches and stops a node on each line of a hosts file. Once all are ready, a lost node is no error as
    long as another one lives."""

    def __init__(self, hosts: Sequence[Host], remote: Remote, *, run_dir: Path, api_key: str | None = None) -> None:
        kinds = ",".join(host.kind for host in hosts)
        super().__init__(kinds, run_dir=run_dir, api_key=api_key, processes=remote.processes)
        self.remote = remote
        self.hosts = {name: host for (name, _), host in zip(self.plan, hosts, strict=True)}
        self._complete = False

    def starting(self) -> Iterator[None]:
        """Also raises HostsFailed."""
        self._check_hosts()
        yield from super().starting()
        self._complete = True

    def check(self) -> None:
        """Raises NodeDied if a node ended while the cluster starts, or if none is left."""
        if not (self._complete and self.living):
            super().check()

    def last_words(self, node: Node) -> str:
        return f"{self.hosts[node.name].target}: {super().last_words(node)}"

    # --- inside

    def _check_hosts(self) -> None:
        """Log in to all hosts at once, and look for the program. Raises HostsFailed, which names every host that
        fails."""
        targets = list(dict.fromkeys(host.target for host in self.hosts.values()))
        deadline = time.monotonic() + 3 * LOGIN_S
        with ExitStack() as logins:
            asked = {target: logins.enter_context(self._login(target)) for target in targets}
            told = {target: refusal(deadline) for target, refusal in asked.items()}
        if failed := [f"    {target}: {reason}" for target, reason in told.items() if reason]:
            lines = "\n".join(failed)
            raise HostsFailed(f"{len(failed)} of {len(targets)} hosts cannot start a node:\n{lines}")

    @contextmanager
    def _login(self, target: str) -> Iterator[Callable[[float], str]]:
        """Logs in; call what it returns with a time to wait for, for why this host cannot start a node; empty if it
        can. An ssh that still waits at the end of the context is ended."""
        folder, python = shlex.quote(self.remote.folder), shlex.quote(self.remote.program[0])
        script = CHECK.format(folder=folder, python=python, ready=shlex.quote(READY))
        # Pipes would be open for as long as an ssh that ControlPersist leaves behind.
        with TemporaryFile() as out, TemporaryFile() as err:
            ssh = subprocess.Popen(
                self.remote.command(target, script), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

            def refusal(deadline: float) -> str:
                try:
                    code = ssh.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return f"no answer within {3 * LOGIN_S} s"
                said, told = _text(out), " ".join(_text(err).split())
                if code == 0 and READY in said:
                    return ""
                told = told or f"ssh ended with exit code {code}"
                return "; ".join([told, *(hint for sign, hint in HINTS.items() if sign in told)])

            try:
                yield refusal
            finally:
                ssh.kill()
                ssh.wait()

    def _spawn(self, name: str, role: str, join: str | None, flags: Sequence[str] = ()) -> Node:
        host = self.hosts[name]
        argv = [*self.remote.program, "--role", role, "--node-id", name, *self._entrance(join, host.flags)]
        argv += [flag.replace("{node}", name) for flag in (*host.flags, *flags)]
        folder, end_s = shlex.quote(self.remote.folder), math.ceil(self.stop_timeout_s)
        script = START.format(folder=folder, argv=shlex.join(argv), end_s=end_s)
        command = self.remote.command(host.target, script)
        self._nodes[name] = spawn(name, role, command, self.run_dir, os.environ, execute_there)
        return self._nodes[name]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
