"""Packages for the interpreter of another program, in a folder for its PYTHONPATH.

Its own environment stays as it is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from lab.bench.common.client import Unreachable
from lab.foreign.common.processes import environment

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("aiohttp", "cffi", "cryptography", "lmdb", "orjson", "uvloop", "xxhash")
"""What connect/ imports, directly or not, of the packages in pyproject.toml: each has one module of its own name."""

INSTALL_S = 600.0


def copy_source(folder: Path) -> None:
    """The files of this checkout that a wheel is made of. pip would build in the checkout itself."""
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    for name in listed:
        if name and (ROOT / name).is_file() and not name.startswith("lab/results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def install_ours(python: Path, folder: Path) -> None:
    """Our package, built from this checkout by `python`, and those of its requirements that `python` lacks. What was
    in `folder` is gone. Raises Unreachable with pip's words."""
    shutil.rmtree(folder, ignore_errors=True)
    code = f"from importlib.util import find_spec; print(*[n for n in {NEEDED!r} if find_spec(n) is None])"
    lacking = _run([str(python), "-P", "-c", code]).split()
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    requirements = [one for one in listed if re.split(r"[<>=~! ]", one)[0] in lacking]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        copy_source(source)
        install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        _run([*install, str(source), *requirements])


def link_upstream(python: Path, folder: Path) -> None:
    """Upstream's package from the environment of `python`, without that environment's other packages. What was in
    `folder` is gone. Raises Unreachable."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    code = "import mooncake.store, pathlib; print(pathlib.Path(mooncake.store.__file__).parents[1])"
    packages = Path(_run([str(python), "-P", "-c", code]).strip())
    for name in (packages / "mooncake", *packages.glob("mooncake_transfer_engine*.libs")):
        (folder / name.name).symlink_to(name)


def _run(command: list[str], cwd: Path = Path("/")) -> str:
    """Raises Unreachable."""
    try:
        done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=INSTALL_S)
    except OSError as error:
        raise Unreachable(f"{command[0]} does not start: {error.strerror}") from None
    if done.returncode:
        raise Unreachable(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout
