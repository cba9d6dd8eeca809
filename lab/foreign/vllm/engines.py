"""Several vLLM processes that share the cores of this machine, each with settings of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.config.config import EMBEDDED_MODEL
from lab.foreign.common.processes import Process
from lab.foreign.vllm.connectors import Settings
from lab.foreign.vllm.server import START_S, vllm

KV_GIB = 1
"""Of each process: 45,000 tokens of the embedded model in bfloat16."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """What all vLLM processes of a run have in common."""

    python: Path
    model: Path
    dtype: str
    run_dir: Path  # of logs
    flags: tuple[str, ...] = ()

    @contextmanager
    def running(self, settings: Mapping[str, Settings], say: Say) -> Iterator[dict[str, Process]]:
        """One process per name, all ready. Raises Unreachable."""
        started: dict[str, Process] = {}
        shares = cores_of(sorted(os.sched_getaffinity(0)), len(settings))
        try:
            for (name, own), cores in zip(settings.items(), shares, strict=True):
                flags, env = (*self.flags, *own.flags), own.env
                program = vllm(self.python, self.model, cores, self.dtype, flags, env=env, name=name, kv_gib=KV_GIB)
                started[name] = Process(program, self.run_dir)
            for process in started.values():
                process.wait_ready(START_S, say)
            yield started
        finally:
            for process in started.values():
                process.stop()


def cores_of(cores: Sequence[int], processes: int) -> list[list[int]]:
    """The cores of each process: an equal share, at least one; with fewer cores than processes some share a core."""
    if processes > len(cores):
        return [[cores[i % len(cores)]] for i in range(processes)]
    each = len(cores) // processes
    return [list(cores[i * each : (i + 1) * each]) for i in range(processes)]


def export_model(folder: Path) -> Path:
    """The embedded model as a directory that vLLM loads, made once."""
    if not (folder / "model.safetensors").is_file():
        from lab.tools.export_hf import export  # needs torch, so only here

        export(EMBEDDED_MODEL, folder)
    return folder
