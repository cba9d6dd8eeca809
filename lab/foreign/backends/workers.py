"""vLLM workers behind acceptors of ours: started together, for checks and benchmarks of --backend."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.foreign.common.processes import Process, free_port
from lab.foreign.vllm.server import START_S, vllm
from lab.launch.cluster import LocalCluster


@dataclass(frozen=True, slots=True)
class Behind:
    """`workers` are vLLM's servers; `flags` name them to an acceptor."""

    workers: list[Process]
    flags: list[str]
    folder: Path

    @contextmanager
    def acceptor(self, *more: str) -> Iterator[str]:
        """The URL of a node of ours in front of the workers."""
        run_dir = Path(tempfile.mkdtemp(dir=self.folder))
        with LocalCluster("mixed=1", [*self.flags, *more], run_dir=run_dir) as cluster:
            yield cluster.nodes[0].url


@contextmanager
def two_workers(python: Path, model: Path, dtype: str, flags: Sequence[str] = ()) -> Iterator[Behind]:
    """Two servers of the Hugging Face directory `model`, each on one core, that publish KV events. Raises
    Unreachable."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        workers, given = [], ["--model", str(model), "--served-model-name", "m"]
        endpoints = []
        for core in range(2):
            events, replay = free_port(), free_port()
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
            config |= {"replay_endpoint": f"tcp://*:{replay}"}
            own = [
                "--kv-events-config",
                json.dumps(config),
                "--enable-prompt-tokens-details",
                "--enforce-eager",
                *flags,
            ]
            program = vllm(
                python,
                model,
                [core],
                dtype,
                own,
                env={"VLLM_SERVER_DEV_MODE": "1"},  # POST /reset_prefix_cache
                name=f"vllm-{core}",
                kv_gib=1,
            )
            worker = Process(program, folder)
            stack.callback(worker.stop)
            workers.append(worker)
            endpoints.append((events, replay))
        for worker, (events, replay) in zip(workers, endpoints, strict=True):
            worker.wait_ready(2 * START_S, print)  # they start together
            given += ["--backend", f"{worker.url},events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"]
        yield Behind(workers, given, folder)
