#!/usr/bin/env python3
"""Benchmarks: each prints ours next to a peer or a limit of the same run."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.bench import BENCHMARKS
from lab.commands import run

if __name__ == "__main__":
    sys.exit(run("scripts/bench.py", __doc__, BENCHMARKS))
