"""The questions of explain, top and drain to a node, and the text of a refusal."""

from __future__ import annotations

import argparse
import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.observe.node_client import NoAnswer, NodeClient, add_flags


@pytest.fixture
def server():
    """Its address; answers with what it was sent; /refused is 403, /other a page of some other program."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status, text):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):
            if self.path == "/refused":
                return self.answer(403, json.dumps({"error": {"message": "not from there"}}))
            if self.path == "/other":
                return self.answer(502, "<html>bad gateway</html>")
            return self.answer(200, json.dumps({"key": self.headers.get("Authorization")}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200, json.dumps({"body": body, "type": self.headers["Content-Type"]}))

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def of(*argv: str) -> NodeClient:
    parser = argparse.ArgumentParser()
    add_flags(parser, "any node")
    return NodeClient.from_flags(parser.parse_args(argv))


@pytest.mark.parametrize("url", ["{}", "http://{}", "http://{}/"])
def test_an_address_in_every_spelling(server, url):
    node = of("--url", url.format(server))
    assert node.get("/") == {"key": None}
    assert node.post("/", {"a": 1}) == {"body": {"a": 1}, "type": "application/json"}


def test_the_key_or_the_first_of_the_file(server, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of alice\nalice-key\nbob-key-1\n")
    assert of("--url", server, "--api-key-file", str(file)).get("/") == {"key": "Bearer alice-key"}
    assert of("--url", server, "--api-key-file", str(file), "--api-key", "mine").get("/") == {"key": "Bearer mine"}
    with pytest.raises(NoAnswer, match=r"--api-key-file .* cannot be read"):
        of("--api-key-file", str(tmp_path / "none"))


def test_refusals_say_what_the_node_says(server):
    with pytest.raises(NoAnswer, match=r"answers 403: not from there") as caught:
        of("--url", server).get("/refused")
    assert caught.value.status == 403
    with pytest.raises(NoAnswer, match=r"502: .*bad gateway.*give --url of one"):
        of("--url", server).get("/other")
    with pytest.raises(NoAnswer, match=r"does not answer .*give --url of a running node") as caught:
        of("--url", "127.0.0.1:1").get("/")
    assert caught.value.status is None


@pytest.fixture
def stranger():
    """The address of a server that speaks another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            with suppress(OSError):  # closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                        connection.recv(1 << 16)

        thread = threading.Thread(target=greet)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("url", ["{}", "127.0.0.1:port", "[::1", "no scheme://x"])
def test_what_is_no_node_is_told_in_one_line(stranger, url):
    with pytest.raises(NoAnswer, match=r"does not answer .*give --url of a running node"):
        of("--url", url.format(stranger)).get("/")
