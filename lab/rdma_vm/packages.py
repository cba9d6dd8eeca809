"""The lab's Debian packages: installed tools, and a kernel that is only unpacked."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.rdma_vm.errors import LabError, NoVm

TOOLS = {
    "qemu-system-x86": "the emulator",
    "busybox-static": "the shell of the first second of the guest",
    "kmod": "depmod, for the modules of the unpacked kernel",
    "iproute2": "ip and rdma, in the guest",
    "libibverbs-dev": "the headers that net/verbs is compiled with",
    "ibverbs-providers": "the user-space driver of Soft-RoCE",
}

KERNEL_META = "linux-image-amd64"
"""Depends on the newest kernel with rdma_rxe and 9p; the cloud kernels have neither."""

NO_RECOMMENDS = ["-o", "APT::Install-Recommends=false", "-o", "DPkg::Lock::Timeout=120"]


def say(text: str) -> None:
    print(f"rxe-vm: {text}", flush=True)


def install_tools() -> None:
    """Install the missing packages. Raises NoVm if that is impossible."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoVm(f"the lab boots an x86-64 Debian kernel; this is {sys.platform} on {platform.machine()}")
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
        raise NoVm("the lab takes its kernel and QEMU from Debian packages; there is no apt-get here")
    missing = [name for name in TOOLS if not _installed(name)]
    if not missing:
        return
    wanted = " ".join(missing)
    if os.geteuid() != 0:
        raise NoVm(f"packages are missing and only root may install them: apt-get install {wanted}")
    say(f"installing {wanted} ...")
    _apt("update", "-qq")
    _apt("install", "-y", "-qq", *NO_RECOMMENDS, *missing)


def kernel_package() -> str:
    """The name of the newest kernel package, for example linux-image-6.1.0-56-amd64."""
    shown = subprocess.run(["apt-cache", "depends", KERNEL_META], capture_output=True, text=True, check=False).stdout
    for line in shown.splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise NoVm(f"apt-cache knows no {KERNEL_META}: run apt-get update, or use a Debian system")


def download(package: str, into: Path) -> Path:
    """The .deb of `package`, which is not installed."""
    say(f"downloading {package} (about 70 MB) ...")
    _run(["apt-get", "download", "-qq", package], "the download", cwd=into)
    found = sorted(into.glob(f"{package}_*.deb"))
    if not found:
        raise LabError(f"apt-get download {package} left no file")
    return found[-1]


def _installed(package: str) -> bool:
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True, check=False)
    return done.stdout.endswith("ok installed")


def _apt(*arguments: str) -> None:
    _run(["apt-get", *arguments], f"apt-get {arguments[0]}", env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})


def _run(command: Sequence[str], what: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoVm(f"{what} failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
