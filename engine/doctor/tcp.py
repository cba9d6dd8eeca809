"""TCP: the limits of a connection between two hosts."""

from __future__ import annotations

from engine.doctor.finding import OK, WARN, Finding, System, size
from net.channel.congestion import WITHIN_HOST

BUFFER_MIN = 4 << 20  # bytes: at 25 Gb/s and a round trip of 1 ms, 3 MB are in flight
JUMBO = 9000  # bytes of a packet
FAST_MBIT = 10_000  # from this rate on, packets of 1,500 bytes cost a core
SETTINGS = {"tcp_rmem": "receive", "tcp_wmem": "send"}


def buffers(system: System) -> list[Finding]:
    """The kernel's limit of a connection's buffers, which contain the unacknowledged bytes."""
    most = {}
    for name in SETTINGS:
        words = system.read(f"proc/sys/net/ipv4/{name}").split()
        if len(words) == 3 and words[2].isdigit():
            most[name] = int(words[2])
    if not most:
        return [Finding("TCP buffers", OK, "the kernel does not report their limits")]
    found = ", ".join(f"{SETTINGS[name]} {size(nbytes)}" for name, nbytes in most.items())
    if small := [name for name, nbytes in most.items() if nbytes < BUFFER_MIN]:
        remedy = "; ".join(f'sysctl -w net.ipv4.{name}="4096 131072 {4 * BUFFER_MIN}"' for name in small)
        return [Finding("TCP buffers", WARN, f"at most {found}", f"{remedy}; or a higher --tcp-connections")]
    return [Finding("TCP buffers", OK, f"at most {found}")]


def congestion(system: System) -> list[Finding]:
    """The congestion control that --tcp-congestion auto uses."""
    default = system.read("proc/sys/net/ipv4/tcp_congestion_control") or "unknown"
    return [Finding("congestion control", OK, f"{default} between hosts, {WITHIN_HOST} within one")]


def interfaces(system: System) -> list[Finding]:
    """Rate and packet size of the interfaces that are up, without the loopback."""
    base = "sys/class/net"
    up = [name for name in system.names(base) if name != "lo" and system.read(f"{base}/{name}/operstate") == "up"]
    return [_interface(system, name) for name in up] or [Finding("network", OK, "only the loopback interface is up")]


def _interface(system: System, name: str) -> Finding:
    mtu, rate = (system.read(f"sys/class/net/{name}/{about}") for about in ("mtu", "speed"))
    known = rate.isdigit() and int(rate) > 0
    found = f"{rate} Mb/s" if known else "rate unknown"
    found += f", packets of {mtu} bytes" if mtu.isdigit() else ""
    if known and int(rate) >= FAST_MBIT and mtu.isdigit() and int(mtu) < JUMBO:
        remedy = f"ip link set dev {name} mtu {JUMBO}, on every node and switch on the way: fewer packets, less CPU"
        return Finding(f"network {name}", WARN, found, remedy)
    return Finding(f"network {name}", OK, found)
