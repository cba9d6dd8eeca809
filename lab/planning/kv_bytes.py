"""Bytes of KV by group, for published models or a Hugging Face directory: in the arena, in a transfer, in the pool.

  scripts/plan.py kv-bytes                                      # all published models
  scripts/plan.py kv-bytes Kimi-K2 Qwen3-Next-80B --prompts 8192,131072
  scripts/plan.py kv-bytes path/to/model --kv-type float16 --json kv-bytes.json
  scripts/plan.py kv-bytes gpt-oss-120b --no-pool-windows       # windows are computed again after a hit
  scripts/plan.py kv-bytes DeepSeek-V3 --mtp                    # with the layer that drafts

For a prompt of n tokens: the arena at its peak, while the prompt is computed in chunks; the arena afterwards, which is
also the transfer to a decode node; the pool; and the memory traffic of one decode step. `uniform` is the same for one
block of K and V per head of all tokens in all layers; the ratio is uniform / ours. A directory is read from its
config.json; a key that is not known and could change the geometry is refused by name.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from cache.block import type_bytes
from cache.groups import Group, PoolRule
from lab.bench.common.results import columns, write_result
from lab.flag_types import file_to_write, positive
from lab.geometry.architecture import Part
from lab.geometry.families import Types
from lab.geometry.find import find
from lab.geometry.published import PUBLISHED
from lab.geometry.read_config import parts_of
from lab.one_line import refuse
from lab.simulator.geometry_flags import add_pool_flags, pool_rule

PROMPTS = (2048, 8192, 32_768, 131_072)
METRICS = ("arena peak", "arena and transfer", "pool", "decode step")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rules:
    """How KV is cut and kept."""

    block_size: int
    chunk_tokens: int
    pool: PoolRule

    def figures(self, group: Group, tokens: int) -> list[int]:
        """Bytes of a prompt in one group, in the order of METRICS."""
        return [
            group.peak_bytes(tokens, self.block_size, self.chunk_tokens),
            group.held_bytes(tokens, self.block_size),
            group.pooled_bytes(tokens, self.block_size, self.pool),
            group.step_bytes(tokens),
        ]


@dataclass(frozen=True, slots=True)
class Line:
    """One group of a model, or all of them, for one prompt: bytes in the order of METRICS."""

    model: str
    tokens: int
    group: str
    ours: list[int]
    uniform: list[int]

    def rows(self) -> list[dict[str, Any]]:
        """For a result file."""
        case = f"{self.model}, {self.tokens:,} tokens, {self.group}"
        return [
            {"case": case, "metric": metric, "unit": "MiB", "ours": ours / MIB, "peers": {"uniform": uniform / MIB}}
            for metric, ours, uniform in zip(METRICS, self.ours, self.uniform, strict=True)
        ]


def lines(model: str, parts: Sequence[Part], prompts: Sequence[int], rules: Rules) -> list[Line]:
    """The groups of every prompt, each followed by their sum."""
    made = []
    for tokens in prompts:
        own = [
            Line(
                model, tokens, label(part.group), rules.figures(part.group, tokens), rules.figures(part.uniform, tokens)
            )
            for part in parts
        ]
        both = ([line.ours for line in own], [line.uniform for line in own])
        made += [*own, Line(model, tokens, "all", *([sum(of) for of in zip(*each, strict=True)] for each in both))]
    return made


def label(group: Group) -> str:
    """Kind, layers, and window."""
    seen = f" of {group.window:,}" if group.window else ""
    return f"{group.kind}{seen}, {group.layers} layers"


def told(group: Group) -> str:
    """The bytes of the group in one line."""
    each = (
        f"{group.token_bytes:,} bytes per token" if group.token_bytes else f"{group.checkpoint_bytes:,} bytes per state"
    )
    return f"{label(group)}: {each}"


def table(found: Sequence[Line]) -> str:
    head = ["tokens", "group"]
    for metric in METRICS:
        head += [f"{metric}, MiB", "uniform", "ratio"]
    shown = [head]
    for line in found:
        cells = [f"{line.tokens:,}", line.group]
        for ours, uniform in zip(line.ours, line.uniform, strict=True):
            cells += [f"{ours / MIB:,.1f}", f"{uniform / MIB:,.1f}", f"{uniform / ours:.1f}x" if ours else ""]
        shown.append(cells)
    return columns(shown, {1})


def numbers_of(text: str) -> tuple[int, ...]:
    """Positive numbers joined by commas. Raises ValueError."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise ValueError(text)
    return found


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    names = ", ".join(model.name for model in PUBLISHED)
    made.add_argument("models", nargs="*", metavar="MODEL", help=f"a directory with config.json, or one of {names}")
    made.add_argument("--prompts", type=numbers_of, default=PROMPTS, metavar="N,...", help="tokens of the prompts")
    made.add_argument("--block-size", type=positive, default=16, help="tokens of a block (default: 16)")
    made.add_argument("--chunk-tokens", type=positive, default=8192, help="of a prompt in one step (default: 8192)")
    made.add_argument("--kv-type", choices=tuple(type_bytes), default="bfloat16", help="of stored KV")
    made.add_argument("--state-type", choices=tuple(type_bytes), default="float32", help="of the matrices of states")
    made.add_argument(
        "--mtp", action="store_true", help="count the layer that drafts too, if the model has one that the engine runs"
    )
    add_pool_flags(made, 16, 256)
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures")
    return made


def show(name: str, source: str, parts: Sequence[Part], found: Sequence[Line]) -> None:
    print(f"{name} ({source})")
    for part in parts:
        print(f"  {told(part.group)}")
    print(table(found), end="\n\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.block_size < 1 or args.chunk_tokens < 1:
            raise ValueError("--block-size and --chunk-tokens must be at least 1")
        rules = Rules(args.block_size, args.chunk_tokens, pool_rule(args))
        models = [find(name) for name in args.models] or list(PUBLISHED)
        types = Types(args.kv_type, args.state_type, args.mtp)
        read = [(model, parts_of(model.config, types)) for model in models]
    except (OSError, ValueError) as error:
        refuse(Console(stderr=True), "kv-bytes", error)
        return 2
    rows: list[dict[str, Any]] = []
    for model, parts in read:
        found = lines(model.name, parts, args.prompts, rules)
        show(model.name, model.source, parts, found)
        rows += [row for line in found for row in line.rows()]
    if args.json:
        write_result(used(args, rules, read), rows, args.json)
    return 0


def used(args: Namespace, rules: Rules, read: Sequence[tuple[Any, Sequence[Part]]]) -> dict[str, Any]:
    """The configuration of a result file."""
    models = {model.name: {"source": model.source, "groups": [asdict(p.group) for p in parts]} for model, parts in read}
    types = {"kv_type": args.kv_type, "state_type": args.state_type, "mtp": args.mtp}
    return {"benchmark": "kv-bytes", "models": models, "prompts": args.prompts, **types, **asdict(rules)}
