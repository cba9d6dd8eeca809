"""Converts flags to a workload: the datasets of the serving benchmarks, named as in `vllm bench serve`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lab.bench.common.trace import trace_specs
from lab.bench.common.workload import Spec, TokenSource, prefix_repetition_specs, random_specs, with_arrivals
from lab.flag_types import above_zero, above_zero_or_inf, natural, positive, share, some_of_all
from lab.loads.trace import read_trace

INF = float("inf")


def add_dataset_flags(parser: ArgumentParser) -> None:
    """The flags that `build_specs` reads."""
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive, default=100, help="number of requests (default 100)")
    load.add_argument(
        "--request-rate", type=above_zero_or_inf, default=INF, help="requests/s; inf = all together; trace: as in it"
    )
    load.add_argument(
        "--burstiness", type=above_zero, default=1.0, help="gamma shape of the gaps; 1 = Poisson, smaller = bursts"
    )
    load.add_argument("--seed", type=natural, default=0, help="seed of prompts, lengths and arrivals")

    data = parser.add_argument_group("dataset")
    data.add_argument("--dataset-name", choices=("random", "prefix_repetition", "trace"), default="random")
    data.add_argument("--dataset-path", type=Path, help="trace: a Mooncake trace, .jsonl or .jsonl.xz")
    data.add_argument("--vocab-size", type=positive, default=32_000, help="token ids are drawn below this")
    data.add_argument("--random-input-len", type=positive, default=512, help="tokens after the shared prefix")
    data.add_argument("--random-output-len", type=positive, default=64, help="tokens")
    data.add_argument("--random-prefix-len", type=natural, default=0, help="tokens that all prompts share")
    data.add_argument("--random-range-ratio", type=share, default=0.0, help="lengths vary by this share, 0..1")
    data.add_argument("--prefix-repetition-prefix-len", type=positive, default=256, help="tokens")
    data.add_argument("--prefix-repetition-suffix-len", type=positive, default=64, help="tokens")
    data.add_argument("--prefix-repetition-num-prefixes", type=positive, default=10, help="different prefixes")
    data.add_argument("--prefix-repetition-output-len", type=positive, default=64, help="tokens")
    data.add_argument(
        "--time-scale", type=above_zero, default=1.0, help="trace: factor on timestamps; 0.5 = twice the rate"
    )
    data.add_argument(
        "--length-scale", type=some_of_all, default=1.0, help="trace: factor on lengths and block size, 0..1"
    )


def build_specs(args: Namespace) -> list[Spec]:
    """The whole workload with arrival times. Raises ValueError or OSError naming the flag or file."""
    source = TokenSource(args.seed, args.vocab_size)
    if args.dataset_name == "trace":
        if args.dataset_path is None:
            raise ValueError("--dataset-name trace needs --dataset-path FILE.jsonl[.xz]")
        specs = trace_specs(read_trace(args.dataset_path), source, args.num_prompts, args.time_scale, args.length_scale)
        if not specs:
            raise ValueError(f"{args.dataset_path} holds no requests")
        if args.request_rate == INF:
            return specs
    elif args.dataset_name == "random":
        lengths = (args.random_input_len, args.random_output_len, args.random_prefix_len)
        specs = random_specs(source, args.seed, args.num_prompts, *lengths, args.random_range_ratio)
    else:
        specs = prefix_repetition_specs(
            source,
            args.seed,
            args.num_prompts,
            args.prefix_repetition_prefix_len,
            args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes,
            args.prefix_repetition_output_len,
        )
    return with_arrivals(specs, args.seed, args.request_rate, args.burstiness)


def case_name(args: Namespace) -> str:
    """A short name of the workload for result rows."""
    rate = "" if args.request_rate == INF else f" @{args.request_rate:g}/s"
    if args.dataset_name == "trace":
        name = args.dataset_path.name.removesuffix(".xz").removesuffix(".jsonl")
        return f"{name} x{args.length_scale:g}{rate}"
    if args.dataset_name == "random":
        shared = f"{args.random_prefix_len}+" if args.random_prefix_len else ""
        return f"random {shared}{args.random_input_len}/{args.random_output_len}{rate}"
    lengths = f"{args.prefix_repetition_prefix_len}+{args.prefix_repetition_suffix_len}"
    return f"prefixes {args.prefix_repetition_num_prefixes}x {lengths}/{args.prefix_repetition_output_len}{rate}"
