"""setup without an address: a node of this host is found, or one is started that ends with its program."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys

import pytest

from connect.store import nodes
from connect.store.distributed_store import MooncakeDistributedStore
from lab.conformance.answers import ours
from lab.foreign.common.processes import free_port
from tests.e2e.conftest import wait_until


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def port(monkeypatch) -> int:
    """Where nodes are looked for and started."""
    port = free_port()
    monkeypatch.setattr(nodes, "ON_THIS_HOST", (f"127.0.0.1:{port}",))
    monkeypatch.setattr(nodes, "START_PORT", port)
    return port


def test_the_first_program_starts_a_node_and_the_second_finds_it(port, caplog):
    first, second = MooncakeDistributedStore(), MooncakeDistributedStore()
    with caplog.at_level(logging.INFO, logger="mooncake.connect"):
        assert first.setup("localhost", "P2PHANDSHAKE", 64 << 20, 0, "tcp", "", "") == 0
        assert f"started one at 127.0.0.1:{port}" in caplog.text
        assert second.setup({"local_hostname": "localhost"}) == 0
        assert f"entered through 127.0.0.1:{port}, which runs on this host" in caplog.text
    large = bytes(range(256)) * 20_000  # larger than a slot
    assert (first.put("key", b"value"), first.put("large", large)) == (0, 0)
    assert (second.get("key"), second.get("large")) == (b"value", large)
    second.close()
    assert listens(port)
    first.close()
    wait_until(lambda: not listens(port), "the node ends with the client that started it")


def test_the_started_node_ends_when_its_program_is_killed(port):
    code = (
        "import sys; from mooncake.store import MooncakeDistributedStore\n"
        "from mooncake_rooms.connect.store import nodes\n"
        f"nodes.ON_THIS_HOST, nodes.START_PORT = (), {port}\n"
        "store = MooncakeDistributedStore()\n"
        "print(store.setup('localhost', '', 64 << 20, 0, 'tcp', '', ''), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-P", "-c", code]
    program = subprocess.Popen(command, env=ours(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "0\n"
        assert listens(port)
        program.send_signal(signal.SIGKILL)
        wait_until(lambda: not listens(port), "the node ends with its program")
    finally:
        program.kill()
        program.communicate()
