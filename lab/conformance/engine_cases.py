"""Calls of mooncake.engine with good, bad and missing arguments, in a process that has upstream's module or ours.

    python engine_cases.py peer             another program: prints its port and the address of its memory
    python engine_cases.py PORT:ADDRESS FIRST     prints one JSON line per case from number FIRST on: [name, answer]

Like lab/conformance/store_cases.py. The peer registers SIZE bytes and runs until its standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib import import_module
from typing import Any

BEFORE = [
    "n.get_rpc_port()",
    "n.register_memory(A, 100)",
    "n.transfer_sync_write(S, A, R, 10)",
    "n.transfer_check_status(1)",
    "n.get_notifies()",
    "n.send_probe(S)",
]

CASES = [
    "e.get_rpc_port() > 0",
    "e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp')",
    "e.register_memory(A, SIZE)",
    "e.register_memory(A, SIZE)",
    "e.register_memory(A + 5, 10)",
    "e.register_memory('a', 10)",
    "e.unregister_memory(B)",
    "e.batch_register_memory([B], [SIZE])",
    "e.batch_register_memory([U, U], [10])",
    "e.batch_unregister_memory([B])",
    "e.batch_unregister_memory([B])",
    "e.register_memory(B, SIZE)",
    "e.transfer_sync_write(S, A, R, 100)",
    "e.transfer_sync_read(S, B, R, 100)",
    "ctypes.string_at(B, 100) == PATTERN[:100]",
    "e.transfer_sync_write(S, A, R + SIZE - 10, 10)",
    "e.transfer_sync_write(S, A, R + SIZE - 10, 11)",
    "e.transfer_sync_write(S, A, R - 10, 5)",
    "e.transfer_sync_write(S, A, 64, 5)",
    "e.transfer_sync_write('127.0.0.1:1', A, R, 10)",
    "e.transfer_sync_write(S, A, R, 0)",
    "e.transfer_sync_write(S, U, R, 10)",
    "e.transfer_sync_read(S, U, R, 10)",
    "e.transfer_sync_write(S, A)",
    "e.transfer_sync_write(S, A, R, 10, 'tcp')",
    "e.batch_transfer_sync_write(S, [A, A + 10], [R, R + 10], [10, 10])",
    "e.batch_transfer_sync_read(S, [B, B + 10], [R, R + 10], [10, 10])",
    "ctypes.string_at(B, 20) == PATTERN[:20]",
    "e.batch_transfer_sync_write(S, [], [], [])",
    "e.batch_transfer_sync_write(S, [A, A], [R], [10])",
    "e.batch_transfer_sync_write(S, [A], [R], [10, 10])",
    "wait(e, e.batch_transfer_async_write(S, [A], [R], [100]))",
    "wait(e, e.batch_transfer_async_read(S, [B], [R], [100]))",
    "wait(e, e.batch_transfer_async_write(S, [A], [64], [100]))",
    "e.batch_transfer_async_write(S, [A, A], [R], [10])",
    "e.get_batch_transfer_status([e.batch_transfer_async_write(S, [A], [R], [100])])",
    "e.get_batch_transfer_status([])",
    "e.transfer_sync(S, A, R, 10, Opcode.Write, Notify('n', 'm'))",
    "e.transfer_sync(S, B, R, 10, Opcode.Read)",
    "e.batch_transfer_sync(S, [A], [R], [10], Opcode.Write, Notify('n2', 'm2'))",
    "e.get_notifies()",
    "(Notify('n', 'm').name, Notify('n', 'm').msg)",
    "e.send_probe(S)",
    "e.send_probe('127.0.0.1:1')",
    "e.get_first_buffer_address(S) == R",
    "e.allocate_managed_buffer(4096) > 0",
    "managed(e)",
    "e.write_bytes_to_buffer(B, b'bytes', 5)",
    "e.read_bytes_from_buffer(B, 5)",
    "type(e.get_local_topology()).__name__",
    "e.unregister_memory(A)",
    "e.unregister_memory(A)",
    "e.transfer_check_status(987654)",
    "e.get_batch_transfer_status([987654])",
]

SIZE = 1 << 16
PATTERN = bytes(i * 7 % 251 for i in range(SIZE))
WAIT_S = 10.0


def opened() -> Any:
    """An engine that listens."""
    engine = import_module("mooncake.engine").TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    if code:
        sys.exit(f"initialize answered {code}")
    return engine


def peer() -> None:
    """The other program."""
    engine = opened()
    memory = ctypes.create_string_buffer(SIZE)
    engine.register_memory(ctypes.addressof(memory), SIZE)
    print(json.dumps([engine.get_rpc_port(), ctypes.addressof(memory)]), flush=True)
    sys.stdin.read()


def wait(engine: Any, batch: int) -> int:
    """The last status of a batch."""
    if batch == 0:
        return -1000
    end = time.monotonic() + WAIT_S
    while (status := engine.transfer_check_status(batch)) == 0 and time.monotonic() < end:
        time.sleep(0.001)
    return int(status)


def managed(engine: Any) -> Any:
    """Freeing a managed buffer."""
    return engine.free_managed_buffer(engine.allocate_managed_buffer(4096), 4096)


def main(port: int, remote: int, first: int) -> None:
    """Run the cases from number `first` on."""
    module = import_module("mooncake.engine")

    opcode = getattr(module, "TransferOpcode", None) or module.TransferEngine.TransferOpcode
    memory = [ctypes.create_string_buffer(PATTERN, SIZE) for _ in range(3)]
    a, b, u = (ctypes.addressof(one) for one in memory)
    known = {"A": a, "B": b, "U": u, "R": remote, "S": f"127.0.0.1:{port}", "Opcode": opcode, "SIZE": SIZE}
    known |= {"ctypes": ctypes, "PATTERN": PATTERN, "Notify": module.TransferNotify, "wait": wait, "managed": managed}
    engine = None
    for number, case in enumerate([*BEFORE, *CASES]):
        if number < len(BEFORE):
            if number < first:
                continue
            known["n"] = module.TransferEngine()
        elif engine is None:
            engine = known["e"] = opened()
            if number < first:  # the process ended in an earlier one
                engine.register_memory(a, SIZE)
                engine.register_memory(b, SIZE)
        if number >= first:
            print(json.dumps([case, answer(case, known)]), flush=True)


def answer(case: str, known: dict[str, Any]) -> str:
    """The answer as text; of an exception its type."""
    try:
        return repr(eval(case, dict(known)))
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    if sys.argv[1] == "peer":
        peer()
    else:
        where = sys.argv[1].split(":")
        main(int(where[0]), int(where[1]), int(sys.argv[2]))
