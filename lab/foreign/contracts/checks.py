"""A list of checks that run one after the other and say how each ended.

The programs of this folder run in interpreters of other packages, so this file imports the standard library only.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence


def run_all(checks: Sequence[Callable[[], object]]) -> int:
    """Run all; prints a JSON line per check, [first line of its docstring, "" or what went wrong]; returns the number
    of failures."""
    failures = 0
    for check in checks:
        name = (check.__doc__ or check.__name__).strip().partition("\n")[0]
        wrong = ""
        try:
            check()
        except Exception as error:  # each failure is reported, and the next check still runs
            traceback.print_exc()
            wrong, failures = f"{type(error).__name__}: {error}"[:500], failures + 1
        print(json.dumps([name, wrong]), flush=True)
    return failures
