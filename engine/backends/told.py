"""The load that a worker tells: the lines of its /metrics that vLLM and our nodes have in common. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE = re.compile(
    r"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|vllm:cache_config_info"
    r"|process_start_time_seconds)"
    r"(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
LABEL = re.compile(r'(block_size|num_gpu_blocks)="(\d+)"')


@dataclass(frozen=True, slots=True)
class Told:
    """Summed over the engines of a worker. Zero where it tells nothing."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0  # share of its KV blocks in use, of the fullest engine
    block_size: int = 0  # tokens
    blocks: int = 0
    started: float = 0.0  # unix seconds; another value is another process


def told(page: str) -> Told:
    """From the text of /metrics."""
    running = waiting = usage = 0.0
    block_size, blocks, started = 0, 0, 0.0
    for name, labels, value in LINE.findall(page):
        number = float(value)
        match name:
            case "vllm:num_requests_running":
                running += number
            case "vllm:num_requests_waiting":
                waiting += number
            case "vllm:kv_cache_usage_perc":
                usage = max(usage, number)
            case "vllm:cache_config_info":
                found = {key: int(text) for key, text in LABEL.findall(labels)}
                block_size = found.get("block_size", block_size)
                blocks += found.get("num_gpu_blocks", 0)
            case "process_start_time_seconds":
                started = number
    return Told(int(running), int(waiting), usage, block_size, blocks, started)
