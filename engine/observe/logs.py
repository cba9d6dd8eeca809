"""Log lines on stderr: as text, or one JSON object per line (--log-format)."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from net.loop.log_context import request_id

CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""All control characters except the tab."""

TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """{"time" (UTC), "level", "logger", "message"}, `constant` fields such as the node's id, and "request_id" and
    "exception" if there are any."""

    def __init__(self, constant: dict[str, Any]) -> None:
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage()} | self._constant
        if (of := request_id.get()) is not None:
            line["request_id"] = of
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """TEXT, followed by the request's id if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        of = request_id.get()
        head, newline, rest = super().format(record).partition("\n")
        if of is not None and of not in head:
            head = f"{head} [{of}]"
        return f"{head}{newline}{rest}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, even with text from a peer: characters that would move a terminal's cursor are escaped."""
        record.message = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), record.message)
        return super().formatMessage(record)


def configure(level: str, log_format: str, **constant: Any) -> None:
    """Configure the logs of this process; replaces earlier settings. `constant`: node_id, and a worker process's
    rank."""
    handler = logging.StreamHandler(sys.stderr)
    text = TEXT.replace("%(name)", f"rank {constant['rank']} %(name)") if "rank" in constant else TEXT
    handler.setFormatter(JsonFormatter(constant) if log_format == "json" else TextFormatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
