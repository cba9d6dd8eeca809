"""scripts/deploy/: each file through its own linter where the machine has it, and its flags exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.flags import parse, rows

FOLDER = Path(__file__).resolve().parents[2] / "scripts/deploy"
OF_OTHERS = {"--nodes", "--ntasks-per-node", "--exclusive", "--time", "--signal", "--output", "--job-name", "--full"}
OF_OTHERS |= {
    "--kill-on-bad-exit",
    "--url",
    "--grace-s",
    "--no-install-recommends",
    "--create-home",
    "--rm",
    "--shm-size",
}
OF_OTHERS |= {"--from-literal", "--rm", "--shm-size"}
FILES = ("mooncake.service", "mooncake.sbatch", "mooncake.yaml", "Containerfile")


def linter(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_every_flag_exists(name):
    known = {flag for _, names, _, _ in rows() for flag in names.split(" / ")} | OF_OTHERS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", (FOLDER / name).read_text())) <= known


def test_the_units_flags_are_a_nodes():
    line = next(line for line in (FOLDER / "mooncake.service").read_text().splitlines() if "MOONCAKE_FLAGS=" in line)
    assert parse(line.partition("MOONCAKE_FLAGS=")[2].split()).role == "decode"


def test_systemd_takes_the_unit(tmp_path):
    """It wants the program to exist; that one line is changed."""
    tool = linter("systemd-analyze")
    text = re.sub(r"^ExecStart=\S+ \S+", "ExecStart=/bin/true", (FOLDER / "mooncake.service").read_text(), flags=re.M)
    unit = tmp_path / "mooncake.service"
    unit.write_text(text)
    done = subprocess.run([tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    wrong = [line for line in done.stderr.splitlines() if "mooncake.service" in line]
    assert wrong == []


def test_bash_reads_the_batch_file():
    run(linter("bash"), "-n", str(FOLDER / "mooncake.sbatch"))


def test_shellcheck_finds_nothing():
    run(linter("shellcheck"), str(FOLDER / "mooncake.sbatch"))


def test_kubeconform_takes_the_manifests():
    run(linter("kubeconform"), "-strict", str(FOLDER / "mooncake.yaml"))


def test_the_manifests_fit_together():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all((FOLDER / "mooncake.yaml").read_text())}
    pods = found["StatefulSet", "mooncake"]["spec"]
    headless = found["Service", pods["serviceName"]]["spec"]
    labels = pods["template"]["metadata"]["labels"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
    assert headless["selector"] == found["Service", "mooncake"]["spec"]["selector"] == labels
    assert pods["selector"]["matchLabels"] == labels
    (node,) = pods["template"]["spec"]["containers"]
    assert {(p["name"], p["containerPort"], p.get("protocol")) for p in node["ports"]} == {
        (p["name"], p["port"], p.get("protocol")) for p in headless["ports"]
    }
    assert ("ConfigMap", node["envFrom"][0]["configMapRef"]["name"]) in found
    (script,) = node["args"]
    run("bash", "-n", "-c", script)
    drain_s = 300 + 5  # of `mooncake.py drain`, and what it waits before
    assert pods["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s


def test_the_container_copies_what_exists():
    text = (FOLDER / "Containerfile").read_text()
    assert (FOLDER.parents[1] / "scripts/setup").exists() and "RUN scripts/setup" in text
    words = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}
    assert words[0] == "FROM" and set(words) <= known
