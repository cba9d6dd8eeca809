"""A stand-in for any of the benchmarked servers: streams tokens at a fixed pace, takes ids and text, no model.

--pace-ms between tokens, --cached tokens that it claims of every prompt, --die-after that many completions,
--refuse to start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FLAGS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
PACE_S = float(FLAGS.get("--pace-ms", "1")) / 1000
LEFT = [int(FLAGS.get("--die-after", "1000000"))]


class Handler(BaseHTTPRequestHandler):
    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send(b"{}")
        elif self.path == "/v1/models":
            self.send(b'{"data": [{"id": "fake"}]}')
        elif self.path == "/debug/state":
            self.send(b'{"config": {"fake": true}}')
        else:
            self.send(b"{}", 404)

    def do_POST(self) -> None:
        LEFT[0] -= 1
        if LEFT[0] < 0:
            os._exit(3)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["prompt"], body["max_tokens"]
        tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        self.send_response(200)
        self.end_headers()
        for _ in range(count):
            time.sleep(PACE_S)
            self.event({"choices": [{"text": "x"}]})
        cached = {"cached_tokens": int(FLAGS.get("--cached", "0"))}
        usage = {"prompt_tokens": tokens, "completion_tokens": count, "prompt_tokens_details": cached}
        self.event({"choices": [], "usage": usage})

    def event(self, data: object) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        print("request", *args, file=sys.stderr)


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # a ninth connection at once would be tried again a second later


if "--refuse" in FLAGS:
    print("no memory left", file=sys.stderr)
    sys.exit(1)
Server(("127.0.0.1", int(FLAGS["--port"])), Handler).serve_forever()
