"""torch's library is loaded next to the imports, and its import is none the worse for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.start.torch_import import begin_library, load
from net.loop.leaving import leave
from tests.modules import ROOT


def printed(code: str) -> list[str]:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_library_is_there_before_the_import_which_works_as_ever():
    code = (
        "import sys\n"
        "from engine.start.torch_import import begin_engine, begin_library\n"
        "begin_library().join()\n"
        "print('libtorch_cpu.so' in open('/proc/self/maps').read(), 'torch' in sys.modules)\n"
        "thread = begin_engine()\n"
        "import torch\n"
        "print(torch.ones(3, 4).matmul(torch.ones(4, 2)).sum().item(), torch.get_num_threads() > 0)\n"
        "thread.join()\n"
        "print('engine.node.engine' in sys.modules, begin_library())\n"
    )
    assert printed(code) == ["True", "False", "24.0", "True", "True", "None"]


def test_a_library_that_cannot_be_loaded_is_left_to_the_import(tmp_path: Path):
    (tmp_path / "libtorch_cpu.so").write_text("no library")
    assert load(tmp_path) == [] and load(tmp_path / "nowhere") == []


def test_whoever_has_torch_loads_nothing():
    import torch  # noqa: F401

    assert begin_library() is None


def test_the_command_line_imports_no_node():
    """--help, wrong flags and the other commands answer before a node could be imported."""
    code = (
        "import contextlib, io, sys\n"
        "import mooncake\n"
        "with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "    code = mooncake.main(['--no-such-flag'])\n"
        "print(code, 'mooncake:' in said.getvalue(), *{'engine.node.node', 'torch', 'aiohttp'} & set(sys.modules))\n"
    )
    assert printed(code) == ["2", "True"]


def test_only_a_node_with_an_engine_begins_with_the_library():
    code = (
        "import mooncake\n"
        "from engine.start import serve\n"
        "mooncake.begin_library = lambda: print('library', end=' ')\n"
        "serve.run = lambda config, begun: print(config.role)\n"
        "for role in ('store', 'decode', 'prefill,store'):\n"
        "    mooncake.main(['--role', role])\n"
    )
    assert printed(code) == ["store", "library", "decode", "library", "prefill,store"]


@pytest.mark.parametrize("code", [0, 2])
def test_a_process_without_an_import_in_progress_ends_as_ever(code):
    with pytest.raises(SystemExit) as ended:
        leave(code)
    assert ended.value.code == code


def test_a_refusal_does_not_wait_for_an_import():
    """Here the import never ends, so a process that waits for it never ends either."""
    code = (
        "import sys\n"
        "from threading import Event\n"
        "import mooncake\n"
        "from engine.start import torch_import\n"
        "torch_import._import_engine = Event().wait\n"
        "sys.argv = ['mooncake', '--max-model-len', '10000000']\n"
        "print('before')\n"
        "mooncake.command()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "before\n")
    assert "--max-model-len 10000000 exceeds" in done.stderr
