"""What scripts/up --hosts says to an ssh, and what becomes of it on the host; the ssh is a stand-in that stays here."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.launch.cluster import Processes
from lab.launch.hosts import read_hosts
from lab.launch.remote import LOGIN_S, READY, START, HostsFailed, Remote, RemoteCluster

WORDS = ["a b", "it's", '"', "$HOME", "hey!you", "two\nlines", "é", "{a,b}", "~", "\\n", "%s"]
SHELLS = [shell for shell in ("sh", "bash", "dash", "tcsh", "fish", "zsh") if shutil.which(shell)]


def ssh(folder: Path, script: str) -> tuple[str, ...]:
    """An ssh whose last argument is the command, as for a real one."""
    program = folder / "ssh"
    program.write_text(f"#!/usr/bin/env bash\n{script}\n")
    program.chmod(0o755)
    return (str(program),)


def cluster(folder: Path, remote: Remote, text: str = "a mixed\n") -> RemoteCluster:
    return RemoteCluster(read_hosts(text, "f", [], 8000, lambda target: "10.0.0.1"), remote, run_dir=folder)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_reaches_the_host_whatever_the_login_shell_is(shell):
    script = f"{sys.executable} - <<'END'\nprint({WORDS!r})\nEND"
    line = Remote().command("h", script)[-1]
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, timeout=30)
    assert done.stdout == f"{WORDS!r}\n", done.stderr


def test_no_login_shell_finds_a_sign_of_its_own():
    """csh, which is not everywhere, takes neither two lines in quotes nor a '!'."""
    line = Remote().command("h", "".join(WORDS))[-1]
    assert line.isprintable() and "!" not in line and line.isascii() and line.count("'") == 4


def test_a_node_that_hears_no_sigterm_is_killed_some_time_after_the_connection_has_ended():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    script = START.format(folder="/", argv=f"{sys.executable} -c '{deaf}'", end_s=1)
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None and node.stdin is not None
        node.stdout.readline()
        node.stdin.close()
        try:
            assert node.wait(60) == -signal.SIGKILL
        finally:
            node.kill()


def test_an_ssh_that_leaves_a_connection_behind_is_not_waited_for(tmp_path):
    """ControlPersist of older releases keeps the pipes of the first login."""
    there = ssh(tmp_path, f"sleep 600 & echo $! >{tmp_path}/pid; echo '{READY}'")
    begun = time.monotonic()
    try:
        cluster(tmp_path, Remote(there))._check_hosts()
    finally:
        subprocess.run(["kill", (tmp_path / "pid").read_text().strip()], check=True)
    assert time.monotonic() - begun < 2 * LOGIN_S


def test_what_a_host_says_in_another_encoding_is_still_told(tmp_path):
    there = ssh(tmp_path, r"printf 'Zugang gesch\374tzt\n' >&2; echo Permission denied >&2; exit 255")
    with pytest.raises(HostsFailed, match=r"a: Zugang gesch.tzt Permission denied; .*ssh-copy-id"):
        cluster(tmp_path, Remote(there))._check_hosts()


def test_an_interrupted_login_waits_for_no_host(tmp_path):
    """SIGTERM, which unlike Ctrl-C reaches the launcher alone, while one host is slow."""
    there = ssh(tmp_path, f'case "$*" in *" b "*) echo $$ >{tmp_path}/pid; exec sleep 600 ;; esac; kill -TERM $PPID')
    code = (
        "import sys, pathlib; from lab.launch.up import main\n"
        "sys.exit(main(['--hosts', sys.argv[1], '--ssh', sys.argv[2]]))"
    )
    (tmp_path / "hosts").write_text("b mixed --host 127.0.0.2\na mixed --host 127.0.0.3\n")
    begun = time.monotonic()
    command = [sys.executable, "-c", code, str(tmp_path / "hosts"), there[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "") and "stopping" in done.stdout
    assert time.monotonic() - begun < 100
    pid = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else "0"
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_members_that_the_launcher_cannot_ask_are_in_the_message(tmp_path):
    """Hosts behind a jump host: the nodes are ready, and their HTTP is not for us."""
    remote = Remote(ssh(tmp_path, "exit 1"), processes=Processes(start_timeout_s=0.0))
    nodes = cluster(tmp_path, remote)
    node = nodes._spawn("mixed-0", "mixed", None)
    node.url, node.process = "http://127.0.0.1:9", Running()
    with pytest.raises(Exception, match=r"not in one cluster in time \(http://127\.0\.0\.1:9.* does not answer"):
        list(nodes._until(nodes.formed, 0.0, "in one cluster"))


class Running:
    """A process that runs."""

    pid = 0

    def poll(self) -> None:
        return None
