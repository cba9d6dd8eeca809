"""A process that has imported what a node imports, and forks a node at each order.

    python -m tests.fork_server FD KIND

FD is one end of a Unix SOCK_SEQPACKET pair. KIND is `engine` or `store`; the second does not import torch. An order is
a JSON object, and each has a JSON answer:

    {"start": [ARG, ...], "cwd": PATH, "env": {NAME: VALUE}}, with the descriptors of stdout and stderr -> {"pid": PID}
    {"poll": PID} -> {"returncode": CODE or null}

The nodes are children of this process. When it ends, which it does at the end of the connection, they get SIGTERM.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time

PRELOAD = {"store": ("uvloop", "engine.start.serve"), "engine": ("uvloop", "engine.start.serve", "engine.node.engine")}
ORDER_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1


def next_node(link: socket.socket) -> list[str] | None:
    """Serves orders. Returns the arguments of a node in the new process of that node, and None in this one at the end
    of the connection."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, ORDER_BYTES, 2)
        if not message:
            return None
        order = json.loads(message)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = {"returncode": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            answer = {"pid": os.fork()}
            if not answer["pid"]:
                link.close()
                _become(order["cwd"], order["env"], descriptors)
                return order["start"]
            for descriptor in descriptors:
                os.close(descriptor)
        link.send(json.dumps(answer).encode())


def _become(cwd: str, env: dict[str, str], descriptors: list[int]) -> None:
    """What the launcher and exec do for a node: a session, an end with its parent, its own variables and streams."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _prepare_vocabulary() -> None:
    """Most nodes of the tests have the embedded model's tokenizer, whose vocabulary for grammars costs each 0.7 s. The
    key has the end tokens: those of the embedded model and of tests.e2e.conftest.TINY are the same."""
    from engine.checkpoint.model_source import describe
    from engine.sampling.grammar import vocabulary
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(describe("smollm2-135m-instruct"))
    vocabulary(tokenizer.to_json(), tokenizer.eos_token_ids)


def main() -> int:
    import mooncake

    mooncake.limit_spinning()  # before torch reads it
    for name in PRELOAD[sys.argv[2]]:
        importlib.import_module(name)
    if sys.argv[2] == "engine":
        _prepare_vocabulary()
    arguments = next_node(socket.socket(fileno=int(sys.argv[1])))
    if arguments is None:
        return 0
    mooncake.BEGUN = time.monotonic()
    sys.argv = arguments
    return mooncake.main()


if __name__ == "__main__":
    sys.exit(main())
