#!/usr/bin/env python3
"""Checks, converters and formulas of the lab."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.commands import run
from lab.tools import TOOLS

if __name__ == "__main__":
    sys.exit(run("scripts/tools.py", __doc__, TOOLS))
