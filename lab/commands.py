"""Tables of commands: `scripts/bench.py NAME ...` runs the command of that name; without a name it lists all of them.

A table maps the name of a command to the module whose `main()` runs it. The list shows the first line of each module's
docstring, read without importing the module: a list of twenty benchmarks must not import torch.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType


def first_line(module: str) -> str:
    """The first line of the docstring of `module`."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return (ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or "").partition("\n")[0]


def listing(program: str, about: str, table: Mapping[str, str]) -> str:
    width = max(map(len, table))
    lines = [f"  {name:{width}}  {first_line(module)}" for name, module in table.items()]
    return "\n".join([about.strip(), "", f"usage: {program} NAME [FLAGS]      {program} NAME --help", "", *lines])


def run(program: str, about: str, table: Mapping[str, str]) -> int:
    """Run the command that the command line names. Returns the command's exit code, or 2 for an unknown name."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "--list"):
        print(listing(program, about, table))
        return 0
    if name not in table:
        print(f"{program}: no command {name!r}; there are {', '.join(table)}", file=sys.stderr)
        return 2
    sys.argv = [f"{program} {name}", *rest]
    end_as_with_ctrl_c()
    return import_module(table[name]).main() or 0


def end_as_with_ctrl_c() -> None:
    """SIGTERM ends this process as Ctrl-C does: the nodes and programs that it started end with it.

    A process forked from this one keeps the signal's usual effect.
    """
    own = os.getpid()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            raise KeyboardInterrupt  # not by SIGINT, which a shell ignores for its background jobs
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, interrupt)
