"""--log-format."""

from __future__ import annotations

import json
import logging

import pytest

from engine.observe import logs
from net.loop.log_context import request_id


@pytest.fixture
def root():
    """The root logger, put back afterwards."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = handlers, level


def test_json_is_one_object_a_line(root, capsys):
    logs.configure("info", "json", node_id="decode-0")
    log = logging.getLogger("mooncake.x")
    log.debug("unseen")
    log.warning("two\nlines of %s", "text")
    token = request_id.set("req-1")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    finally:
        request_id.reset(token)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    expected = {"level": "warning", "logger": "mooncake.x", "message": "two\nlines of text", "node_id": "decode-0"}
    assert first == expected
    assert second["request_id"] == "req-1" and "ValueError: no" in second["exception"]


def test_text_names_the_request_once(root, capsys):
    logs.configure("info", "text")
    token = request_id.set("req-1")
    logging.getLogger("x").info("placed")
    logging.getLogger("x").info("request req-1 placed")
    request_id.reset(token)
    logging.getLogger("x").info("idle")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("I x: ")[2] for line in lines] == ["placed [req-1]", "request req-1 placed", "idle"]


def test_text_of_peers_stays_in_its_line(root, capsys):
    """The id of a node that says hello, for one, is written when it is refused."""
    logs.configure("info", "text")
    peer = "x\x1b[2J\x1b]0;t\x07\nE mooncake: all is lost\r\u202e"
    logging.getLogger("mooncake.net").info("refused %s", peer)
    (line,) = capsys.readouterr().err.splitlines()
    assert r"\x1b[2J" in line and r"\n" in line and line.isprintable()
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("mooncake.net").exception("failed")
    assert capsys.readouterr().err.count("\n") > 3, "a traceback keeps its lines"
