#!/usr/bin/env python3
"""A trace through the simulated cluster: lab/simulator/command.py."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
