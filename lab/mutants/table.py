"""The mutants: a line of a kernel, and what it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPU, TRITON = "cpu", "triton"
KERNELS = (CPU, TRITON)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file. `old` occurs in it exactly once."""

    kernel: str
    name: str
    file: str
    old: str
    new: str

    def applied(self, root: Path) -> str:
        """The file's text with the edit. Raises ValueError if the kernel has changed and the edit no longer fits."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}, wanted once")
        return text.replace(self.old, self.new)


DECODE, DECODE_H = "attention/cpu/decode/decode.cpp", "attention/cpu/decode/decode.h"
SPAN, FLASH = "attention/cpu/decode/span.h", "attention/cpu/prefill/flash.h"
PAGING, SPLIT, MERGE = (f"attention/triton/{name}.py" for name in ("paging", "decode", "merge"))
CHUNK, SHORT, LONG = (f"attention/triton/{name}.py" for name in ("prefill", "short", "hopper"))

MUTANTS = (
    Mutant(CPU, "decode: splits merge with equal weights", DECODE, "add = std::exp2(other.max - max)", "add = 1"),
    Mutant(
        CPU,
        "decode: the last split is missing",
        DECODE,
        "for (int i = 1; i < runs; i++)",
        "for (int i = 1; i < runs - 1; i++)",
    ),
    Mutant(
        CPU,
        "decode: the newest key is missing",
        DECODE,
        "int(begin + count * (i + 1) / runs)}",
        "int(begin + count * (i + 1) / runs) - (count > 1 && i + 1 == runs)}",
    ),
    Mutant(
        CPU,
        "decode: the window is one key too wide",
        DECODE,
        "std::max(0, a.ctx_lens[s] - a.window)",
        "std::max(0, a.ctx_lens[s] - a.window - 1)",
    ),
    Mutant(
        CPU,
        "decode: keys over 256 back are ignored",
        DECODE,
        "std::max(0, a.ctx_lens[s] - a.window) : 0",
        "std::max(0, a.ctx_lens[s] - a.window) : std::max(0, a.ctx_lens[s] - 256)",
    ),
    Mutant(
        CPU,
        "decode: the stale tail of a tile has weight",
        DECODE,
        "ask ? coming : rows[now], std::min(TILE, item.end - j), s",
        "ask ? coming : rows[now], TILE, s",
    ),
    Mutant(
        CPU,
        "decode: sums are not rescaled when the maximum rises",
        DECODE_H,
        "store(o + d, load(o + d) * shrink)",
        "store(o + d, load(o + d))",
    ),
    Mutant(CPU, "prefill: the diagonal is hidden", FLASH, "IntVec seen = last >= key", "IntVec seen = last > key"),
    Mutant(
        CPU,
        "prefill: the window is one key too narrow",
        FLASH,
        "seen &= last - window < key",
        "seen &= last - window + 1 < key",
    ),
    Mutant(CPU, "prefill: partly hidden keys are all seen", FLASH, "if (key + STEP - 1 > low ||", "if (key > low ||"),
    Mutant(
        CPU,
        "prefill: sums are not rescaled when the maximum rises",
        FLASH,
        "store(o + d * COLUMNS + h, load(o + d * COLUMNS + h) * shrink)",
        "store(o + d * COLUMNS + h, load(o + d * COLUMNS + h))",
    ),
    Mutant(
        CPU,
        "prefill: the denominator is not rescaled",
        FLASH,
        "store(total, load(total) * shrink)",
        "store(total, load(total))",
    ),
    Mutant(
        CPU,
        "prefill: weights are added after the rescale",
        FLASH,
        "if (first < now.step * STEP) path.accumulate(o, first, now.step * STEP);",
        "",
    ),
    Mutant(
        CPU,
        "prefill: the last key of the item is missing",
        FLASH,
        "const int end = c.position[count - 1] + 1;",
        "const int end = std::max(1, c.position[count - 1]);",
    ),
    Mutant(
        TRITON,
        "both: the diagonal is hidden",
        PAGING,
        "token[None, :] <= newest[:, None]",
        "token[None, :] < newest[:, None]",
    ),
    Mutant(
        TRITON,
        "both: the window is one key too narrow",
        PAGING,
        "token[None, :] >= oldest[:, None]",
        "token[None, :] > oldest[:, None]",
    ),
    Mutant(TRITON, "both: sums are not rescaled when the maximum rises", PAGING, "acc * shrink[:, None]", "acc"),
    Mutant(
        TRITON,
        "both: the denominator is not rescaled",
        PAGING,
        "total = total * shrink + tl.sum(weights, 1)",
        "total = total + tl.sum(weights, 1)",
    ),
    Mutant(
        TRITON,
        "decode: a split runs over its end",
        SPLIT,
        "end = tl.minimum(start + tokens, ctx_len)",
        "end = tl.minimum(start + tokens + 1, ctx_len)",
    ),
    Mutant(
        TRITON,
        "decode: the stale tail is read",
        SPLIT,
        "end = tl.minimum(start + tokens, ctx_len)",
        "end = start + tokens",
    ),
    Mutant(TRITON, "decode: splits merge by their maximum only", SPLIT, "top + tl.log2(total)", "top"),
    Mutant(TRITON, "decode: the last split is missing", MERGE, "held = piece < last", "held = piece < last - 1"),
    Mutant(
        TRITON,
        "decode: later splits merge without a rescale",
        MERGE,
        "acc = acc * shrink + tl.sum(part * weight[:, None], 0)",
        "acc = acc + tl.sum(part * weight[:, None], 0)",
    ),
    Mutant(
        TRITON,
        "prefill: the first masked tile begins one late",
        CHUNK,
        "diagonal = (lowest + 1) // KEYS * KEYS",
        "diagonal = (lowest + KEYS) // KEYS * KEYS",
    ),
    Mutant(
        TRITON,
        "prefill: the last query of a tile sees one key less",
        CHUNK,
        "end = past + tl.minimum(query + QUERIES, q_len)",
        "end = past + tl.minimum(query + QUERIES, q_len) - 1",
    ),
    Mutant(
        TRITON,
        "short: a split runs over its end",
        SHORT,
        "end = tl.minimum(start + tokens, past",
        "end = tl.minimum(start + tokens + 1, past",
    ),
    Mutant(
        TRITON,
        "short: the last keys belong to no split",
        SHORT,
        "span = past + tl.minimum(query + QUERIES, q_len)",
        "span = past",
    ),
    Mutant(
        TRITON,
        "short: with a window, splits begin at the first key",
        SHORT,
        "start = first_key(past + query, KEYS, WINDOW) + (piece - first) * tokens",
        "start = (piece - first) * tokens",
    ),
    Mutant(TRITON, "short: a query does not see itself", SHORT, "newest = past + i", "newest = past + i - 1"),
    Mutant(
        TRITON,
        "short: the queries of a tile share their parts",
        SHORT,
        "(piece.to(tl.int64) * QUERIES + r // HEADS)",
        "(piece.to(tl.int64) * QUERIES)",
    ),
    Mutant(
        TRITON,
        "short: splits merge by their maximum only",
        SHORT,
        "top + tl.log2(total)",
        "top",
    ),
    Mutant(TRITON, "long: the diagonal is hidden", LONG, "<= position[:, None]", "< position[:, None]"),
    Mutant(
        TRITON,
        "long: keys of the tile itself are not reached",
        LONG,
        "end = tl.where(exists, lowest + ROWS, 0)",
        "end = tl.where(exists, lowest, 0)",
    ),
    Mutant(
        TRITON,
        "long: a tile of keys that is not full is read",
        LONG,
        "ctx_len // KEYS * KEYS",
        "(ctx_len + KEYS - 1) // KEYS * KEYS",
    ),
    Mutant(
        TRITON,
        "long: the rest begins one query late",
        LONG,
        "starts + s, begin + queries",
        "starts + s, begin + queries + 1",
    ),
    Mutant(
        TRITON,
        "long: values of the next head",
        LONG,
        "pool.load([row + NUM_KV_HEADS * BLOCK_SIZE, 0])",
        "pool.load([row + BLOCK_SIZE, 0])",
    ),
    Mutant(
        TRITON,
        "long: every tile of keys has a block of its own",
        LONG,
        "table + token // BLOCK_SIZE",
        "table + token // KEYS",
    ),
)
