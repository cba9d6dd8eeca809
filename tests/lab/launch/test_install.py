"""The sdist and the wheel of this project: what the wheel puts into site-packages, and that its command and its client
work from anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from engine import __version__
from lab.foreign.common.packages import copy_source


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the wheel of this checkout in it, without the packages that it needs: the tests' Python has them.
    `python -m build` makes the sdist, and the wheel from the sdist, so the sdist holds what a wheel needs."""
    made = tmp_path_factory.mktemp("wheel")
    source, site = made / "source", made / "site"
    copy_source(source)
    run([sys.executable, "-m", "build", "--outdir", str(made), str(source)])
    (_,) = made.glob("*.tar.gz")
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
    assert tops == {"mooncake", "mooncake_client.py", "mooncake_rooms"}
    sources = {path.suffix for path in (site / "mooncake_rooms").rglob("*") if path.is_file()}
    assert {".py", ".c", ".cpp", ".h", ".html"} <= sources, "what is compiled or served travels along"


def test_the_command_runs_from_any_folder(site: Path):
    assert elsewhere(site, str(site / "bin" / "mooncake"), "--version") == f"mooncake {__version__}\n"


@pytest.mark.parametrize("order", ["cache, net, mooncake_client", "mooncake_client, cache, net"])
def test_the_client_shadows_nothing(site: Path, tmp_path: Path, order: str):
    """A program with a `cache` and a `net` of its own gets those, and the client ours, whichever comes first."""
    for name in ("cache", "net"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import {order}, sched\n"
    code += "from mooncake_client import Store\n"
    code += "print(cache.OWN, net.OWN, 'scheduler' in dir(sched), Store.__module__)\n"
    assert elsewhere(site, "-c", code) == "True True True mooncake_rooms.cache.store.client\n"


def test_upstreams_names_shadow_nothing(site: Path):
    """What runs in the process of another engine brings neither our engine nor torch, and leaves sys.path alone."""
    code = "import sys, time; before = list(sys.path); begun = time.perf_counter()\n"
    code += "import mooncake.store, mooncake.engine, mooncake.mooncake_config, sched\n"
    code += "print(f'imported in {time.perf_counter() - begun:.2f} s', file=sys.stderr)\n"
    code += "tops = {name.partition('.')[0] for name in sys.modules} & {'cache', 'connect', 'engine', 'net', 'torch'}\n"
    code += "print('scheduler' in dir(sched), sys.path == before, sorted(tops))\n"
    code += "print([name for name in sys.modules if name.startswith('mooncake_rooms.engine')])\n"
    assert elsewhere(site, "-c", code) == "True True []\n[]\n"


def test_the_installed_node_and_the_installed_client_work_together(site: Path, tmp_path: Path):
    """The wheel holds all that a store node needs: the rooms, the page, the C code that it compiles."""
    flags = ("--role", "store", "--model", "none", "--port", "0", "--dram-bytes", "64M")
    command = [sys.executable, "-P", str(site / "bin" / "mooncake"), *flags]
    environment = os.environ | {"PYTHONPATH": str(site)}
    with (tmp_path / "log").open("w") as log:
        node = subprocess.Popen(command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert node.stdout is not None
        line = node.stdout.readline()
        assert line, (tmp_path / "log").read_text()[-2000:]
        url = json.loads(line)["url"]
        with urlopen(f"{url}/", timeout=30) as page:
            assert b"<!doctype html>" in page.read().lower()
        code = f"from mooncake_client import Store\nwith Store({url.removeprefix('http://')!r}) as store:\n"
        code += "    store.put('objects/one', b'moon')\n    print(bytes(store.get('objects/one')))\n"
        assert elsewhere(site, "-c", code) == "b'moon'\n"
        code = "from mooncake.store import MooncakeDistributedStore\nstore = MooncakeDistributedStore()\n"
        code += f"print(store.setup('h', '', 0, 0, 'tcp', '', {url.removeprefix('http://')!r}), "
        code += "store.put('one', b'moon'), store.get('one'), store.close())\n"
        assert elsewhere(site, "-c", code) == "0 0 b'moon' 0\n"
        node.terminate()
        assert node.wait(60) == 0, (tmp_path / "log").read_text()[-2000:]
    finally:
        node.kill()
        node.communicate()


def test_vllm_finds_the_plugin(site: Path):
    """As vLLM loads it. A build of torch without accelerators then has a current device, and any other its own."""
    code = "from importlib.metadata import entry_points\n"
    code += "(found,) = entry_points(group='vllm.general_plugins', name='mooncake'); register = found.load()\n"
    code += "import torch; before = torch.accelerator.current_device_index; register(); register()\n"
    code += "alone = torch.accelerator.current_accelerator(check_available=False) is None\n"
    code += "print(torch.accelerator.current_device_index() == 0 if alone else\n"
    code += "      torch.accelerator.current_device_index is before)\n"
    assert elsewhere(site, "-c", code) == "True\n"
