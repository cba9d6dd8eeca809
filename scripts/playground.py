#!/usr/bin/env python3
"""Your own attention kernel, checked, timed and served: lab/playground/command.py."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.playground.command import main

if __name__ == "__main__":
    sys.exit(main())
