"""scripts/deploy/: each file through its own linter, its flags are those of a node, its scripts do what they say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from engine.config.flags import parse, rows
from engine.experts.rank_command import flags as rank_flags

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts/deploy"
MANIFESTS = list(yaml.safe_load_all((FOLDER / "mooncake.yaml").read_text()))
KUBERNETES = ("1.30", "1.33")  # the oldest and a newer release whose schemas the manifests are held against
OF_OTHERS = {
    *("--nodes", "--ntasks", "--ntasks-per-node", "--exclusive", "--time", "--signal", "--output", "--job-name"),
    *("--array", "--requeue", "--no-kill", "--open-mode", "--kill-on-bad-exit"),  # Slurm's
    *("--url", "--grace-s", "--list", "--seeds", "--json", "--workers"),  # our other commands'
    *("--no-install-recommends", "--create-home", "--uid", "--rm", "--network", "--from-file"),
    *("--build-arg", "--format", "--interval", "--timeout", "--start-period", "--retries"),  # of images
    *("--nonblock", "--wait"),  # of flock
    *("--hosts", "--noheader", "--user", "--name", "--parsable", "--batch", "--state", "--states"),
}
FILES = (
    "mooncake.service",
    "mooncake.sbatch",
    "ablation.sbatch",
    "mooncake.yaml",
    "mooncake-groups.yaml",
    "Containerfile",
    "scale-local",
    "scale-slurm",
    "scale-ssh",
)


def linter(name: str) -> str:
    """From the environment of the tests (shellcheck and hadolint come as wheels), else from the machine."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
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


BATCH = ("scripts/deploy/mooncake.sbatch", "scripts/deploy/ablation.sbatch")
SCALE = tuple(f"scripts/deploy/scale-{how}" for how in ("local", "slurm", "ssh"))
SHELL = (*BATCH, *SCALE, "scripts/setup", "scripts/test", "scripts/up", ".ci/run")


@pytest.mark.parametrize("script", SHELL)
def test_shellcheck_finds_nothing(script):
    run(linter("shellcheck"), str(ROOT / script))


def test_hadolint_finds_nothing():
    run(linter("hadolint"), str(FOLDER / "Containerfile"))


@pytest.mark.parametrize("release", KUBERNETES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_the_manifests_fit_kubernetes_schemas(manifest, release):
    """With the schemas of kubernetes-validate; strict: a field that Kubernetes does not know is an error."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, release, strict=True)


def test_the_schemas_refuse_a_wrong_field():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, KUBERNETES[0], strict=True)


# --- Kubernetes


def of(kind: str, name: str) -> dict:
    (found,) = (one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def container() -> dict:
    (node,) = of("StatefulSet", "mooncake")["spec"]["template"]["spec"]["containers"]
    return node


def test_the_manifests_fit_together():
    pods = of("StatefulSet", "mooncake")["spec"]
    headless = of("Service", pods["serviceName"])["spec"]
    labels = pods["template"]["metadata"]["labels"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
    assert headless["selector"] == of("Service", "mooncake")["spec"]["selector"] == labels
    assert pods["selector"] == of("PodDisruptionBudget", "mooncake")["spec"]["selector"] == {"matchLabels": labels}
    node = container()
    assert {(p["name"], p["containerPort"], p.get("protocol")) for p in node["ports"]} == {
        (p["name"], p["port"], p.get("protocol")) for p in headless["ports"]
    }
    assert of("ConfigMap", node["envFrom"][0]["configMapRef"]["name"])
    assert {m["name"] for m in node["volumeMounts"]} == {v["name"] for v in pods["template"]["spec"]["volumes"]}
    drain_s = 300 + 30 + 5  # of `mooncake.py drain`: its deadline, its end, and what it waits before
    assert pods["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s


def pod_script(folder: Path, node: dict, **more: str) -> subprocess.Popen[str]:
    """The script of the container `node`, with stand-ins for what it calls: pods 10.1.0.5 to 7, of which $ANSWERS
    answers after $ANSWERS_AT tries. `folder`/slept has a line for each second that the script slept."""
    tools = stand_ins(
        folder,
        getent='printf "%s STREAM\\n" ${PODS-10.1.0.5 10.1.0.6 10.1.0.7}',
        curl='[ "$(cat "$SLEPT" 2>/dev/null | wc -l)" -ge "$ANSWERS_AT" ] || exit 7\n'
        'case "$*" in *" -f"*) exit 22 ;; *"//$ANSWERS:8000/health") exit 0 ;; *) exit 7 ;; esac',
        python='shift; printf "%s\\n" "$@"',
        sleep=f'echo 1 >>"$SLEPT"; exec {shutil.which("sleep")} 0.01',
    )
    env = tools | {"POD_IP": "10.1.0.5", "ANSWERS": "nobody", "ANSWERS_AT": "0", "SLEPT": str(folder / "slept")} | more
    return subprocess.Popen([*node["command"], *node["args"]], env=env, stdout=subprocess.PIPE, text=True)


def slept(folder: Path) -> int:
    path = folder / "slept"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("pod", "more", "join", "tries"),
    [
        (0, {"ANSWERS": "10.1.0.7"}, "10.1.0.7:8000", 0),
        (2, {"ANSWERS": "10.1.0.7"}, "10.1.0.7:8000", 0),
        (0, {"PODS": "10.1.0.5"}, None, 0),  # the first pod of a new cluster
        (0, {}, None, 9),  # all have restarted
        (0, {"PODS": ""}, None, 9),  # no names are resolved
        (0, {"ANSWERS": "10.1.0.6", "ANSWERS_AT": "5"}, "10.1.0.6:8000", 5),
        (1, {"ANSWERS": "10.1.0.6", "ANSWERS_AT": "25"}, "10.1.0.6:8000", 25),  # it never starts a cluster of its own
    ],
)
def test_a_pod_joins_whoever_answers_and_only_the_first_starts_a_cluster(tmp_path, pod, more, join, tries):
    """The flags that the script makes are a node's. A pod that loads its model answers 503, an error for `curl -f`."""
    more |= {"POD_NAME": f"mooncake-{pod}"} | of("ConfigMap", "mooncake")["data"]
    said, _ = pod_script(tmp_path, container(), **more).communicate(timeout=120)
    config = parse(said.split())
    assert (config.join, config.host, config.node_id) == (join, "10.1.0.5", f"mooncake-{pod}")
    assert slept(tmp_path) == tries
    keys = {f"{m['mountPath']}/" for m in container()["volumeMounts"] if m["name"] == "keys"}
    assert {f"{Path(str(path)).parent}/" for path in (config.api_key_file, config.cluster_key_file)} == keys


def test_a_pod_that_waits_for_the_first_one_can_be_stopped(tmp_path):
    """The shell is process 1 of the container, which a SIGTERM without a trap does not end."""
    script = pod_script(tmp_path, container(), POD_NAME="mooncake-1", MOONCAKE_MODEL="m")
    eventually(tmp_path / "slept", 3)
    script.terminate()
    assert (script.communicate(timeout=60)[0], script.returncode) == ("", 0)


def test_a_pod_that_stops_drains_itself(tmp_path):
    from engine.node.drain import flags

    tools = stand_ins(tmp_path, python='shift 2; printf "%s\\n" "$@"')
    command = container()["lifecycle"]["preStop"]["exec"]["command"]
    done = subprocess.run(command, env=tools | {"POD_IP": "10.1.0.5"}, capture_output=True, text=True, check=True)
    args = flags().parse_args(done.stdout.split())
    assert (args.url, str(args.api_key_file), args.grace_s) == ("10.1.0.5:8000", "/keys/api-keys", 5.0)


# --- Slurm: tests/lab/launchers runs the files under a real one; here are stand-ins for what they call

NODE = """trap 'echo drained "$SLURM_PROCID" >>"$LOG"; exit 0' TERM
shift; echo "$SLURM_PROCID" "$@" >>"$LOG"; while :; do sleep 0.02; done"""
SRUN = """while [[ $1 == --* ]]; do shift; done
for i in $(seq 0 $((SLURM_NTASKS - 1))); do SLURMD_NODENAME=n$i SLURM_PROCID=$i "$@" & pids="${pids:-} $!"; done
trap : TERM
while kill -0 $pids 2>/dev/null; do wait || true; done"""
CURL = """address=${!#}; address=${address#http://}; grep -q -e "--host ${address%:*} " "$LOG" 2>/dev/null"""


def slurm(tmp_path: Path, **more: str) -> dict[str, str]:
    """An environment as in a batch script, with stand-ins; the fake node's log is at $LOG."""
    root = tmp_path / "check out"
    (root / ".venv/bin").mkdir(parents=True)
    python = root / ".venv/bin/python"
    python.write_text(f"#!/usr/bin/env bash\n{NODE}\n")
    python.chmod(0o755)
    env = stand_ins(
        tmp_path,
        srun=SRUN,
        curl=CURL,
        scontrol='echo "   NodeAddr=192.168.7.$((5 + ${3#n})) NodeHostName=$3 Version=22.05"',
        hostname='echo 192.168.0.4 "10.1.0.$((5 + SLURM_PROCID))" fd00::5',
    )
    told = {"SLURM_SUBMIT_DIR": str(root), "SLURM_JOB_ID": "12", "LOG": str(tmp_path / "log"), "MODEL": "/models/llama"}
    return env | told | more


@pytest.mark.parametrize(("net", "hosts"), [("", "192.168.7"), ("10.1.", "10.1.0")])
def test_the_batch_file_starts_a_cluster_and_lets_it_drain(tmp_path, net, hosts):
    """Roles, addresses, the node that the others join; SIGTERM, which all nodes see before the job ends."""
    env = slurm(tmp_path, SLURM_NTASKS="3", MOONCAKE_NET=net, MOONCAKE_FLAGS="--rate-limit 5")
    job = subprocess.Popen(["bash", str(FOLDER / "mooncake.sbatch")], env=env, start_new_session=True)
    try:
        log = Path(env["LOG"])
        configs = {line.split()[0]: parse(line.split()[1:]) for line in eventually(log, 3)}
        assert [configs[i].role for i in "012"] == ["prefill", "decode", "store"]
        assert [configs[i].node_id for i in "012"] == ["prefill-0", "decode-1", "store-2"]
        assert configs["0"].join is None
        assert {configs[i].join for i in "12"} <= {f"{hosts}.{last}:8000" for last in (5, 6, 7)}
        assert [configs[i].host for i in "012"] == [f"{hosts}.5", f"{hosts}.6", f"{hosts}.7"]
        assert {(config.port, config.control_port, config.rate_limit) for config in configs.values()} == {
            (8000, 18000, 5.0)
        }
        os.killpg(job.pid, signal.SIGTERM)  # as Slurm does
        assert job.wait(20) == 0
        assert sorted(log.read_text().splitlines()[3:]) == ["drained 0", "drained 1", "drained 2"]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.mark.parametrize(
    ("rank", "roles", "role"),
    [
        (0, "", "prefill"),
        (1, "", "decode"),
        (3, "", "store"),
        (1, "mixed decode,store", "decode,store"),
        (2, "mixed store", "mixed"),
    ],
)
def test_an_array_has_roles_by_rank_and_joins_who_runs(tmp_path, rank, roles, role):
    """Also the first: it was requeued, and the others still run."""
    env = slurm(
        tmp_path, SLURM_NTASKS="1", SLURM_ARRAY_JOB_ID="11", SLURM_ARRAY_TASK_ID=str(rank), MOONCAKE_ROLES=roles
    )
    run = Path(env["SLURM_SUBMIT_DIR"]) / "mooncake-11"
    run.mkdir()
    (run / "8.address").write_text("10.9.9.8:8000\n")  # ended
    (run / "9.address").write_text("10.9.9.9:8000\n")
    Path(env["LOG"]).write_text("9 --host 10.9.9.9 \n")
    env |= {"SLURM_ARRAY_TASK_MAX": "3"}
    job = subprocess.Popen(["bash", str(FOLDER / "mooncake.sbatch")], env=env, start_new_session=True)
    try:
        config = parse(eventually(Path(env["LOG"]), 2)[1].split()[1:])
        assert (config.role, config.join) == (role, "10.9.9.9:8000")
        assert config.node_id == f"{role.replace(',', '+')}-{rank}"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize("others", [True, False])
def test_a_requeued_first_node_waits_for_the_others(tmp_path, others):
    """The others are slow to answer: a second cluster must not start. Without others it starts one in the end."""
    env = slurm(tmp_path, SLURM_NTASKS="1", SLURM_ARRAY_JOB_ID="11", SLURM_ARRAY_TASK_ID="0", SLURM_RESTART_COUNT="1")
    run, log = Path(env["SLURM_SUBMIT_DIR"]) / "mooncake-11", Path(env["LOG"])
    run.mkdir()
    (run / "9.address").write_text("10.9.9.9:8000\n")
    sleep = tmp_path / "tools/sleep"  # one second is too long for 60 tries
    sleep.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/slept\nexec {shutil.which("sleep")} 0.02\n')
    sleep.chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(FOLDER / "mooncake.sbatch")], env=env | {"SLURM_ARRAY_TASK_MAX": "3"}, start_new_session=True
    )
    try:
        eventually(tmp_path / "slept", 3)
        assert not log.exists(), "it has not started"
        if others:
            log.write_text("9 --host 10.9.9.9 \n")
        config = parse(eventually(log, 1 + others)[-1].split()[1:])
        assert config.join == ("10.9.9.9:8000" if others else None)
        tries = (tmp_path / "slept").read_text().split().count("1")
        assert tries < 59 if others else tries == 59
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def test_a_host_outside_the_network_is_named(tmp_path):
    env = slurm(tmp_path, SLURM_NTASKS="1", MOONCAKE_NET="10.9.")
    job = subprocess.run(["bash", str(FOLDER / "mooncake.sbatch")], env=env, capture_output=True, text=True, timeout=60)
    assert "mooncake: n0 has no address 10.9...." in job.stderr and not Path(env["LOG"]).exists()


def test_a_task_without_a_name_says_which_array_fits(tmp_path):
    env = os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "11"}
    command = ["bash", str(FOLDER / "ablation.sbatch"), "pool", "ratio", "--", "--seeds", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "--array=0-1" in done.stderr) == (2, True)


def eventually(log: Path, count: int) -> list[str]:
    deadline = time.monotonic() + 20
    while not log.exists() or log.read_text().count("\n") < count:
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "nothing started"
        time.sleep(0.02)
    return log.read_text().splitlines()


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in whose PATH these come first."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


# --- the container


def test_the_container_copies_what_exists():
    text = (FOLDER / "Containerfile").read_text()
    assert (ROOT / "scripts/setup").exists() and "RUN scripts/setup" in text
    words = [line.split()[0] for line in text.splitlines() if re.match(r"[A-Z]", line)]
    assert words[:2] == ["ARG", "FROM"] and words[-1] == "ENTRYPOINT"
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv"} <= set(left_out), "a .venv made elsewhere would be built again, and history is large"


# --- nodes that start and leave with the load


def scale_local(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With a node that sleeps."""
    node = run_dir / "node"
    node.write_text('#!/bin/sh\necho "$@"\nexec sleep 60\n')
    node.chmod(0o755)
    env = os.environ | {"MOONCAKE_RUN": str(run_dir), "MOONCAKE_PYTHON": str(node)}
    command = [str(FOLDER / "scale-local"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)


def test_scale_local_starts_a_name_once_and_ends_it(tmp_path):
    started = ("start", "prefill+decode", "scaled-0", "127.0.0.1:8000", "--model", "m")
    assert scale_local(tmp_path, *started).returncode == 0
    pid = int((tmp_path / "scaled-0.pid").read_text())
    try:
        assert scale_local(tmp_path, *started).returncode == 0
        assert int((tmp_path / "scaled-0.pid").read_text()) == pid, "it runs already"
        deadline = time.monotonic() + 20
        while not (said := (tmp_path / "scaled-0.log").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        config = parse(said.split()[1:])
        assert (config.role, config.node_id, config.join, config.port) == (
            "prefill,decode", "scaled-0", "127.0.0.1:8000", 0
        )  # fmt: skip
        assert scale_local(tmp_path, "stop", "prefill+decode", "scaled-0", "127.0.0.1:8000").returncode == 0
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    assert scale_local(tmp_path, "stop", "prefill+decode", "scaled-0", "127.0.0.1:8000").returncode == 0


def test_scale_local_starts_a_rank_with_experts(tmp_path):
    started = ("expert-rank", "n-rank-0", "127.0.0.1:9100")
    assert scale_local(tmp_path, "start", *started, "--model", "m").returncode == 0
    deadline = time.monotonic() + 20
    try:
        while not (said := (tmp_path / "n-rank-0.log").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        assert scale_local(tmp_path, "stop", *started).returncode == 0
    _, command, *words = said.split()
    args = rank_flags().parse_args(words)
    assert (command, args.name, args.join, args.model) == ("expert-rank", "n-rank-0", "127.0.0.1:9100", "m")


def test_scale_local_says_that_the_interpreter_is_missing(tmp_path):
    """In the background nobody heard of it, and the cluster waited for the node until --scale-start-ms."""
    env = os.environ | {"MOONCAKE_RUN": str(tmp_path), "MOONCAKE_PYTHON": str(tmp_path / "missing")}
    command = [str(FOLDER / "scale-local"), "start", "decode", "n-0", "h:1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"no {tmp_path}/missing: run scripts/setup" in done.stderr


def test_scale_local_signals_nobody_while_a_start_is_under_way(tmp_path):
    """The process id of an earlier node of that name may be that of another process now."""
    start = ["flock", str(tmp_path / "n-0.lock"), "sleep", "600"]
    with subprocess.Popen(start, start_new_session=True) as holder, subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            deadline = time.monotonic() + 60
            while subprocess.run(["flock", "-n", start[1], "true"], check=False).returncode == 0:
                assert time.monotonic() < deadline
            assert scale_local(tmp_path, "stop", "decode", "n-0", "h:1").returncode == 1, "it is tried again"
        finally:
            os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        (tmp_path / "n-0.pid").write_text(str(stranger.pid))
        try:
            assert scale_local(tmp_path, "start", "decode", "n-0", "h:1").returncode == 0
            assert int((tmp_path / "n-0.pid").read_text()) != stranger.pid
            assert scale_local(tmp_path, "stop", "decode", "n-0", "h:1").returncode == 0
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_cdpath_does_not_lead_a_script_elsewhere(tmp_path):
    """`cd` prints the folder then, and its line became a part of the path."""
    command = "cd scripts && MOONCAKE_PYTHON=echo deploy/scale-local start decode n-0 h:1"
    env = os.environ | {"MOONCAKE_RUN": str(tmp_path), "CDPATH": "."}
    run("env", *(f"{name}={env[name]}" for name in ("MOONCAKE_RUN", "CDPATH")), "bash", "-c", f"cd {ROOT}; {command}")
    assert eventually(tmp_path / "n-0.log", 1)[0].startswith(f"{ROOT}/mooncake.py --role decode")


def test_scale_local_refuses_what_it_does_not_know(tmp_path):
    assert "neither start nor stop" in scale_local(tmp_path, "dance", "decode", "n", "h:1").stderr
    assert "usage" in scale_local(tmp_path, "start").stderr


# Slurm by stand-ins: squeue lists the jobs that were submitted, and one that is COMPLETING if no --states leaves it
# out. One that is PENDING ends by a scancel without a signal.
SBATCH = 'echo "$@" >>"$LOG"; cat >"$JOB"; echo 7'
SQUEUE = """[ ! -e "$JOB" ] || echo 7
case $* in *--states*) ;; *) [ ! -e "$JOB.completing" ] || echo 6 ;; esac"""
SCANCEL = """echo cancelled "$@" >>"$LOG"
case $* in *--state=PENDING*) [ ! -e "$JOB.pending" ] || rm "$JOB" "$JOB.pending" ;; esac"""


def test_scale_slurm_submits_a_name_once_and_signals_its_job(tmp_path):
    log, job, pending = tmp_path / "log", tmp_path / "job", tmp_path / "job.pending"
    tools = stand_ins(
        tmp_path,
        sbatch=SBATCH,
        squeue=SQUEUE,
        scancel=SCANCEL,
        hostname='echo "10.2.0.9 10.1.0.5"',
        python='shift; printf "%s\\n" "$@"',
    )
    env = tools | {"LOG": str(log), "JOB": str(job), "MOONCAKE_PYTHON": "python", "MOONCAKE_NET": "10.1."}

    def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(FOLDER / "scale-slurm"), *arguments]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=20)

    started = ("start", "prefill+decode", "scaled-prefill+decode-0", "10.1.0.1:8000", "--model", "a b")
    (tmp_path / "job.completing").touch()
    assert scale("stop", *started[1:4]).returncode == 0 and not log.exists(), "nothing of this name runs"
    assert scale(*started).returncode == scale(*started).returncode == 0
    assert log.read_text().count("--job-name scaled-prefill+decode-0") == 1
    done = subprocess.run(["bash", str(job)], env=env, capture_output=True, text=True, timeout=20, check=True)
    config = parse(done.stdout.splitlines())
    assert (config.role, config.node_id, config.join) == ("prefill,decode", started[2], "10.1.0.1:8000")
    assert (config.host, config.port, config.net, config.model) == ("10.1.0.5", 0, "lan", "a b")
    job.write_text(job.read_text().replace("10\\\\.1", "10\\\\.7"))
    done = subprocess.run(["bash", str(job)], env=env, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and "has no address 10.1...." in done.stderr and not done.stdout
    rank = tmp_path / "rank"
    scale_rank = subprocess.run(
        [str(FOLDER / "scale-slurm"), "start", "expert-rank", "n-rank-0", "10.1.0.1:9100", "--model", "a b"],
        env=env | {"JOB": str(rank)}, cwd=tmp_path, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert scale_rank.returncode == 0, scale_rank.stderr
    done = subprocess.run(["bash", str(rank)], env=env, capture_output=True, text=True, timeout=20, check=True)
    command, *words = done.stdout.splitlines()
    args = rank_flags().parse_args(words)
    assert (command, args.name, args.join, args.model) == ("expert-rank", "n-rank-0", "10.1.0.1:9100", "a b")
    assert scale("stop", *started[1:4]).returncode == 0
    assert log.read_text().splitlines()[-1] == "cancelled --batch --signal=TERM 7"
    pending.touch()
    signals = log.read_text().count("--signal")
    assert scale("stop", *started[1:4]).returncode == 0
    cancelled = log.read_text().splitlines()[-1]
    assert f"--name {started[2]} --state=PENDING" in cancelled and "--signal" not in cancelled
    assert not job.exists() and log.read_text().count("--signal") == signals, "a job in the queue has ended"
    assert "neither start nor stop" in scale("dance", "decode", "n", "h:1").stderr
    assert "usage" in scale("start").stderr


@pytest.mark.parametrize(
    ("number", "target", "address"), [(0, "a", "10.1.0.1"), (1, "nowhere", "10.1.0.2"), (2, "last", "10.1.0.3")]
)
def test_scale_ssh_counts_every_line_and_looks_up_only_hosts_without_an_address(tmp_path, number, target, address):
    """Also the last line, which has no newline here."""
    done = scale_ssh(tmp_path, f"n-{number}")
    assert done.returncode == 0, done.stderr
    asked, *words = done.stdout.splitlines()
    config = parse(["--node-id", *words[2:3], *words[4:]])
    assert (asked, config.host, config.net, config.node_id) == (target, address, "lan", f"n-{number}")


def test_scale_ssh_reads_a_file_of_another_system(tmp_path):
    """Its lines end with a carriage return, as scripts/up takes them too."""
    done = scale_ssh(tmp_path, "n-3", more="\r\nc decode --host=10.1.0.9\r\n")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "--host=10.1.0.9", done.stderr


def test_scale_ssh_names_a_host_without_an_address(tmp_path):
    done = scale_ssh(tmp_path, "n-3", more="\nops@gone decode")
    assert done.returncode == 1 and "scale-ssh: gone has no IPv4 address: add --host ADDRESS" in done.stderr


def test_scale_ssh_starts_a_rank_with_the_flags_of_its_line(tmp_path):
    """On a host whose address nobody must know."""
    done = scale_ssh(tmp_path, "n-rank-0", more="\ngone expert-rank --num-threads 4", role="expert-rank")
    assert done.returncode == 0, done.stderr
    words = ["start", "expert-rank", "n-rank-0", "h:1", "--model", "m", "--num-threads", "4"]
    assert done.stdout.splitlines() == ["gone", *words]


def scale_ssh(folder: Path, name: str, more: str = "", role: str = "decode") -> subprocess.CompletedProcess[str]:
    """Starts a node with an ssh that runs its command here, and a resolver that knows two of the hosts."""
    hosts = folder / "hosts"
    hosts.write_text(f"a decode\nnowhere decode --host=10.1.0.2\nb prefill\nlast decode{more}")
    tools = stand_ins(
        folder,
        getent='case $2 in a) echo "10.1.0.1 STREAM" ;; last) echo "10.1.0.3 STREAM" ;; *) exit 2 ;; esac',
        ssh='echo "${@: -2:1}"; bash -c "${@: -1}"',
    )
    there = folder / "scripts/deploy/scale-local"
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    there.chmod(0o755)
    command = [str(FOLDER / "scale-ssh"), str(hosts), "start", role, name, "h:1", "--model", "m"]
    env = tools | {"MOONCAKE_FOLDER": str(folder)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
