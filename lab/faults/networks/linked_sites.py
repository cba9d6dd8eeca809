"""Nodes in network namespaces at two sites: two bridges with a slow link between them (lab/faults/networks/relay.py).

    hub   bridge 10.77.0.254        the first site, ports as in lab/faults/networks/namespaces.py
    far   bridge 10.77.0.253        the second site
    hub0 <── relay ──> far0         a TAP device on each bridge

Frames are large (MTU_BYTES): with 1,500 bytes each, this relay ends at about 600 Mbit/s and takes the CPU of the nodes.
This process reaches the nodes of both sites directly, so its own requests do not cross the link.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from lab.faults.networks.namespaces import NET, Namespaces, NoNamespaces, ToolFailed, run_tool

ROOT = Path(__file__).resolve().parents[3]
FAR_ADDRESS = f"{NET}.253"
MTU_BYTES = 9000


class LinkedSites(Namespaces):
    """`far`: the names of the second site; the link has `delay_ms` each way and `mbit_s` in each direction."""

    def __init__(self, names: Sequence[str], far: Collection[str], delay_ms: float, mbit_s: float) -> None:
        super().__init__(names)
        self._far, self._link = set(far), (delay_ms, mbit_s)
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Raises NoNamespaces."""
        super().__enter__()
        try:
            self._join_by_link()
        except (ToolFailed, OSError) as error:
            self._end()
            raise NoNamespaces(str(error)) from error
        except BaseException:
            self._end()
            raise
        return self

    def cut_link(self) -> None:
        """From now on the link drops all frames."""
        self._tell("cut")

    def heal_link(self) -> None:
        self._tell("heal")

    def link_bytes(self) -> tuple[int, int]:
        """(bytes from the first site to the second one, and back) since the start, in whole frames."""
        there, back = self._tell("bytes")
        return there, back

    def _bridge(self, name: str) -> str:
        return "far" if name in self._far else "hub"

    def _join_by_link(self) -> None:
        run_tool("ip", "link", "add", "name", "far", "type", "bridge")
        run_tool("ip", "address", "add", f"{FAR_ADDRESS}/32", "dev", "far")
        for device in ("hub", "far"):  # each bridge answers for its own address only
            Path(f"/proc/sys/net/ipv4/conf/{device}/arp_ignore").write_text("1")
        run_tool("ip", "link", "set", "far", "up")
        for name in self._names:
            run_tool("ip", "link", "set", self._port(name), "mtu", f"{MTU_BYTES}")
            run_tool(*self.prefix(name), "ip", "link", "set", "eth0", "mtu", f"{MTU_BYTES}")
        for name in self._names:
            if name in self._far:
                run_tool("ip", "link", "set", self._port(name), "master", "far")
                run_tool("ip", "route", "add", f"{self.host(name)}/32", "dev", "far", "src", FAR_ADDRESS)
        if not Path("/dev/net/tun").exists():
            raise NoNamespaces("/dev/net/tun is missing: no relay between two sites")
        delay_ms, mbit_s = self._link
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "lab.faults.networks.relay", "hub0", "far0", f"{delay_ms:g}", f"{mbit_s:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise NoNamespaces("the relay between two sites has not started")
        for device, bridge in (("hub0", "hub"), ("far0", "far")):
            run_tool("ip", "link", "set", device, "mtu", f"{MTU_BYTES}", "master", bridge, "up")

    def _tell(self, command: str) -> list[int]:
        assert self._relay is not None, "inside its context there is a relay"
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(f"{command}\n")
        self._relay.stdin.flush()
        counts: list[int] = json.loads(self._relay.stdout.readline())
        return counts

    def _end(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        super()._end()
