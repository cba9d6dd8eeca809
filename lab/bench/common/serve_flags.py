"""The flags of scripts/bench.py serve: servers, requests, report."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

import orjson

from lab.bench.common.datasets import add_dataset_flags
from lab.bench.common.latency import GOODPUT_METRICS, LATENCIES
from lab.bench.common.results import add_result_flags
from lab.flag_types import above_zero_or_inf, natural, not_negative, positive

OURS = "ours"
QUICK: dict[str, Any] = {
    "num_prompts": 16,
    "request_rate": 8.0,
    "random_input_len": 64,
    "random_output_len": 16,
    "length_scale": 1 / 64,
    "deadline_s": 45.0,
}
"""Defaults with --quick; given flags take precedence."""


def parse(argv: Sequence[str] | None, description: str) -> Namespace:
    """Flags with defaults filled in; exits with code 2 and one line on a wrong one."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    _add_server_flags(parser)
    add_dataset_flags(parser)
    _add_report_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if len({name for name, _ in args.peer}) < len(args.peer):
        parser.error("--peer: every peer needs a different name")
    args.rounds = args.rounds or (2 if args.peer and not args.quick else 1)
    args.goodput = dict(args.goodput)
    return args


def _add_server_flags(parser: ArgumentParser) -> None:
    server = parser.add_argument_group("servers")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="our server (default %(default)s)")
    server.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=URL", help="repeatable")
    server.add_argument("--model", help="as in /v1/models; default: the first one of each server")
    server.add_argument("--backend", choices=("openai", "openai-chat"), default="openai", help="openai: token ids")
    server.add_argument("--ignore-eos", action=BooleanOptionalAction, default=True, help="generate the full length")
    server.add_argument("--temperature", type=not_negative, default=0.0)
    server.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="fields for every request")
    server.add_argument("--max-concurrency", type=positive, help="requests in flight at most; others wait here")
    server.add_argument("--num-warmups", type=natural, default=0, help="in addition to the one test request")
    server.add_argument("--rounds", type=positive, help="parts that alternate between servers; 2 with peers, else 1")
    server.add_argument(
        "--deadline-s", type=above_zero_or_inf, default=float("inf"), help="for all runs together; then abort"
    )


def _add_report_flags(parser: ArgumentParser) -> None:
    shown = parser.add_argument_group("report")
    default = ",".join(LATENCIES)
    shown.add_argument("--percentile-metrics", type=_latencies, default=default, help=f"of {default}")
    shown.add_argument("--metric-percentiles", type=_percentiles, default="90,99", help="default 90,99")
    shown.add_argument("--goodput", type=_goodput, nargs="+", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el")
    shown.add_argument("--disable-tqdm", action="store_true", help="no progress bar on stderr")


def _peer(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or name == OURS or not url.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"expected NAME=URL with a name other than {OURS!r}, got {text!r}")
    return name, url


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOODPUT_METRICS or not limit.replace(".", "", 1).isdecimal():
        raise ArgumentTypeError(f"expected METRIC:MS with METRIC one of {', '.join(GOODPUT_METRICS)}, got {text!r}")
    return name, float(limit)


def _latencies(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in LATENCIES]:
        raise ArgumentTypeError(f"unknown {unknown[0]!r}; choose from {','.join(LATENCIES)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ArgumentTypeError(f"expected numbers in 0..100 joined by commas, got {text!r}")
    return values


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError("must be a JSON object")
    return value
