"""Nodes in separate network namespaces, connected by a bridge: during a cut, the kernel drops packets. Linux, root.

    hub: a new namespace of this process      bridge 10.77.0.254
      port0 ──veth── eth0 10.77.0.1           namespace of the first node
      port1 ──veth── eth0 10.77.0.2           of the second ...

The namespaces have no names: they end with this process and the sleepers that hold them, so none remains.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

CLONE_NEWNET = 0x40000000
NET = "10.77.0"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
DROP_ALL = ("root", "tbf", "rate", "8bit", "burst", "1", "limit", "1")
"""A token bucket that is too small for any packet: the kernel drops all outgoing packets."""

Way = Literal["both", "in", "out"]
"""Direction of the packets that a cut drops, as seen from the node."""


class NoNamespaces(Exception):
    """Network namespaces are not available on this machine; the text says why."""


class ToolFailed(Exception):
    """A command of the system failed; the text has it and its errors."""


class Namespaces:
    """One namespace per name. Entering moves this thread, and the processes it starts, permanently into the hub: use it
    once, in a separate process, before other code runs there."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._holders: list[subprocess.Popen[bytes]] = []
        self._cuts: dict[str, Way] = {}

    def __enter__(self) -> Self:
        """Raises NoNamespaces."""
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoNamespaces(f"{', '.join(missing)} not found: install iproute2 and util-linux")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            raise NoNamespaces(f"no new network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            run_tool("ip", "link", "set", "lo", "up")
            run_tool("ip", "link", "add", "name", "hub", "type", "bridge")
            run_tool("ip", "address", "add", f"{NET}.254/24", "dev", "hub")
            run_tool("ip", "link", "set", "hub", "up")
            for name in self._names:
                self._add(name)
        except (ToolFailed, OSError) as error:
            self._end()
            raise NoNamespaces(str(error)) from error
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    # --- what a LocalCluster asks

    def prefix(self, name: str) -> list[str]:
        """Prefix for the command of a process that must run in the namespace."""
        return ["nsenter", f"--net=/proc/{self._holder(name)}/ns/net", "--"]

    def host(self, name: str) -> str:
        return f"{NET}.{self._names.index(name) + 1}"

    # --- cuts

    def cut(self, name: str, way: Way) -> None:
        """From now on packets from this node (`out`), to it (`in`) or both are dropped silently, for all peers
        including this process. Raises ToolFailed, as `heal` does: then the namespaces are there, and the cut is not."""
        if name in self._cuts:
            raise ValueError(f"{name} is cut off already")
        self._cuts[name] = way
        port = self._port(name)
        if way == "both":
            run_tool("ip", "link", "set", port, "nomaster")
        elif way == "in":
            run_tool("tc", "qdisc", "add", "dev", port, *DROP_ALL)
        else:
            run_tool(*self.prefix(name), "tc", "qdisc", "add", "dev", "eth0", *DROP_ALL)

    def heal(self, name: str) -> None:
        way, port = self._cuts.pop(name), self._port(name)
        if way == "both":
            run_tool("ip", "link", "set", port, "master", self._bridge(name))
        elif way == "in":
            run_tool("tc", "qdisc", "del", "dev", port, "root")
        else:
            run_tool(*self.prefix(name), "tc", "qdisc", "del", "dev", "eth0", "root")

    # --- inside

    def _bridge(self, name: str) -> str:
        """The bridge that this node is joined to."""
        return "hub"

    def _add(self, name: str) -> None:
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "--", "sleep", "infinity"]
        )
        self._holders.append(holder)
        ours = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + 5.0
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours:
            if holder.poll() is not None or time.monotonic() > deadline:
                raise NoNamespaces(f"no network namespace for {name}")
            time.sleep(0.01)
        port, inside = self._port(name), self.prefix(name)
        run_tool("ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        run_tool("ip", "link", "set", port, "master", "hub", "up")
        run_tool(*inside, "ip", "link", "set", "lo", "up")
        run_tool(*inside, "ip", "address", "add", f"{self.host(name)}/24", "dev", "eth0")
        run_tool(*inside, "ip", "link", "set", "eth0", "up")

    def _holder(self, name: str) -> int:
        return self._holders[self._names.index(name)].pid

    def _port(self, name: str) -> str:
        return f"port{self._names.index(name)}"

    def _end(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()


def run_tool(*command: str) -> None:
    """Run a command of the system. Raises ToolFailed with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolFailed(f"{' '.join(command)}: {done.stderr.strip()}")
