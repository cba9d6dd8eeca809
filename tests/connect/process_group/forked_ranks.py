"""A process that has imported torch and forks the ranks of one scenario at each order.

    python -m tests.connect.process_group.forked_ranks

An order is a line of JSON on stdin: {"scenario": NAME, "ranks": N, "joiners": [RANK, ...], "env": {...}}; the answer
is a line on stdout: a list of [exit code, text] per rank. The text is what the scenario returned, or its error. A rank
that has stopped itself goes on when the others have ended. Joiners run NAME_joiner, in processes that begin when the
first rank has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

DEADLINE_S = 60.0


def rank_process(scenario: str, rank: int, size: int, folder: Path, place: int) -> None:
    """Never returns."""
    from tests.connect.process_group import scenarios

    try:
        text = str(getattr(scenarios, scenario)(rank, size, folder))
        code = 0
    except BaseException:
        text, code = traceback.format_exc(), 1
    (folder / f"text{place}").write_text(text)
    os._exit(code)


def run(scenario: str, size: int, joiners: list[int], env: dict[str, str]) -> list[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        children: dict[int, int] = {}  # process id -> place in the answer

        def begin(name: str, rank: int, place: int) -> None:
            pid = os.fork()
            if not pid:
                os.environ.update(env)
                rank_process(name, rank, size, folder, place)
            children[pid] = place

        for rank in range(size):
            begin(scenario, rank, rank)
        codes, stopped, deadline = dict[int, int](), set[int](), time.monotonic() + DEADLINE_S
        while len(codes) < len(children):
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if not pid:
                if time.monotonic() > deadline:
                    for one, place in children.items():
                        if place not in codes:
                            os.kill(one, signal.SIGKILL)
                time.sleep(0.005)
                continue
            if os.WIFSTOPPED(status):
                stopped.add(pid)
            else:
                codes[children[pid]] = os.waitstatus_to_exitcode(status)
                if len(codes) == 1:
                    for place, rank in enumerate(joiners, size):
                        begin(f"{scenario}_joiner", rank, place)
            if stopped and len(codes) == len(children) - len(stopped):
                for one in stopped:
                    os.kill(one, signal.SIGCONT)
                stopped.clear()
        texts = [folder / f"text{place}" for place in range(len(children))]
        return [(codes[place], path.read_text() if path.exists() else "") for place, path in enumerate(texts)]


def main() -> None:
    import torch

    from tests.connect.process_group import scenarios  # noqa: F401  before the fork

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(order["scenario"], order["ranks"], order["joiners"], order["env"])), flush=True)


if __name__ == "__main__":
    main()
