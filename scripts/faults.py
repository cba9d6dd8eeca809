#!/usr/bin/env python3
"""Faults under load: what clients see, and what must hold afterwards."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.commands import run
from lab.faults import FAULTS

if __name__ == "__main__":
    sys.exit(run("scripts/faults.py", __doc__, FAULTS))
