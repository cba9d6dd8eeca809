"""One boot of the lab: QEMU's command line, the guest's exit code, its files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from lab.rdma_vm.errors import LabError
from lab.rdma_vm.image import Image, user_cache

GUEST = Path(__file__).resolve().parent / "guest"
ROOT = GUEST.parents[2]
BOOTED = "] ready"
EXIT_CODE = "VM-EXIT-CODE: "


@dataclass(frozen=True, slots=True)
class Machine:
    """Emulated, never KVM: in nested machines /dev/kvm may exist and hang. One core: a second one only adds cost on a
    host with two. Nehalem is the oldest CPU that numpy's wheels support."""

    memory_mib: int = 3072
    cores: int = 1
    cpu: str = "Nehalem"


def boot(image: Image, script: Path, out: Path, machine: Machine, timeout_s: float, quiet: bool = False) -> int:
    """Run `script` in a guest as root and return its exit code. `out` is /run/out there. Raises LabError."""
    for _ in range(2):  # on a busy machine the first boot may fail
        code, booted = _run(_command(image, script, out, machine), timeout_s, quiet)
        if code is not None:
            return code
        if booted:
            raise LabError(f"the guest ended without an exit code within {timeout_s:g} s (--timeout)")
    raise LabError("the guest did not boot in two tries")


def _command(image: Image, script: Path, out: Path, machine: Machine) -> list[str]:
    words = (
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on no_timer_check tsc=reliable",
        f"next={GUEST / 'init.sh'} run={script.resolve()} python={Path(sys.executable).parent} cache={user_cache()}",
    )
    if any(" " in str(path) for path in (GUEST, script.resolve(), Path(sys.executable))):
        raise LabError("paths travel on the kernel command line: the checkout and .venv may not have spaces in theirs")
    return [
        "qemu-system-x86_64",
        *("-M", "q35", "-accel", "tcg,thread=multi", "-cpu", machine.cpu),
        *("-smp", str(machine.cores), "-m", str(machine.memory_mib)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(image.vmlinux), "-initrd", str(image.initrd), "-append", " ".join(words)),
        *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=hostroot"),
        *("-fsdev", f"local,id=out,path={out.resolve()},security_model=none"),
        *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out"),
    ]


def _run(command: list[str], timeout_s: float, quiet: bool) -> tuple[int | None, bool]:
    """(the guest's exit code or None, whether it booted)."""
    code, booted = None, False
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ
    )
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            booted |= line.endswith(BOOTED)
            if line.startswith(EXIT_CODE):
                code = int(line.removeprefix(EXIT_CODE))
            elif not quiet:
                print(line, flush=True)
        process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    return code, booted
