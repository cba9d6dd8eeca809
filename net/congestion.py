"""Which congestion control data connections use.

KV moves in bursts between neighbours. BBR, which some images choose for the Internet, paces what it sends and every ten
seconds stops to look for the shortest round trip: bursts of megabytes take two to three times as long.
"""

from __future__ import annotations

import socket
from pathlib import Path

DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
INSTEAD_OF_BBR = ("cubic", "reno")


def chosen(wanted: str) -> str | None:
    """What to set: `wanted`; for "auto" the first of INSTEAD_OF_BBR that this process may use where the kernel's
    default is BBR, else None = the default stays. Raises ValueError when the kernel has no `wanted`."""
    if wanted != "auto":
        if (reason := _refused(wanted)) is not None:
            raise ValueError(f"--tcp-congestion {wanted}: {reason}; there are: {_read(AVAILABLE) or 'unknown'}")
        return wanted
    if not _read(DEFAULT).startswith("bbr"):
        return None
    return next((name for name in INSTEAD_OF_BBR if _refused(name) is None), None)


def use(sock: socket.socket, name: str) -> None:
    """Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def _refused(name: str) -> str | None:
    """Why the kernel does not let this process use it."""
    with socket.socket() as probe:
        try:
            use(probe, name)
        except OSError as error:
            return "the kernel does not have it" if isinstance(error, FileNotFoundError) else str(error.strerror)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
