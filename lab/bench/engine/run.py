"""Runs the servers case by case: they alternate within every round, and all except one are paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from lab.bench.common.client import Client, Outcome, Server, Unreachable
from lab.bench.engine.cases import Case, Prompts, Samples
from lab.bench.engine.cells import Cell, Cells
from lab.foreign.common.processes import Process, Program

START_S = 300.0
TRIES = 3
"""Maximum tries of one case on one server; each failure restarts the server."""

SETTLE = 0
"""First part of the names of prompts that are sent after a pause and not measured; those of cases differ."""


class CaseFailed(Exception):
    """A request failed, or a server did not keep up."""


@dataclass(slots=True)
class Fleet:
    """The servers, started when they are first needed."""

    programs: Sequence[Program]
    run_dir: Path
    servers: dict[str, Server] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # name -> why it is not measured
    restarts: dict[str, list[str]] = field(default_factory=dict)  # name -> what failed before each restart
    _processes: dict[str, Process] = field(default_factory=dict)

    def start(self, names: Sequence[str], prompts: Prompts, say: Callable[[str], None]) -> None:
        """Start, warm up and pause each of `names`, one after the other. A server that fails is missing from then
        on."""
        for program in self.programs:
            if program.name not in names:
                continue
            say(f"starting {program.name}")
            self._start(program, prompts)

    def _start(self, program: Program, prompts: Prompts) -> None:
        process = self._processes[program.name] = Process(program, self.run_dir)
        self.missing.pop(program.name, None)
        try:
            server = self.servers[program.name] = process.wait_ready(START_S)
            asyncio.run(warm_up(program, server, prompts))
        except Unreachable as error:
            self.missing[program.name] = str(error)
        except TimeoutError:
            self.missing[program.name] = f"{program.name} did not answer a test request in {START_S:.0f} s"
        process.pause()

    def restart(self, program: Program, prompts: Prompts, why: str) -> None:
        """Start a new process for a server that failed a case, so that one failure affects no later case."""
        self.restarts.setdefault(program.name, []).append(why)
        self._processes[program.name].stop()
        self._start(program, prompts)

    def measure(self, program: Program, case: Case, prompts: Prompts, round_number: int) -> Cell:
        """Measure one case while only this server runs."""
        process, server = self._processes[program.name], self.servers[program.name]
        process.resume()
        try:
            samples = asyncio.run(run_case(program, server, case, prompts, round_number))
            return Cell(program.name, case.name, round_number, samples)
        except (CaseFailed, ValueError) as error:
            ended = " (the server has ended)" if process.ended() else ""
            return Cell(program.name, case.name, round_number, {}, f"{error}{ended}")
        finally:
            process.pause()

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()


async def warm_up(program: Program, server: Server, prompts: Prompts) -> None:
    """Sends a short and a long request, which must succeed; they build kernels and touch pools. Raises Unreachable."""
    async with new_session() as session:
        client = Client(session, server, program.backend, dict(program.body))
        for index, length in enumerate((64, 600)):
            await asyncio.wait_for(
                client.ask(prompts.spec(prompts.ids(length, SETTLE, index), 8), "test request"), START_S
            )


def new_session() -> aiohttp.ClientSession:
    """One connection for each request: a paused server loses its connections, and llama-server closes one after an
    answer without saying so."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def run_case(program: Program, server: Server, case: Case, prompts: Prompts, round_number: int) -> Samples:
    """Runs all waves of the case. Raises CaseFailed."""
    waves = case.waves(prompts, round_number)
    async with new_session() as session:
        client = Client(session, server, program.backend, dict(program.body))
        awake = Outcome()
        await client.send(prompts.spec(prompts.ids(32, SETTLE, 2 + round_number), 4), awake)
        measured = []
        for wave in waves:
            outcomes, _ = await client.run(wave, None, case.timeout_s, lambda: None)
            if wrong := [outcome.error for outcome in outcomes if outcome.error is not None]:
                raise CaseFailed(f"{len(wrong)} of {len(wave)} requests failed: {wrong[0]}")
            for spec, outcome in zip(wave, outcomes, strict=True):
                _check(case, spec.output_len, len(spec.token_ids), outcome)
            measured.append(outcomes)
    return case.samples(measured)


def _check(case: Case, output_len: int, prompt_len: int, outcome: Outcome) -> None:
    """Checks that every server computed the same number of tokens, and took none from a cache for a new prompt."""
    if outcome.prompt_tokens != prompt_len or outcome.output_tokens != output_len:
        read = f"{outcome.prompt_tokens} prompt and {outcome.output_tokens} output tokens"
        raise CaseFailed(f"the server counts {read} instead of {prompt_len} and {output_len}")
    if case.section != "prefix" and outcome.cached_tokens:
        raise CaseFailed(f"{outcome.cached_tokens} tokens of a new prompt came from a cache")


def run_all(
    fleet: Fleet, listed: Sequence[Case], rounds: int, prompts: Prompts, cells: Cells, on_cell: Callable[[str], None]
) -> None:
    """Measures every missing cell. The order of servers rotates from round to round."""
    for round_number in range(rounds):
        for case in listed:
            for program in fleet.programs[:: 1 if round_number % 2 == 0 else -1]:
                on_cell(f"round {round_number + 1}: {case.name}: {program.name}")
                known = cells.get(program.name, case.name, round_number) is not None
                if not known and program.name not in fleet.missing and not cells.failed(program.name, case.name):
                    cells.add(_tried(fleet, program, case, prompts, round_number))


def _tried(fleet: Fleet, program: Program, case: Case, prompts: Prompts, round_number: int) -> Cell:
    """The cell, after at most TRIES tries with a restart between them. A restart that fails is such a try, too."""
    cell = fleet.measure(program, case, prompts, round_number)
    for _ in range(TRIES - 1):
        if cell.error is None:
            break
        fleet.restart(program, prompts, f"{case.name}: {fleet.missing.get(program.name, cell.error)}")
        if program.name not in fleet.missing:
            cell = fleet.measure(program, case, prompts, round_number)
    return cell


def needed(fleet: Fleet, listed: Sequence[Case], rounds: int, cells: Cells) -> list[str]:
    """Servers with missing cells."""
    return [
        program.name
        for program in fleet.programs
        if any(
            cells.get(program.name, case.name, n) is None and not cells.failed(program.name, case.name)
            for case in listed
            for n in range(rounds)
        )
    ]
