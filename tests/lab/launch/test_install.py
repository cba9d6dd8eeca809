"""A wheel of this project: what it puts into site-packages, and that its command and its client work from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import __version__

ROOT = Path(__file__).resolve().parents[3]
TOPS = ("attention", "cache", "engine", "lab", "net", "sched", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the wheel of this checkout in it, without the packages that it needs: the tests' Python has
    them."""
    made = tmp_path_factory.mktemp("wheel")
    source, site = made / "source", made / "site"
    source.mkdir()
    for name in (*TOPS, "mooncake.py", "mooncake_client.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run([sys.executable, "-m", "build", "--wheel", "--outdir", str(made), str(source)])
    (wheel,) = made.glob("*.whl")
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)])
    return site


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def elsewhere(site: Path, *arguments: str) -> str:
    """What that Python says, started in another folder, with the wheel and without the checkout."""
    return run([sys.executable, "-P", *arguments], cwd="/", env=os.environ | {"PYTHONPATH": str(site)})


def test_it_installs_no_module_that_another_package_could_have(site: Path):
    tops = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} - {"bin", "__pycache__"}
    assert tops == {"mooncake.py", "mooncake_client.py", "mooncake_rooms"}
    sources = {path.suffix for path in (site / "mooncake_rooms").rglob("*") if path.is_file()}
    assert {".py", ".c", ".cpp", ".h", ".html"} <= sources, "what is compiled or served travels along"


def test_the_command_runs_from_any_folder(site: Path):
    assert elsewhere(site, str(site / "bin" / "mooncake"), "--version") == f"mooncake {__version__}\n"


def test_the_client_shadows_nothing(site: Path):
    code = "import mooncake_client, sched, sys; print(mooncake_client.Store.__module__, 'scheduler' in dir(sched))"
    assert elsewhere(site, "-c", code) == "cache.store.client True\n"
    code = "import sys, types; sys.modules['net'] = types.ModuleType('net'); import mooncake_client"
    with pytest.raises(AssertionError, match="import mooncake_client first"):
        elsewhere(site, "-c", code)
