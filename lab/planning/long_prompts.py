"""One long prompt on several nodes, by formula: time, bytes between nodes, and what short prompts wait for.

  scripts/plan.py long-prompts                                   # LLaMA3-70B on nodes of 8 A800
  scripts/plan.py long-prompts --prompts 131072 --nodes 1,2,4,8 --nic-gbit-s 100
  scripts/plan.py long-prompts --model llama3-8b-h200 --json long.json

Tensor and context parallel over nodes next to the chunked pipeline (docs/long-prompts.md), with the formulas of
lab/formulas/long_prompts.py. `node s`: seconds of all nodes together. `a step`: the longest step, for which a short
prompt on one of these nodes waits.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from lab.bench.common.results import columns, write_result
from lab.flag_types import above_zero, file_to_write
from lab.formulas.long_prompts import Estimate, estimates
from lab.planning.kv_bytes import numbers_of
from lab.simulator.models.step_models import LLAMA3_8B, LLAMA3_70B, PRESETS, with_bandwidth

SHAPES = {"llama3-70b-8xa800": LLAMA3_70B, "llama3-8b-h200": LLAMA3_8B}
PROMPTS = (8192, 32_768, 131_072, 1_048_576)
NODES = (1, 2, 4, 8)


def table(found: Sequence[tuple[int, Estimate]]) -> str:
    shown = [["tokens", "nodes", "way", "TTFT, s", "received, GB", "node s", "a step, s"]]
    for tokens, one in found:
        numbers = (one.ttft_s, one.received_bytes / 1e9, one.node_s, one.wait_s)
        shown.append([f"{tokens:,}", str(one.nodes), one.way, *(f"{number:,.3g}" for number in numbers)])
    return columns(shown, {2})


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", choices=tuple(SHAPES), default="llama3-70b-8xa800", help="default: %(default)s")
    parser.add_argument("--prompts", type=numbers_of, default=PROMPTS, help="tokens, joined by commas")
    parser.add_argument("--nodes", type=numbers_of, default=NODES, help="numbers of nodes, joined by commas")
    parser.add_argument("--nic-gbit-s", type=above_zero, help="bandwidth of a node's NICs; default: the model's")
    parser.add_argument("--json", type=file_to_write, metavar="PATH", help="also write the figures to PATH as JSON")
    args = parser.parse_args(argv)
    model = PRESETS[args.model]
    if args.nic_gbit_s is not None:
        model = with_bandwidth(model, args.nic_gbit_s)
    found = [
        (tokens, one)
        for tokens in args.prompts
        for nodes in args.nodes
        for one in estimates(model, SHAPES[args.model], tokens, nodes)
    ]
    print(table(found))
    if args.json is not None:
        rows = [
            {
                "case": f"{tokens:,} tokens, {one.nodes} nodes, {one.way}",
                "metric": metric,
                "unit": unit,
                "ours": value,
                "peers": {},
            }
            for tokens, one in found
            for metric, unit, value in (
                ("TTFT", "s", one.ttft_s),
                ("received", "bytes", one.received_bytes),
                ("node seconds", "s", one.node_s),
                ("longest step", "s", one.wait_s),
            )
        ]
        config = {"command": "long-prompts", "model": args.model, "nic_bytes_s": model.nic_bytes_s}
        write_result(config, rows, args.json)
    return 0
