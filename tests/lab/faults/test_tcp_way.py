"""Connections that are cut hold their bytes back, and lose none."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from lab.faults.networks.tcp_way import HOST, Way


def test_a_cut_holds_bytes_back_in_both_directions_and_loses_none():
    with socket.create_server((HOST, 0)) as server, Way(server.getsockname()[1]) as way:
        near = socket.create_connection((HOST, way.port))
        far, _ = server.accept()
        for begin, end in ((near, far), (far, near)):
            begin.sendall(b"before")
            assert end.recv(6, socket.MSG_WAITALL) == b"before"
            with way.cut_off():
                begin.sendall(b"after")
                end.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    end.recv(1)
                end.settimeout(None)
            assert end.recv(5, socket.MSG_WAITALL) == b"after"
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
        near.close()
        far.close()


def test_a_connection_without_a_server_is_closed_and_the_next_one_tried_again():
    with socket.create_server((HOST, 0)) as found:
        port = found.getsockname()[1]
    with Way(port) as way:
        with socket.create_connection((HOST, way.port)) as near:
            assert near.recv(1) == b""
        with socket.create_server((HOST, port)) as server, socket.create_connection((HOST, way.port)) as near:
            far, _ = server.accept()
            far.sendall(b"x")
            assert near.recv(1) == b"x"
            far.close()


def test_its_end_ends_the_connections_also_while_they_are_cut():
    with socket.create_server((HOST, 0)) as server:
        way = Way(server.getsockname()[1])
        near = socket.create_connection((HOST, way.port))
        far, _ = server.accept()
        way.cut()
        ended = threading.Thread(target=way.close)
        ended.start()
        assert near.recv(1) == b"" and far.recv(1) == b""
        ended.join()
        near.close()
        far.close()


def test_a_connection_made_during_a_cut_reaches_the_server_after_it():
    with socket.create_server((HOST, 0)) as server, Way(server.getsockname()[1]) as way:
        server.settimeout(0.2)
        with way.cut_off():
            near = socket.create_connection((HOST, way.port))
            near.sendall(b"early")
            with pytest.raises(TimeoutError):
                server.accept()
        server.settimeout(None)
        far, _ = server.accept()
        assert far.recv(5, socket.MSG_WAITALL) == b"early"
        near.close()
        far.close()


@pytest.mark.parametrize("cut", [False, True])
def test_nothing_is_carried_after_its_end_and_no_thread_remains(cut):
    before = set(threading.enumerate())
    with socket.create_server((HOST, 0)) as server:
        way = Way(server.getsockname()[1])
        if cut:
            way.cut()
        with socket.create_connection((HOST, way.port)) as near:
            way.close()
            near.settimeout(30)
            with suppress(ConnectionResetError):  # it may not have been accepted yet
                assert near.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, way.port))
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
