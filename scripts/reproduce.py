#!/usr/bin/env python3
"""Every ablation in one report: lab/ablations/reproduce.py."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.ablations.reproduce import main

if __name__ == "__main__":
    sys.exit(main())
