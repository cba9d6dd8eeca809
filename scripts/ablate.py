#!/usr/bin/env python3
"""One ablation, simulated or live: lab/ablations/command.py."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.ablations.command import main

if __name__ == "__main__":
    sys.exit(main())
