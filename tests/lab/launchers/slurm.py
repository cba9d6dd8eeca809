"""A Slurm of several hosts on this one: munged, slurmctld, and one slurmd for each host, on loopback addresses."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.lab.launchers.debian import PATH

CONF = """ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge/sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
KillWait=15
SchedulerParameters=sched_interval=2,batch_sched_delay=0
"""
HOST = "NodeName={name} NodeHostname={host} NodeAddr=127.0.1.{index} Port={port} CPUs=4 RealMemory=2000\n"


class Slurm:
    """Hosts n1, n2, ... with the addresses 127.0.1.1, 127.0.1.2, ...; a context manager. Needs root."""

    def __init__(self, hosts: int) -> None:
        self.hosts = [f"n{i + 1}" for i in range(hosts)]
        self.dir = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # munge's socket wants a short path
        self.env = os.environ | {"SLURM_CONF": str(self.dir / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            command, env=self.env | dict(env or {}), cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def submit(self, *arguments: str, env: Mapping[str, str], cwd: Path) -> str:
        """The id of the new job."""
        return self.run("sbatch", "--parsable", *arguments, env=env, cwd=cwd)

    def states(self, job: str) -> dict[str, str]:
        """Name of each task of the job, as 12_0, -> its state; ended tasks are missing."""
        listed = self.run("squeue", "-h", "-r", "-j", job, "-o", "%i %T") if self.known(job) else ""
        return dict(line.split() for line in listed.splitlines())

    def known(self, job: str) -> bool:
        asked = ["squeue", "-h", "-j", job]
        return subprocess.run(asked, env=self.env, capture_output=True, timeout=60, check=False).returncode == 0

    def host_of(self, task: str) -> str:
        return self.run("squeue", "-h", "-r", "-j", task, "-o", "%N")

    def lose(self, host: str) -> None:
        """Kill the slurmd of this host and all that it runs, as if the power failed. First those that would still tell
        the controller that a task has ended."""
        tasks = _with_variable("SLURMD_NODENAME", host, self.dir)
        steps = {pid for pid in map(_parent, tasks) if b"slurmstepd" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        assert tasks and steps, f"nothing runs on {host}"
        for pid in (int((self.dir / f"{host}.pid").read_text()), *steps, *tasks):
            _kill(pid)

    def revive(self, host: str) -> None:
        self.run("slurmd", "-N", host)

    # --- inside

    def _start(self) -> None:
        munge, host = self.dir / "munge", socket.gethostname().partition(".")[0]
        for name in ("state", *self.hosts):
            (self.dir / name).mkdir()
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        parts = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.run("munged", "--force", *(f"--{flag}={munge / name}" for flag, name in parts.items()))
        control, *ports = free_ports(len(self.hosts) + 1)
        text = CONF.format(host=host, control=control, dir=self.dir)
        for i, (name, port) in enumerate(zip(self.hosts, ports, strict=True)):
            text += HOST.format(name=name, host=host, index=i + 1, port=port)
        text += f"PartitionName=lab Nodes={','.join(self.hosts)} Default=YES MaxTime=INFINITE\n"
        (self.dir / "slurm.conf").write_text(text)
        self.run("slurmctld", "-c")
        for name in self.hosts:
            self.run("slurmd", "-N", name, "-c")
        deadline = time.monotonic() + 60
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D") != str(len(self.hosts)):
            assert time.monotonic() < deadline, self.run("sinfo") + self._logs()
            time.sleep(0.2)

    def _stop(self) -> None:
        """End the jobs, then the daemons; whatever still has our slurm.conf in its environment is killed."""
        quiet = {"env": self.env, "capture_output": True, "timeout": 60, "check": False}
        if (self.dir / "slurmctld.pid").exists():
            subprocess.run(["scancel", "-u", "root"], **quiet)
            deadline = time.monotonic() + 25
            while time.monotonic() < deadline and subprocess.run(["squeue", "-h"], **quiet).stdout:
                time.sleep(0.2)
            subprocess.run(["scontrol", "shutdown"], **quiet)
        if (self.dir / "munge/pid").exists():
            _kill(int((self.dir / "munge/pid").read_text()), signal.SIGTERM)
        time.sleep(0.5)
        for pid in _with_variable("SLURM_CONF", self.env["SLURM_CONF"], self.dir):
            _kill(pid)
        shutil.rmtree(self.dir, ignore_errors=True)

    def _logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.dir.glob("*.log"))


def _with_variable(name: str, value: str, folder: Path) -> list[int]:
    """Processes whose environment has this variable, and the path of our slurm.conf."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            try:
                variables = (place / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = {f"{name}={value}".encode(), f"SLURM_CONF={folder / 'slurm.conf'}".encode()}
            if ours <= set(variables):
                found.append(int(place.name))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _kill(pid: int, signum: int = signal.SIGKILL) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> Sequence[int]:
    """TCP ports that nobody has at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
