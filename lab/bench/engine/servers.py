"""The servers of the engine benchmark except vLLM (lab/foreign/vllm/server.py): the command of each.

Between their turns SIGSTOP pauses servers with their threads and children, so that only the measured one runs. Each
peer has its own virtual environment, never the project's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.bench.common.client import GREEDY, Unreachable
from lab.foreign.common.processes import HOW, Program, installed_version
from lab.foreign.vllm.server import KV_GIB, MAX_MODEL_LEN

ROOT = Path(__file__).resolve().parents[3]
OURS = "ours"
LLAMA_TOKENS = 90_000
SEATS = 32
"""Requests that llama-server computes together; ours and vLLM take more."""


def ours(arguments: Sequence[str], dtype: str) -> Program:
    """One mixed node with all cores, started as a user would. `dtype`: auto, bfloat16 or float32; `arguments` are more
    flags of mooncake.py."""
    argv = (sys.executable, str(ROOT / "mooncake.py"), "--port", "{port}", "--dtype", dtype)
    sizes = ("--kv-cache-bytes", f"{KV_GIB}G", "--max-model-len", str(MAX_MODEL_LEN))
    return Program(OURS, (*argv, *sizes, *arguments), body=GREEDY, max_model_len=MAX_MODEL_LEN)


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
        max_model_len=MAX_MODEL_LEN,
    )


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
        max_model_len=MAX_MODEL_LEN,
    )
