"""Chooses the congestion control of data connections.

Between processes of one host no packet is lost and no other host's packets wait, so the simplest control is the
fastest: with BBR, which paces, and with CUBIC, bursts of 12 MB took twice as long.
"""

from __future__ import annotations

import socket
from pathlib import Path

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
WITHIN_HOST = "reno"  # in every kernel, and allowed to every user


def chosen(wanted: str, within_host: bool) -> str | None:
    """The congestion control for a connection; None: the kernel's default. wanted: a name, or "auto"."""
    if wanted != "auto":
        return wanted
    return WITHIN_HOST if within_host else None


def check(wanted: str) -> None:
    """Raises ValueError if the kernel does not have it or does not let this process use it."""
    if wanted == "auto":
        return
    with socket.socket() as probe:
        try:
            use(probe, wanted)
        except OSError as error:
            reason = "the kernel does not have it" if isinstance(error, FileNotFoundError) else error.strerror
            there = AVAILABLE.read_text().strip() if AVAILABLE.exists() else "unknown"
            raise ValueError(f"--tcp-congestion {wanted}: {reason}; available: {there}") from None


def use(sock: socket.socket, name: str) -> None:
    """Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
