"""Another program with mooncake.engine, for tests of TransferEngine."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping

from lab.conformance.answers import ours

PROGRAM = """
import ctypes, json, sys
from mooncake.engine import TransferEngine
engine, memory = TransferEngine(), {}
code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", *sys.argv[1:])
print(json.dumps([code, engine.get_rpc_port()]), flush=True)
for line in sys.stdin:
    command, *values = json.loads(line)
    if command == "new":
        made = ctypes.create_string_buffer(values[0])
        memory[ctypes.addressof(made)] = made
        answer = [ctypes.addressof(made), engine.register_memory(ctypes.addressof(made), values[0])]
    elif command == "forget":
        answer = engine.unregister_memory(values[0])
    elif command == "notices":
        answer = [[one.name, one.msg] for one in engine.get_notifies()]
    print(json.dumps(answer), flush=True)
"""


class EnginePeer:
    """The program; end it."""

    def __init__(self, env: Mapping[str, str], protocol: str = "tcp", devices: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, protocol, devices],
            env=ours() | dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        code, port = self._line()
        assert code == 0
        self.session = f"127.0.0.1:{port}"

    def ask(self, *question: object) -> object:
        """new BYTES: [address, code]; forget ADDRESS: code; notices: [[name, message] ...]."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self):
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def memory(nbytes: int) -> tuple[ctypes.Array, int]:
    """(memory of this program, its address)."""
    made = ctypes.create_string_buffer(nbytes)
    return made, ctypes.addressof(made)
