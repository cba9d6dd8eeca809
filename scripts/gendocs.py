#!/usr/bin/env python3
"""Writes the generated parts of the docs: lab/docs/command.py."""

import sys

import checkout  # noqa: F401  first: it puts the checkout on the path
from lab.docs.command import main

if __name__ == "__main__":
    sys.exit(main())
