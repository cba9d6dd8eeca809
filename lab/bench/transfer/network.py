"""One congestion control for every contender.

Peers open their own sockets, so only the network's default affects them. As root the benchmark moves into its own
network namespace, so that no other process uses its loopback and its default; without that permission, every contender
uses the machine's default.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def one_congestion_control(name: str) -> str:
    """Make `name` the default of this process's and its children's sockets; returns the one in force, which is the
    machine's default if this process may not change it. Raises ValueError when the kernel lacks `name`."""
    if DEFAULT.read_text().strip() == name:
        return name
    try:
        _own_network()
    except PermissionError:
        return DEFAULT.read_text().strip()
    try:
        DEFAULT.write_text(name)
    except OSError:
        there = DEFAULT.with_name("tcp_available_congestion_control").read_text().strip()
        raise ValueError(f"--congestion {name}: the kernel does not have it; there are: {there}") from None
    return name


def _own_network() -> None:
    """A new network namespace with its loopback up. Raises PermissionError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
