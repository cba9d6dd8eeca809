"""When reuse is faster than computing and disaggregation faster than colocation, by formula. It also shows what this
machine reaches."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from lab.simulator.models.step_models import StepModel


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second and products (FLOP) per second that one process reaches on this machine."""

    memory_bytes_s: float
    flops: float
    loopback_bytes_s: float


def least_bandwidth(model: StepModel, prefix: int) -> float:
    """Bytes per second above which fetching `prefix` tokens is faster than computing them (FAST'25 eq. 1-2, with the
    model's own prefill times instead of FLOPs over peak)."""
    return model.fetch_bytes(prefix) / model.prompt_s(prefix, 0)


def reuse_s(model: StepModel, prefix: int) -> tuple[float, float]:
    """(seconds to compute the prefix, to fetch it at the model's NIC)"""
    return model.prompt_s(prefix, 0), model.nic_latency_s + model.fetch_bytes(prefix) / model.nic_bytes_s


def decode_batch(model: StepModel, prompt: int, tbt_s: float) -> int:
    """The largest batch of a decode-only node whose steps take at most tbt_s; 0 if one request alone is slower."""
    batch = 0
    while batch < model.max_batch and (batch + 1) * model.held_tokens(prompt) <= model.kv_tokens:
        if model.decode_s(batch + 1, (batch + 1) * prompt) > tbt_s:
            break
        batch += 1
    return batch


def decode_share(model: StepModel, prompt: int, tbt_s: float) -> float:
    """Seconds of a decode-only node per answered token, at the largest batch within tbt_s. Infinite if one request
    alone is slower."""
    batch = decode_batch(model, prompt, tbt_s)
    return model.decode_s(batch, batch * prompt) / batch if batch else float("inf")


def chunking_s(model: StepModel, prompt: int, output: int, tbt_s: float) -> float:
    """Seconds of a node for one request, prompt and answer, when its steps mix chunks of prompts with answers. Each
    step is as large as possible within tbt_s. Infinite if not even single tokens fit.

    A chunk of C tokens runs with C output / prompt answers, so that neither queue grows. Steps without decodes are
    bounded as well; real ones are not, so that answers of one token, which the last step of their prompt gives, take
    less time than this (tests/lab/ablations/test_answers.py)."""
    a0, a1, a2 = model.prefill
    _, p, d0, d1, k = model.decode

    def step_s(chunk: float) -> float:
        batch = chunk * output / prompt
        products_s = max(model.read_s(chunk + batch), a1 * chunk + p * batch)
        return max(a0, d0) + products_s + a2 * chunk * (chunk + prompt) + (d1 + k * prompt) * batch

    seats = min(model.max_batch, model.kv_tokens / model.held_tokens(prompt))
    most = min(model.chunk_tokens, prompt, prompt * seats / output)
    if step_s(0.0) >= tbt_s:
        return float("inf")
    low, high = 0.0, float(most)
    if step_s(high) > tbt_s:
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if step_s(middle) > tbt_s else (middle, high)
    return step_s(high) * prompt / high


def apart_s(model: StepModel, prompt: int, output: int, tbt_s: float) -> float:
    """The same with prefill and decode on separate nodes and an unstreamed hand-over (reference/scheduling.md 9.4): a
    hand-over streamed by layer takes almost no time."""
    handover_s = model.nic_latency_s + model.handover_bytes(prompt) / model.nic_bytes_s
    return model.prompt_s(prompt, 0) + handover_s + output * decode_share(model, prompt, tbt_s)


def crossovers(model: StepModel, prompt: int, tbt_s: float, most: int = 8192) -> list[tuple[int, bool | None]]:
    """(tokens of an answer, whether separate nodes take less node time from there on) for each change, the first at 1
    token. None: neither keeps the objective."""
    found: list[tuple[int, bool | None]] = []
    for output in range(1, most + 1):
        split_s, mixed_s = apart_s(model, prompt, output, tbt_s), chunking_s(model, prompt, output, tbt_s)
        apart = None if math.isinf(split_s) and math.isinf(mixed_s) else split_s < mixed_s
        if not found or found[-1][1] != apart:
            found.append((output, apart))
    return found


@dataclass(frozen=True, slots=True)
class Amortized:
    """Node seconds of a request, apart and in mixed steps: those for its prompt with the first token of its answer, and
    those for each further token. `handover_s` is part of the prompt's seconds apart."""

    apart_prompt_s: float
    mixed_prompt_s: float
    handover_s: float
    apart_token_s: float
    mixed_token_s: float

    @classmethod
    def of(cls, model: StepModel, prompt: int, tbt_s: float, answer: int = 1024) -> Self:
        """`answer`: the length from which the seconds of a token are taken."""
        one, many = ([way(model, prompt, n, tbt_s) for n in (1, answer)] for way in (apart_s, chunking_s))
        handover_s = model.nic_latency_s + model.handover_bytes(prompt) / model.nic_bytes_s
        per_token = [(long_s - short_s) / (answer - 1) for short_s, long_s in (one, many)]
        return cls(one[0], many[0], handover_s, *per_token)

    def about(self, changes: Sequence[tuple[int, bool | None]]) -> str:
        """Why short answers pay for separate nodes, or do not, and until which length. changes: from `crossovers`.
        Empty if one of both ways keeps no objective."""
        if not all(map(math.isfinite, (self.apart_prompt_s, self.mixed_prompt_s, self.mixed_token_s))):
            return ""
        chunks_s = self.mixed_prompt_s - self.apart_prompt_s + self.handover_s
        token_s = self.mixed_token_s - self.apart_token_s
        verdict = "pay for separate nodes" if changes[0][1] else "do not pay for separate nodes"
        until = f"until {changes[1][0]:,} tokens" if len(changes) > 1 else "and no longer ones change that"
        prompt, token = _more(1e3 * chunks_s, "ms"), _more(1e6 * token_s, "us")
        return (
            f"short answers {verdict}, {until}: a prompt in mixed steps takes {prompt} than alone, and its hand-over "
            f"{1e3 * self.handover_s:.3g} ms; each token of an answer takes {token} in mixed steps"
        )


def _more(amount: float, unit: str) -> str:
    return f"{abs(amount):.3g} {unit} {'more' if amount > 0 else 'less'}"


def measure(seconds: float = 1.0) -> Measured:
    """Measures this machine; takes about three times `seconds`."""
    return Measured(_memory(seconds), _products(seconds), _loopback(seconds))


def _memory(seconds: float) -> float:
    source, target = np.ones(1 << 24), np.empty(1 << 24)  # 128 MiB each, larger than the caches
    return max(_rate(lambda: np.copyto(target, source), 2.0 * source.nbytes, seconds))


def _products(seconds: float) -> float:
    import torch

    size = 1024
    a, b = (torch.randn(size, size).to(torch.bfloat16) for _ in range(2))
    return max(_rate(lambda: torch.mm(a, b), 2.0 * size**3, seconds))


def _loopback(seconds: float) -> float:
    """Bytes per second of one TCP stream on 127.0.0.1."""
    piece = bytes(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        into, _ = server.accept()
        with into:
            stop = threading.Event()

            def send() -> None:
                while not stop.is_set():
                    out.sendall(piece)
                out.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            buffer, received, begun = bytearray(1 << 20), 0, time.perf_counter()
            while (passed := time.perf_counter() - begun) < seconds:
                received += into.recv_into(buffer)
            stop.set()
            while into.recv_into(buffer):
                pass
            sender.join()
    return received / passed


def _rate(work: object, amount: float, seconds: float) -> list[float]:
    assert callable(work)
    work()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - begun))
    return rates
