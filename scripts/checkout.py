"""Puts this checkout first on the path: before the standard library, which also has a module named `sched`.

Every command of this folder imports it first, so that it runs from any folder, installed or not. Nothing else in the
checkout edits `sys.path`, except mooncake.py, which is installed without this folder. A Python without the packages
of scripts/setup ends with one line instead of a traceback.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT))


def _name_setup(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A missing module in a Python that has no uvloop, which every installation has: it is the wrong Python."""
    if isinstance(error, ModuleNotFoundError) and find_spec("uvloop") is None:
        program = f"scripts/{Path(sys.argv[0]).name.split()[0]}"  # of "NAME COMMAND", too
        print(
            f"{program}: this Python lacks {error.name}: run scripts/setup, then .venv/bin/python {program}",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _name_setup
