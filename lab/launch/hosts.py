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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import count

from engine.config.config import Config
from engine.config.flags import UsageError, parse
from lab.launch.nodes import check_kind

PORT, MAX_PORT = 8000, 65_535
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
    lines: list[_Line] = []
    for number, written in enumerate(text.splitlines(), 1):
        with _named(file, number):
            if words := shlex.split(written, comments=True):
                lines.append(_checked(number, words, flags, address))
    if not lines:
        raise UsageError(f"--hosts {file} names no host; write a line for each node: HOST ROLE [FLAGS]")
    if not all(loopback(line.address) for line in lines):
        for line in lines:
            with _named(file, line.number):
                if line.looked_up and loopback(line.address):
                    raise ValueError(
                        f"{line.target!r} is {line.address} here, where no other host reaches its node (/etc/hosts "
                        "may say so): add --host ADDRESS to the line"
                    )
    hosts: list[Host] = []
    taken: defaultdict[str, set[int]] = defaultdict(set)
    for line in filter(lambda line: line.port, lines):
        with _named(file, line.number):
            if line.port in taken[line.address]:
                raise ValueError(f"the node of another line listens on port {line.port} of {line.address}, too")
            taken[line.address].add(line.port)
    for line in lines:
        own = line.port
        if port and not own:
            own = next(free for free in count(port) if free not in taken[line.address])
            taken[line.address].add(own)
        if own > MAX_PORT:
            raise UsageError(f"--port {port}: {line.address} has too few ports from this one on; give a lower one")
        place = ("--net", "lan", "--host", line.address, "--port", str(own))
        hosts.append(Host(line.target, line.kind, (*place, *flags, *line.flags)))
    return hosts


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file. `looked_up`: its address is that of the host's name; `port`: its own one, 0 = it has none."""

    number: int
    target: str
    kind: str
    flags: tuple[str, ...]
    address: str
    looked_up: bool
    port: int


def loopback(address: str) -> bool:
    """Whether only the host itself reaches this address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name, which the node looks up where it is
        return False


@contextmanager
def _named(file: str, number: int) -> Iterator[None]:
    """What is wrong inside is wrong in this line."""
    try:
        yield
    except (ValueError, UsageError) as error:
        raise UsageError(f"--hosts {file}, line {number}: {error}") from None


def _checked(number: int, words: Sequence[str], flags: Sequence[str], address: Callable[[str], str]) -> _Line:
    """Raises ValueError, UsageError."""
    if len(words) < 2 or words[1].startswith("-"):
        raise ValueError(f"{words[0]!r} has no role; write HOST ROLE [FLAGS]")
    target, kind, *own = words
    if target.startswith("-"):
        raise ValueError(f"{target!r} is no host; ssh would take it for an option")
    check_kind(kind)
    for flag in own:
        if remedy := PLACED.get(flag.partition("=")[0]):
            raise ValueError(f"{flag} is not for a hosts file: {remedy}")
    config = parse([*flags, *own, "--role", kind.replace("+", ",")])
    looked_up = config.host == Config().host
    where = address(target) if looked_up else config.host
    has_port = any(flag.partition("=")[0] == "--port" for flag in own)
    return _Line(number, target, kind, tuple(own), where, looked_up, config.port if has_port else 0)
