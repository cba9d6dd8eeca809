"""podman without systemd and cgroups: an image of the checkout on a base that debootstrap makes, and containers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.lab.launchers.debian import PATH

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = "python3,python3-venv,g++,curl,ca-certificates"
BASE = """FROM scratch
ADD base.tar /
CMD ["/bin/sh"]
"""
OWN_CGROUPS = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; echo there; exec sleep infinity"
PIP_ARGUMENTS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "TORCH_INDEX_URL")
"""The build arguments of scripts/deploy/Containerfile that follow this machine's environment."""


class Mounts:
    """A mount namespace in which podman finds one hierarchy of cgroups; as a context manager."""

    def __enter__(self) -> Self:
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", OWN_CGROUPS]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "there"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, *command: str, timeout_s: float = 60, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        inside = ["nsenter", "-t", str(self._process.pid), "-m", f"--wd={cwd}", *command]
        env = os.environ | {"PATH": PATH}
        return subprocess.run(inside, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


class Podman:
    """podman with storage of its own in `folder`, as root or as an ordinary user."""

    def __init__(self, mounts: Mounts, folder: Path, user: str = "") -> None:
        self._mounts, self._folder = mounts, folder
        storage = ["--root", f"{folder}/s", "--runroot", f"{folder}/run", "--storage-driver", "overlay"]
        self._storage = storage
        own = ["--cgroup-manager", "cgroupfs", "--runtime", "crun", "--events-backend", "none"]
        self._podman = ["podman", *storage, *own]
        if user:
            runtime = folder / "xdg"
            runtime.mkdir(mode=0o700)
            for path in (folder, runtime):
                os.chown(path, *_ids(user))
            self._podman = [
                "runuser",
                "-u",
                user,
                "--",
                "env",
                f"XDG_RUNTIME_DIR={runtime}",
                f"TMPDIR={folder}",
                *self._podman,
            ]

    def build(self, name: str, file: Path, context: Path, arguments: Sequence[str] = ()) -> None:
        """An image; in the network of this machine, as root."""
        options = ["--isolation", "chroot", "--format", "docker", "-t", name, "-f", str(file), *arguments]
        done = self._mounts.run("buildah", *self._storage, "bud", *options, str(context), timeout_s=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def __call__(self, *words: str, timeout_s: float = 60) -> str:
        """What the command printed, without podman's complaints about the missing systemd; the command succeeds."""
        done = self.tried(*words, timeout_s=timeout_s)
        assert done.returncode == 0, f"podman {' '.join(words)}: {done.stderr[-2000:]}"
        return done.stdout

    def tried(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return self._mounts.run(*self._podman, *words, timeout_s=timeout_s, cwd=self._folder)


def make_base(podman: Podman, folder: Path, name: str) -> None:
    """An image of Debian with Python and a compiler, from the mirror that this machine's apt uses."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    listed = "\n".join(path.read_text() for path in sources if path.is_file())
    found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+)", listed, re.MULTILINE)
    assert found is not None, "apt has no mirror"
    tree = folder / "tree"
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    _run("debootstrap", *options, "bookworm", str(tree), found[1], timeout_s=600)
    _run("tar", "-C", str(tree), "--numeric-owner", "-cf", str(folder / "base.tar"), ".", timeout_s=120)
    _run("rm", "-rf", str(tree), timeout_s=120)
    (folder / "Base").write_text(BASE)
    podman.build(name, folder / "Base", folder)


def pip_arguments() -> list[str]:
    """Build arguments and volumes by which pip inside finds what it finds here."""
    values = {name: os.environ[name] for name in PIP_ARGUMENTS if name in os.environ}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    paths = {Path("/etc/pip.conf"), Path("/etc/xdg/pip")}
    for index, path in re.findall(r"(file://)?(/[^\s']+)", listed + " ".join(values.values())):
        paths.add(Path(path).parent if index else Path(path))
    there = sorted(path for path in paths if path.exists())
    words = [f"--build-arg={name}={value}" for name, value in values.items()]
    return [*words, *(f"--volume={path}:{path}:ro" for path in there)]


def _ids(user: str) -> tuple[int, int]:
    import pwd

    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid


def _run(*command: str, timeout_s: float) -> None:
    done = subprocess.run(
        command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
