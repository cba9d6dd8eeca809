"""Runs the checks of one client library with the interpreter of a virtual environment that has it.

python run.py MODULE URL MODEL calls every public function of MODULE.py and prints one JSON line for each: {"check",
"error"}; error is null if the check passed. It imports none of our modules but those of this folder.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module

from common import Server


def main(name: str, url: str, model: str) -> int:
    module, server, failed = import_module(name), Server(url, model), 0
    checks = [one for one in vars(module).values() if getattr(one, "__module__", None) == name]
    for check in checks:
        if check.__name__.startswith("_"):
            continue
        error = None
        try:
            check(server)
        except Exception:
            error = traceback.format_exc(limit=-2)
            failed += 1
        print(json.dumps({"check": check.__name__, "error": error}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
