"""Programs of Debian's packages that the launchers' tests need: found, installed, or the reason of a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def missing(programs: Sequence[str]) -> list[str]:
    return [name for name in programs if shutil.which(name, path=PATH) is None]


def need(*programs: str, packages: Sequence[str]) -> None:
    """Skip the test if a program is missing."""
    if lacking := missing(programs):
        pytest.skip(f"{', '.join(lacking)} not found: apt-get install {' '.join(packages)}")


def install(*programs: str, packages: Sequence[str]) -> None:
    """Install the packages if a program is missing, or skip the test. Never under systemd: Debian starts the services
    of a package there."""
    lacking = ", ".join(missing(programs))
    if not lacking:
        return
    wanted = f"apt-get install {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None or Path("/run/systemd/system").exists():
        pytest.skip(f"{lacking} not found, and only root of a Debian without systemd installs it here: {wanted}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=env, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            pytest.skip(f"{lacking} not found, and {wanted} failed: {done.stderr.strip().splitlines()[-1:]}")
    need(*programs, packages=packages)
