"""Prefill and decode nodes whose KV travels by RDMA, pushed and then pulled, forked from one process so that torch is
imported once. So the same process also moves encoded KV between two codecs, without a model.

Prints one JSON line: what the two clusters answered, what one engine without any network computes, and how much encoded
KV moved by which transport.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import engine.loading.load_model  # noqa: F401
import mooncake
from engine.checkpoint.model_source import describe
from engine.checkpoint.weights import load
from engine.model.decoder import Model
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.inputs import Row
from engine.step.runner import Runner
from tests.rdma.nodes import SIDES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 255,
}
PROMPTS = [[7, 11, 13] * 20, list(range(1, 100))]
MAX_TOKENS = 12
ENCODED = {"push": "int8", "pull": "fp8"}  # --wire-dtype


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork(log_file: Path, *argv: str) -> int:
    """The process id of a process with this command line."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        mooncake.main(list(argv))
        code = 0
    finally:
        os._exit(code)


def fork_node(folder: Path, role: str, devices: str, port: int, *flags: str) -> int:
    """The process id of a node."""
    return fork(
        folder / f"{role}.log",
        *("--role", role, "--port", str(port), "--node-id", role.replace(",", "-"), "--num-threads", "1"),
        *("--model", str(folder), "--load-format", "dummy", "--dtype", "float32", "--kv-cache-bytes", "8M"),
        *("--transport", "rdma", "--rdma-devices", devices, "--attention-backend", "torch"),
        *("--calibration-ms", "0", *flags),
    )


def ask(port: int, path: str, body: dict | None = None) -> dict:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    for _ in range(20):
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code != 503 or path == "/health":
                raise
            # An emulated core stands still for seconds: nodes suspect each other, and say when to come again.
            print(f"{path}: {error.read().decode()}", file=sys.stderr)
            time.sleep(float(error.headers.get("Retry-After", "1")))
    raise SystemExit(f"{path} is refused again and again")


def until_ready(port: int, pid: int) -> None:
    for _ in range(3000):
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise SystemExit("a node ended before it was ready")
        try:
            ask(port, "/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit("a node did not become ready")


def expected(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy, whole prompt again at every step."""
    source = describe(str(folder), load_format="dummy")
    from attention.choice.choose import choose

    model = Model(source.config, load(source, torch.float32), choose("torch", "cpu"))
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        pool = torch.zeros(64, source.config.num_layers, 2, source.config.num_kv_heads, 16, source.config.head_size)
        row = Row(tokens, 0, list(range(32)), SamplingRow(SamplingParams(temperature=0.0), tokens, len(prompt)))
        tokens.append(Runner(model, pool, 16).step([row])[0][0].token_id)
    return tokens[len(prompt) :]


def write_model(folder: Path, **changed: Any) -> None:
    """`changed`: fields of CONFIG."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    write_model(folder)
    served = {how: serve(folder, how) for how in ("push", "pull")}
    encoded = {how: asyncio.run(move_encoded(how, wire_dtype)) for how, wire_dtype in ENCODED.items()}
    print(json.dumps({"expected": [expected(folder, prompt) for prompt in PROMPTS], "encoded": encoded, **served}))


async def move_encoded(how: str, wire_dtype: str) -> dict:
    """Fails unless the decode side has exactly the blocks that it is to have, and no others."""
    from tests.engine.handoff.test_wire import geometry_of, hand_over

    options = tuple({"rdma": {"devices": devices}} for devices in SIDES.values())
    report = await hand_over(("rdma",), geometry_of(wire_dtype), True, how, "layer", options)
    return {"transport": report.transport, "bytes": report.nbytes, "saved": report.saved}


def serve(folder: Path, how: str) -> dict:
    """Answers of a cluster with --kv-transfer `how`, and the states of its two nodes."""
    first, second = free_port(), free_port()
    moves = ("--kv-transfer", how)
    nodes = [fork_node(folder, "prefill", "rxa0,rxa1", first, *moves)]
    try:
        until_ready(first, nodes[0])
        nodes.append(fork_node(folder, "decode", "rxb0,rxb1", second, "--join", f"127.0.0.1:{first}", *moves))
        until_ready(second, nodes[1])
        body = {"model": folder.name, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        answers = [ask(second, "/v1/completions", body | {"prompt": prompt}) for prompt in PROMPTS]
        return {"answers": answers, "states": [ask(port, "/debug/state") for port in (first, second)]}
    except BaseException:
        for log in folder.glob("*.log"):
            print(f"--- {log.name}\n{log.read_text()}", file=sys.stderr)
        raise
    finally:
        for pid in nodes:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
