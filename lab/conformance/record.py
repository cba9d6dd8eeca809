"""Records what upstream's released wheel answers, as the reference of our conformance test.

    scripts/tools.py record-conformance VENV     VENV: a virtual environment with mooncake-transfer-engine-non-cuda
                                                 and torch; PYTHONPATH may name another folder that has torch

It starts upstream's master and one client on this host, over TCP, and writes lab/conformance/upstream-DATE.json.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from lab.bench.transfer.mooncake_store import free_port
from lab.conformance.answers import HERE, engine_answers, store_answers, tensor_answers
from lab.foreign.common.processes import environment

WHEEL = "mooncake-transfer-engine-non-cuda"
START_S = 60.0


@contextmanager
def master(venv: Path) -> Iterator[str]:
    """The address of upstream's master, which runs meanwhile."""
    port, metrics = free_port(), free_port()
    command = [str(venv / "bin" / "mooncake_master"), f"--rpc_port={port}", f"--metrics_port={metrics}"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None:
                raise RuntimeError(f"upstream's master ended with {process.returncode} at its start")
            if time.monotonic() > deadline:
                raise RuntimeError(f"upstream's master does not answer in {START_S:.0f} s")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(START_S)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def version(python: str) -> str:
    """Of the wheel."""
    code = f"import importlib.metadata as m; print(m.version({WHEEL!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        "tools.py record-conformance", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("venv", type=Path, help="virtual environment of upstream's wheel")
    venv = parser.parse_args(argv).venv
    python, env = str(venv / "bin" / "python"), dict(os.environ)
    with master(venv) as address:
        answers = {"store": store_answers(python, address, env), "tensors": tensor_answers(python, address, env)}
        answers["engine"] = engine_answers(python, env)
    path = HERE / f"upstream-{date.today()}.json"
    path.write_text(json.dumps({"wheel": WHEEL, "version": version(python), **answers}, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
