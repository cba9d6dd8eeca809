"""Processes of `mooncake.py expert-rank` on this machine, for nodes of a LocalCluster; all end with the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from lab.launch.nodes import execute

ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0


class ExpertRanks:
    """`flags`: of every process. A context manager."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = [*flags]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *flags: str) -> None:
        """Start a process under this name; the one that had it ends."""
        self.end(name)
        command = [sys.executable, str(ROOT / "mooncake.py"), "expert-rank", "--num-threads", "1"]
        self._processes[name] = execute("expert-rank", [*command, *self._flags, *flags], os.environ, None, None)

    def send(self, name: str, number: int) -> None:
        """A signal."""
        self._processes[name].send_signal(number)

    def code(self, name: str) -> int:
        """Its exit code; waits for that. Raises subprocess.TimeoutExpired."""
        return self._processes[name].wait(END_S)

    def end(self, name: str) -> None:
        """With SIGKILL, if it runs."""
        if (process := self._processes.pop(name, None)) is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._processes):
            self.end(name)
