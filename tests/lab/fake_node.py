"""A stand-in for mooncake.py: the ready line and the HTTP answers that the launcher relies on, without a model.

Members are the files of a shared directory ($FAKE_MEMBERS), so joining and leaving need no gossip.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MEMBERS = Path(os.environ["FAKE_MEMBERS"])
FLAGS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
NAME = FLAGS["--node-id"]
TIMELINE = {
    "request_id": "chatcmpl-1",
    "events": [
        {"t": 100.0, "node": "prefill-0", "event": "arrived", "detail": {"prompt_tokens": 37}},
        {"t": 100.25, "node": "decode-0", "event": "first_token", "detail": {}},
    ],
    "summary": {
        "queue_ms": 0.5,
        "prefix_fetch_ms": 2.0,
        "prefill_ms": 120.0,
        "transfer_ms": 8.0,
        "ttft_ms": 140.0,
        "decode_ms": 300.0,
        "e2e_ms": 440.0,
        "nodes": {"acceptor": "prefill-0", "prefill": "prefill-0", "decode": "decode-0"},
        "prompt_tokens": 37,
        "cached_tokens": 16,
        "output_tokens": 8,
        "bytes_moved": {"shm": 1769472},
        "placement": {"prefill": "prefill-0", "decode": "decode-0", "estimates": {"ttft_ms": 130.5}},
    },
}


def cluster() -> dict[str, object]:
    known = [json.loads(path.read_text()) for path in sorted(MEMBERS.glob("*.json"))]
    members = [member for member in known if Path(f"/proc/{member['pid']}").exists()]
    return {"node_id": NAME, "model": "fake", "block_size": 16, "dtype": "float32", "members": members}


def paths() -> list[dict[str, object]]:
    others = [path.stem for path in sorted(MEMBERS.glob("*.json")) if path.stem != NAME]
    return [{"peer": peer, "transport": "shm", "reason": "same host"} for peer in others]


class Handler(BaseHTTPRequestHandler):
    def answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        bodies = {
            "/cluster": cluster(),
            "/debug/state": {"node_id": NAME, "paths": paths()},
            "/v1/models": {"data": [{"id": "fake"}]},
            "/debug/requests/chatcmpl-1": TIMELINE,
        }
        wanted = FLAGS.get("--api-key")
        if wanted and self.headers["Authorization"] != f"Bearer {wanted}":
            self.answer({"error": {"message": "wrong key"}}, 401)
        elif self.path in bodies:
            self.answer(bodies[self.path])
        else:
            self.answer({"error": {"message": "no such path"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        if text == "die":
            os._exit(7)
        self.answer({"id": "chatcmpl-1", "choices": [{"message": {"content": f"You said: {text}"}}]})

    def log_message(self, *args: object) -> None:
        print("GET", *args, file=sys.stderr)


def leave(*_: object) -> None:
    (MEMBERS / f"{NAME}.json").unlink(missing_ok=True)
    os._exit(0)


def main() -> None:
    print(f"{NAME}: loading, threads {FLAGS.get('--num-threads')}, ssd {FLAGS.get('--ssd-path')}", file=sys.stderr)
    if FLAGS.get("--model") == "missing":
        print("mooncake: no model named missing; give a directory", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if FLAGS.get("--log-level") == "debug" else leave)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    roles = FLAGS["--role"].split(",")
    member = {
        "node_id": NAME,
        "roles": roles,
        "http": url,
        "status": "alive",
        "join": FLAGS.get("--join"),
        "pid": os.getpid(),
    }
    (MEMBERS / f"{NAME}.json").write_text(json.dumps(member))
    ready = {"event": "ready", "node_id": NAME, "roles": roles, "url": url, "control": ["127.0.0.1", 1]}
    print(json.dumps(ready), flush=True)
    server.serve_forever()


main()
