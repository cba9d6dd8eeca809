#!/usr/bin/env python3
"""Plans: nodes, bytes of KV and limits by formula, and whether the simulator and real nodes agree."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.commands import run
from lab.planning import PLANS

if __name__ == "__main__":
    sys.exit(run("scripts/plan.py", __doc__, PLANS))
