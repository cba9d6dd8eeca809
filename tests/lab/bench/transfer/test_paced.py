"""The pace of the connections to one port."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

from lab.bench.transfer.paced import SO_MAX_PACING_RATE, pace

RATE = 12_345_678


def open_descriptors() -> list[str]:
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def test_only_connections_to_the_port_are_paced_and_no_descriptor_stays_open():
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [one.getsockname()[1] for one in listeners]
        to_it, elsewhere = (stack.enter_context(socket.create_connection(("127.0.0.1", port))) for port in ports)
        for descriptor in (*os.pipe(), os.open(os.devnull, os.O_RDONLY), os.memfd_create("no-socket")):
            stack.callback(os.close, descriptor)
        before = open_descriptors()
        assert pace(ports[0], RATE) == 1
        assert open_descriptors() == before
        rates = [one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for one in (to_it, elsewhere)]
        assert rates[0] == RATE != rates[1]
