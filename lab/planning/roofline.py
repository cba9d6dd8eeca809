"""When reuse and disaggregation pay, for a model on given hardware; and what this machine reaches.

  scripts/tools.py roofline                                   # the paper's nodes: LLaMA3-70B on 8 A800
  scripts/tools.py roofline --model llama3-8b-h200 --nic-gbit-s 100 --plot roofline.svg
  scripts/tools.py roofline --model-geometry Qwen3-Next-80B  # the groups of its KV, by formula
  scripts/tools.py roofline --model here                      # measure this machine, then the embedded model on it

Fetching a prefix pays if the network moves its KV faster than prefill computes it. `here` measures memory bandwidth,
bfloat16 products and a loopback TCP stream: the best of many tries in about three seconds.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.common.results import Row, numbers, write_result
from lab.flag_types import above_zero, file_to_write, not_negative, positive
from lab.formulas.roofs import Amortized, Measured, crossovers, least_bandwidth, measure, reuse_s
from lab.one_line import refuse
from lab.simulator.geometry_flags import add_geometry_flags, step_model
from lab.simulator.models.step_models import PRESETS, Geometry, Hardware, StepModel, roofline, with_bandwidth

EMBEDDED = Geometry(134.5e6, 30, 576, 3, 64)
PREFIXES = (512, 2048, 8192, 32_768, 131_072)
NAMES = {True: "apart", False: "mixed", None: "neither keeps the objective"}
ROOM = 4e9  # bytes for weights and KV on this machine


def here(measured: Measured) -> StepModel:
    """The embedded model with the measured limits, not with its measured step times."""
    hardware = Hardware(measured.flops, measured.memory_bytes_s, ROOM, measured.loopback_bytes_s)
    return roofline("here", EMBEDDED, hardware, 2048)


def shown(model: StepModel) -> Table:
    made = Table(title=f"{model.name}: a prefix computed, and fetched at {8 * model.nic_bytes_s / 1e9:.0f} Gbit/s")
    for name in ("tokens", "computed, s", "fetched, s", "fetching pays", "least Gbit/s"):
        made.add_column(name, justify="right")
    for prefix in PREFIXES:
        computed, fetched = reuse_s(model, prefix)
        gbit, pays = 8 * least_bandwidth(model, prefix) / 1e9, "yes" if fetched < computed else "no"
        made.add_row(str(prefix), f"{computed:.3g}", f"{fetched:.3g}", pays, f"{gbit:.3g}")
    return made


def draw(model: StepModel, path: Path) -> None:
    """Seconds over prefix length. Raises ImportError where matplotlib is missing (pip install -e .[lab])."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lengths = [2**i for i in range(7, 18)]
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.loglog(lengths, [reuse_s(model, n)[0] for n in lengths], marker="o", label="computed")
    axes.loglog(lengths, [reuse_s(model, n)[1] for n in lengths], marker="s", label="fetched")
    axes.set_xlabel("tokens of prefix")
    axes.set_ylabel("seconds")
    axes.set_title(f"{model.name}, {8 * model.nic_bytes_s / 1e9:.0f} Gbit/s", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--model", choices=(*PRESETS, "here"), default="llama3-70b-8xa800")
    add_geometry_flags(made)
    made.add_argument("--nic-gbit-s", type=not_negative, default=0.0, help="another NIC (default: the model's)")
    made.add_argument("--prompt", type=positive, default=8192, help="tokens, for the crossover (default: 8192)")
    made.add_argument("--tbt-s", type=above_zero, default=0.1, help="objective between tokens (default: 0.1)")
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures")
    made.add_argument("--plot", type=file_to_write, metavar="FILE", help=".svg or .png")
    args = made.parse_args(argv)
    try:
        measured = measure() if args.model == "here" and not args.model_geometry else None
        model = here(measured) if measured else step_model(args)
        if args.nic_gbit_s:
            model = with_bandwidth(model, args.nic_gbit_s)
    except (OSError, ValueError) as error:
        refuse(Console(stderr=True), "roofline", error)
        return 2
    if measured:
        print(
            f"this machine: memory {measured.memory_bytes_s / 1e9:.1f} GB/s, products {measured.flops / 1e9:.0f} "
            f"GFLOP/s, loopback {measured.loopback_bytes_s / 1e9:.2f} GB/s"
        )
    Console().print(shown(model))
    changes = crossovers(model, args.prompt, args.tbt_s)
    told = ", ".join(f"{NAMES[apart]} from {length} tokens" for length, apart in changes)
    print(
        f"prompts of {args.prompt} tokens, {1000 * args.tbt_s:g} ms between tokens; what takes less node time by the "
        f"answer's length, prefill and decode separate or mixed in steps: {told}"
    )
    if why := Amortized.of(model, args.prompt, args.tbt_s).about(changes):
        print(f"{why} (scripts/ablate.py answers asks the simulator; it bounds no step without decodes)")
    if args.json:
        rows: list[Row] = []
        for n in PREFIXES:
            computed_s, fetched_s = reuse_s(model, n)
            least = least_bandwidth(model, n)
            found = {"computed_s": computed_s, "fetched_s": fetched_s, "least_bytes_s": least}
            rows += numbers(f"prefix of {n} tokens", found)
        config = {"model": asdict(model), "measured": asdict(measured) if measured else None, "prompt": args.prompt}
        write_result(config | {"tbt_s": args.tbt_s, "crossovers": changes}, rows, args.json)
    if args.plot:
        draw(model, args.plot)
    return 0
