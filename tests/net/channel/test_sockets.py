"""The control port that goes with an HTTP port."""

from __future__ import annotations

import socket

from net.channel.sockets import CONTROL_PORT_OFFSET, control_port


def free_port() -> int:
    """A port whose next one is free too, or at least exists."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1] - CONTROL_PORT_OFFSET
        if control_port("127.0.0.1", port):
            return port


def test_the_same_http_port_has_the_same_control_port():
    port = free_port()
    assert control_port("127.0.0.1", port) == control_port("127.0.0.1", port) == port + CONTROL_PORT_OFFSET


def test_a_port_that_is_taken_for_either_protocol_is_not_used():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        port = free_port()
        with socket.socket(socket.AF_INET, kind) as sock:
            sock.bind(("127.0.0.1", port + CONTROL_PORT_OFFSET))
            assert control_port("127.0.0.1", port) == 0


def test_any_port_means_any_port():
    assert control_port("127.0.0.1", 0) == 0 and control_port("127.0.0.1", 60_000) == 0
