"""KV in fewer bytes: the lossless coder of slow links (--wire-codec), and four bits in the pool (--pool-dtype int4).

  scripts/bench.py codec --json codec.json            # about two minutes on two cores
  scripts/bench.py codec --model DIRECTORY --tokens 2000

The KV is that of the model after a text, computed and kept in bfloat16 and in float32, cut into frames as the TCP
transport cuts them. All coders get the same frames, on one thread.

  ratio, encode, decode   of each coder; bytes per second are those of the KV. memcpy is the limit of any coder
  over N Gbit/s           KV per second over a link of that rate, next to the link's rate: by formula from the measured
                          ratio and rates. `in turns`: a frame is coded, moved and decoded before the next;
                          `overlapped`: the slowest of the three decides
  over a paced link       measured: the TCP transport moves the KV to another node of this process, coded and raw, while
                          the kernel paces its connections to N Gbit/s (lab/bench/transfer/paced.py)
  pool TYPE               bytes of a block in the pool, and the rates of its conversion, for every --pool-dtype

zlib at level 1 is always there; lz4 and zstd (level 1) where their Python packages are installed.
"""

from __future__ import annotations

import sys
import time
import zlib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.text.tokenizer import Tokenizer
from lab.bench.common.results import Row, Value, add_result_flags, quicken, report
from lab.bench.quantization.command import pool_rows, text_tokens
from lab.bench.quantization.prefixes import BLOCK, POOL_ENCODINGS, Prefixes, load_model
from lab.bench.transfer.paced import kv_rate
from lab.flag_types import positive
from net.codec.exponents import Exponents
from net.compiled import NotCompiled
from net.transfer.tcp.coding import CODED_FRAME_BYTES

DTYPES = ("bfloat16", "float32")
GIGABITS = (1, 10, 25)
PACED_GIGABITS = 1
ROUNDS = 5
LONG_KV_BYTES = 256 << 20  # takes seconds over a slow link


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one coder. Rates are KV bytes per second."""

    ratio: float
    encode: float
    decode: float

    def in_turns(self, link: float) -> float:
        return 1 / (1 / self.encode + self.ratio / link + 1 / self.decode)

    def overlapped(self, link: float) -> float:
        return min(self.encode, link / self.ratio, self.decode)


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of ROUNDS rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def exponent(frames: Sequence[memoryview], dtype: str) -> Measured:
    coder = Exponents(dtype)
    coded = [coder.encode([frame]) for frame in frames]
    outs = [np.empty(len(frame), np.uint8).data for frame in frames]
    total = sum(map(len, frames))
    encode_s = best(lambda: [coder.encode([frame]) for frame in frames])

    def decode() -> None:
        for one, out in zip(coded, outs, strict=True):
            coder.decode(one, [out])

    decode_s = best(decode)
    if any(out != frame for out, frame in zip(outs, frames, strict=True)):
        raise ValueError("the exponent coder has changed the KV")
    return Measured(sum(map(len, coded)) / total, total / encode_s, total / decode_s)


def general(frames: Sequence[memoryview], pack: Callable[..., bytes], unpack: Callable[..., bytes]) -> Measured:
    """Any coder of bytes."""
    coded, total = [pack(frame) for frame in frames], sum(map(len, frames))
    encode_s = best(lambda: [pack(frame) for frame in frames])
    decode_s = best(lambda: [unpack(one) for one in coded])
    return Measured(sum(map(len, coded)) / total, total / encode_s, total / decode_s)


def general_coders() -> dict[str, tuple[Callable[..., bytes], Callable[..., bytes]]]:
    """Name -> (compress, decompress), of those that are here."""
    found: dict[str, tuple[Callable[..., bytes], Callable[..., bytes]]] = {
        "zlib 1": (lambda data: zlib.compress(data, 1), zlib.decompress)
    }
    if find_spec("lz4") is not None:
        lz4 = import_module("lz4.block")
        found["lz4"] = lz4.compress, lz4.decompress
    if find_spec("zstandard") is not None:
        zstd = import_module("zstandard")
        found["zstd 1"] = zstd.ZstdCompressor(1).compress, zstd.ZstdDecompressor().decompress
    return found


def memcpy(frames: Sequence[memoryview]) -> float:
    """Bytes per second."""
    sources = [np.frombuffer(frame, np.uint8) for frame in frames]
    targets = [np.empty_like(source) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    return sum(map(len, frames)) / best(copy)


def coder_rows(dtype: str, frames: Sequence[memoryview]) -> list[Row]:
    ours, case = exponent(frames, dtype), f"KV in {dtype}"
    others = {name: general(frames, *functions) for name, functions in general_coders().items()}
    copies = memcpy(frames) / 1e9
    rows = [
        Row(case, "bytes after / before", "", ours.ratio, {name: one.ratio for name, one in others.items()}),
        Row(case, "encode", "GB/s", ours.encode / 1e9, {n: one.encode / 1e9 for n, one in others.items()},
            {"memcpy": copies}),
        Row(case, "decode", "GB/s", ours.decode / 1e9, {n: one.decode / 1e9 for n, one in others.items()},
            {"memcpy": copies}),
    ]  # fmt: skip
    for gigabits in GIGABITS:
        link = gigabits * 1e9 / 8
        for how, speed in (("in turns", Measured.in_turns), ("overlapped", Measured.overlapped)):
            peers: dict[str, Value] = {name: speed(one, link) / 1e9 for name, one in others.items()}
            metric = f"KV over {gigabits} Gbit/s, {how}"
            rows.append(Row(case, metric, "GB/s", speed(ours, link) / 1e9, peers, {"line rate": link / 1e9}))
    return rows


def paced_row(dtype: str, kv: memoryview) -> Row:
    """KV per second that arrives over a real connection of a slow link."""
    link = int(PACED_GIGABITS * 1e9 / 8)
    rounds = 1 if len(kv) > LONG_KV_BYTES else ROUNDS
    coded, raw = (kv_rate(kv, coder, link, rounds) / 1e9 for coder in (Exponents(dtype), None))
    metric = f"KV over a paced link of {PACED_GIGABITS} Gbit/s"
    return Row(f"KV in {dtype}", metric, "GB/s", coded, {"raw": raw}, {"line rate": link / 1e9})


def measure(args: Namespace) -> tuple[dict[str, object], list[Row]]:
    """Returns the configuration and the rows."""
    source = describe(args.model)
    tokens = text_tokens(Tokenizer.load(source, "auto"), args.tokens // BLOCK * BLOCK)
    rows: list[Row] = []
    pooled: list[Row] = []
    for dtype in DTYPES:
        prefixes = Prefixes(load_model(source, dtype=getattr(torch, dtype)), len(tokens), dtype)
        prefixes.compute(tokens)
        kv = prefixes.computed().flatten().numpy().data
        frames = [kv[at : at + CODED_FRAME_BYTES] for at in range(0, len(kv), CODED_FRAME_BYTES)]
        rows += coder_rows(dtype, frames)
        rows.append(paced_row(dtype, kv))
        if dtype == "bfloat16":
            pooled = [row for name in POOL_ENCODINGS for row in pool_rows(prefixes, name)]
    config = {
        "model": args.model,
        "tokens": len(tokens),
        "block_size": BLOCK,
        "frame_bytes": CODED_FRAME_BYTES,
        "threads of the coders": 1,
        "threads of the conversion": torch.get_num_threads(),
    }
    return config, rows + pooled


def parser() -> ArgumentParser:
    out = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    out.add_argument("--model", default=EMBEDDED_MODEL, help="the same values as for a node (default %(default)s)")
    out.add_argument("--tokens", type=positive, default=1024, help="of the text, at least 16 (default %(default)s)")
    add_result_flags(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = quicken(parser().parse_args(argv), tokens=256)
    if args.tokens < BLOCK:
        print(f"scripts/bench.py codec: --tokens {args.tokens} is less than a block of {BLOCK}", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    try:
        config, rows = measure(args)
    except (ValueError, NotCompiled) as error:
        print(f"scripts/bench.py codec: {error}", file=sys.stderr)
        return 2
    report(config, rows, args.json)
    return 0
