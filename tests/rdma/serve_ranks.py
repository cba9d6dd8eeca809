"""A node whose experts are on another host as far as the verbs can tell: messages by RDMA, a rank killed and back.

Prints one JSON line: what the node answered at each stage, its state, and what one process with all experts computes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import engine.experts.remote_worker  # noqa: F401
from tests.rdma.serve import MAX_TOKENS, PROMPTS, ask, expected, fork, fork_node, free_port, until_ready, write_model

EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
FLAGS = ("--expert-parallel-size", "2", "--expert-remote-ranks", "1", "--expert-replicas", "2")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    write_model(folder, **EXPERTS)
    port, join = free_port(), free_port()
    rank = ("expert-rank", "--join", f"127.0.0.1:{join}", "--num-threads", "1")
    rank = (*rank, "--transport", "rdma", "--rdma-devices", "rxb0,rxb1")
    node = fork_node(folder, "prefill,decode", "rxa0,rxa1", port, *FLAGS, "--expert-port", str(join))
    processes = [node, fork(folder / "rank.log", *rank)]
    body = {"model": folder.name, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}

    def stage() -> dict[str, Any]:
        answers = [ask(port, "/v1/completions", body | {"prompt": prompt}) for prompt in PROMPTS]
        tokens = [answer["choices"][0]["token_ids"] for answer in answers]
        return {"tokens": tokens, "experts": ask(port, "/debug/state")["engine"]["experts"]}

    def until(right: Callable[[dict[str, Any]], bool]) -> None:
        for _ in range(600):
            if right(ask(port, "/health")):
                return
            time.sleep(0.2)
        raise SystemExit("the ranks of the node are not as they are to be")

    try:
        until_ready(port, node)
        stages = {"whole": stage()}
        os.kill(processes[1], signal.SIGKILL)
        os.waitpid(processes.pop(), 0)
        until(lambda health: "masked_ranks" in health)
        stages["lost"] = stage()
        processes.append(fork(folder / "again.log", *rank))
        until(lambda health: "masked_ranks" not in health)
        stages["back"] = stage()
    except BaseException:
        for log in folder.glob("*.log"):
            print(f"--- {log.name}\n{log.read_text()}", file=sys.stderr)
        raise
    finally:
        for pid in processes:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
    logs = {log.name: log.read_text() for log in folder.glob("*.log")}
    print(json.dumps({"expected": [expected(folder, prompt) for prompt in PROMPTS], "logs": logs, **stages}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
