"""An sshd of the test on loopback addresses, with keys of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.lab.launchers.debian import PATH
from tests.lab.launchers.slurm import free_ports

CONF = """Port {port}
HostKey {dir}/host
AuthorizedKeysFile {dir}/id.pub
PidFile {dir}/sshd.pid
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 50
"""


class Sshd:
    """A context manager. `ssh` is the command that logs in."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        (self.port,) = free_ports(1)
        self._dir, self._addresses = folder, addresses
        self._env = os.environ | {"PATH": PATH}

    @property
    def ssh(self) -> str:
        known = f"UserKnownHostsFile={self._dir / 'known'}"
        words = ["ssh", "-F", "none", "-p", str(self.port), "-i", str(self._dir / "id"), "-o", known]
        return shlex.join([*words, "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=accept-new"])

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "id"):
            self._do("ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(self._dir / key))
        listen = "".join(f"ListenAddress {address}\n" for address in self._addresses)
        (self._dir / "sshd.conf").write_text(listen + CONF.format(port=self.port, dir=self._dir))
        self._do("/usr/sbin/sshd", "-f", str(self._dir / "sshd.conf"), "-E", str(self._dir / "sshd.log"))
        deadline = time.monotonic() + 20
        while not (self._dir / "sshd.pid").exists():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(int((self._dir / "sshd.pid").read_text()), 15)

    def log(self) -> str:
        return (self._dir / "sshd.log").read_text()

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
