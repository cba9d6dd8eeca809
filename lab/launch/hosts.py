"""The hosts file of scripts/up: which host runs a node of which role, and with which flags of its own.

    # host           role            flags of this node
    10.0.0.1         prefill
    gpu2             decode          --num-threads 16
    ops@10.0.0.3     decode+store    --ssd-path /var/lib/mooncake --ssd-bytes 200G

A host is a target of ssh. Its node listens on the address of that name, unless the line has --host. Nodes on one host
take successive ports, unless their lines have --port.
"""

from __future__ import annotations

import shlex
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config.config import Config
from engine.config.flags import UsageError, parse
from lab.launch.nodes import check_kind

PORT = 8000
PLACED = {
    "--role": "it is the second word of a line",
    "--node-id": "nodes are named after their role",
    "--join": "the nodes join each other",
}


@dataclass(frozen=True, slots=True)
class Host:
    """One line. `target`: what ssh connects to; `kind`: the roles of the node, joined by '+'; `flags`: all its flags
    but role, name and the node that it joins."""

    target: str
    kind: str
    flags: tuple[str, ...]


def address_of(target: str) -> str:
    """The IPv4 address of 'gpu2' or 'ops@gpu2'. Raises ValueError."""
    name = target.rpartition("@")[2]
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise ValueError(f"{name!r} has no IPv4 address ({error.strerror}): add --host ADDRESS to the line") from None


def read_hosts(
    text: str, file: str, flags: Sequence[str], port: int = PORT, address: Callable[[str], str] = address_of
) -> list[Host]:
    """The hosts of a file with this text. `flags` go to every node, before those of its line. `port`: HTTP port of the
    first node on each host; 0 = any free ones. Raises UsageError, which names the file and the line."""
    hosts: list[Host] = []
    nodes_at: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                target, kind, config = _checked(words, flags)
                where = config.host if config.host != Config().host else address(target)
                free = port and port + nodes_at[where]
                nodes_at[where] += 1
                place = ("--net", "lan", "--host", where, "--port", str(free))
                hosts.append(Host(target, kind, (*place, *flags, *words[2:])))
        except (ValueError, UsageError) as error:
            raise UsageError(f"--hosts {file}, line {number}: {error}") from None
    if not hosts:
        raise UsageError(f"--hosts {file} names no host; write a line for each node: HOST ROLE [FLAGS]")
    return hosts


def _checked(words: Sequence[str], flags: Sequence[str]) -> tuple[str, str, Config]:
    """(target, kind, what the flags make) of a line. Raises ValueError, UsageError."""
    if len(words) < 2 or words[1].startswith("-"):
        raise ValueError(f"{words[0]!r} has no role; write HOST ROLE [FLAGS]")
    target, kind, *own = words
    if target.startswith("-"):
        raise ValueError(f"{target!r} is no host; ssh would take it for an option")
    check_kind(kind)
    for flag in own:
        if remedy := PLACED.get(flag.partition("=")[0]):
            raise ValueError(f"{flag} is not for a hosts file: {remedy}")
    return target, kind, parse([*flags, *own, "--role", kind.replace("+", ",")])
