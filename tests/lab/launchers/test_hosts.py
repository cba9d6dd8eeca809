"""scripts/up --hosts: what a hosts file says, and nodes over ssh on loopback addresses, real ones and fakes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import pytest

from engine.config.flags import UsageError, parse
from lab.launch.cluster import ROOT
from lab.launch.hosts import read_hosts
from lab.launch.up import made, read_arguments
from tests.complaints import complaints
from tests.e2e.conftest import tiny_model, wait_until
from tests.lab.conftest import FAKE
from tests.lab.launch.test_up import interruptible
from tests.lab.launchers.debian import need
from tests.lab.launchers.sshd import Sshd
from tests.lab.launchers.steady import SteadyClient, answer
from tests.lab.launchers.told import FIRST, NOTICED

__all__ = ["tiny_model"]

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
MAIN = "import sys; from lab.launch.up import main; sys.exit(main(sys.argv[2:], program=sys.argv[1].split('|')))"
NODE = (sys.executable, str(ROOT / "mooncake.py"))


def numbered(target: str) -> str:
    return f"10.0.0.{len(target)}"


def hosts(text: str, *flags: str, port: int = 8000) -> list[tuple[str, str, str, int]]:
    """(target, kind, address, port) of every line; the flags make a Config."""
    found = []
    for host in read_hosts(text, "f", flags, port, numbered):
        config = parse(host.flags)
        assert config.net == "lan"
        found.append((host.target, host.kind, config.host, config.port))
    return found


def test_a_line_is_a_node():
    text = "# all\n\nab prefill\nops@c decode+store --num-threads 4 # fast\nab mixed\nab store --port 9000\n"
    text += "x store --host ::1\n"
    assert hosts(text) == [
        ("ab", "prefill", "10.0.0.2", 8000),
        ("ops@c", "decode+store", "10.0.0.5", 8000),
        ("ab", "mixed", "10.0.0.2", 8001),
        ("ab", "store", "10.0.0.2", 9000),
        ("x", "store", "::1", 8000),
    ]
    assert [port for *_, port in hosts("a mixed\na store", port=0)] == [0, 0]


def test_ports_of_lines_are_left_out():
    """They were counted, so a node without one got that of another line."""
    text = "a prefill --port 8001\na decode\na store\na mixed --port=8003\na mixed\n"
    assert [port for *_, port in hosts(text)] == [8001, 8000, 8002, 8003, 8004]
    assert [port for *_, port in hosts("a mixed --port 9\nbc mixed --port 9")] == [9, 9], "of two hosts"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("a mixed --port 9\na store --port 9", "line 2: the node of another line listens on port 9 of 10.0.0.1, too"),
        ("a mixed\na mixed\na store", "--port 65534: 10.0.0.1 has too few ports from this one on"),
    ],
)
def test_ports_that_cannot_be(text, remedy):
    with pytest.raises(UsageError, match=re.escape(remedy)):
        hosts(text, port=65_534)


def test_a_name_of_a_loopback_address_is_refused_next_to_other_hosts():
    """Debian's /etc/hosts gives a host's own name 127.0.1.1: the others would look for its node on themselves."""
    where = {"me": "127.0.1.1", "b": "10.0.0.1", "c": "127.0.0.2"}
    for text in ("me prefill\nb decode", "me prefill\nb decode --host 10.0.0.7"):
        with pytest.raises(UsageError, match=r"line 1: 'me' is 127\.0\.1\.1 here, .* add --host ADDRESS"):
            read_hosts(text, "f", [], 8000, where.__getitem__)
    read_hosts("me prefill --host 10.0.0.9\nb decode", "f", [], 8000, where.__getitem__)
    read_hosts("me prefill\nc decode", "f", [], 8000, where.__getitem__)


def test_flags_of_a_line_come_after_those_of_all():
    (one, other) = read_hosts("a prefill\nb decode --block-size 64", "f", ["--block-size", "32"], 1, numbered)
    assert (parse(one.flags).block_size, parse(other.flags).block_size) == (32, 64)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "names no host"),
        ("a", "line 1: 'a' has no role; write HOST ROLE"),
        ("a prefill\nb --port 1", "line 2: 'b' has no role"),
        ("\na prefil", "line 2: 'prefil' is no role; did you mean prefill"),
        ("a prefill --blok-size 3", "did you mean --block-size"),
        ("a prefill --join b:1", "the nodes join each other"),
        ("a prefill --role=decode", "second word"),
        ("-oProxyCommand=x prefill", "no host"),
        ("a 'prefill", "line 1: No closing quotation"),
    ],
)
def test_a_wrong_line_is_named(text, remedy):
    with pytest.raises(UsageError, match=re.escape(remedy)) as error:
        read_hosts(text, "f", [], 8000, numbered)
    assert str(error.value).startswith("--hosts f")


def test_a_name_without_an_address_is_named():
    with pytest.raises(UsageError, match=r"'no\.such\.host\.invalid' has no IPv4 address .*: add --host ADDRESS"):
        read_hosts("no.such.host.invalid prefill", "f", [])


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--nodes", "mixed=1"], "--nodes is not for --hosts"),
        (["--ssd-path", "/x"], "--ssd-path is not for --hosts"),
    ],
)
def test_flags_that_exclude_each_other(argv, remedy):
    with pytest.raises(UsageError, match=remedy):
        read_arguments(["--hosts", "f", *argv])


@pytest.mark.parametrize("ssh", ["ssh 'a", "", "no-such-ssh -p 1"])
def test_a_wrong_ssh_is_named(tmp_path, ssh):
    (tmp_path / "hosts").write_text("127.0.0.2 mixed\n")
    options, flags, config = read_arguments(["--hosts", str(tmp_path / "hosts"), "--ssh", ssh])
    with pytest.raises(UsageError, match=f"--ssh '?\"?{ssh}"):
        made(options, flags, config, {})


# --- over ssh


@pytest.fixture(scope="module")
def sshd(tmp_path_factory) -> Iterator[Sshd]:
    need("sshd", "ssh", "ssh-keygen", packages=["openssh-server"])
    with Sshd(tmp_path_factory.mktemp("ssh"), ADDRESSES) as running:
        yield running


class Up:
    """scripts/up --hosts as a process; its output is read as it comes."""

    def __init__(self, sshd: Sshd, file: Path, program: Sequence[str], *flags: str) -> None:
        command = [sys.executable, "-c", MAIN, "|".join(program), "--hosts", str(file), "--ssh", sshd.ssh, *flags]
        env = os.environ | {"TMPDIR": str(file.parent), "COLUMNS": "160"}
        self.seen = ""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=interruptible, **pipes)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen += line

    def until(self, pattern: str, within_s: float = 100.0) -> re.Match[str]:
        deadline = time.monotonic() + within_s
        while (found := re.search(pattern, self.seen, re.MULTILINE)) is None:
            assert self._reader.is_alive() and time.monotonic() < deadline, f"no {pattern!r} in: {self.seen}"
            time.sleep(0.02)
        return found

    def end(self, signum: int = 0) -> int:
        """The exit code, after this signal."""
        if signum:
            self.process.send_signal(signum)
        code = self.process.wait(60)
        self._reader.join(60)
        return code


def running(mark: str) -> list[int]:
    """Python processes with this text on their command lines, the ssh of a launcher left out."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith((b"python", b"python3")) and any(mark.encode() in word for word in words[1:]):
                found.append(int(place.name))
    return found


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 20
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(mark)


def test_real_nodes_on_three_hosts(sshd, tiny_model, tmp_path, told):
    """They answer, their logs come here, one of them is lost, and a signal ends the others."""
    file, mark = tmp_path / "hosts", f"of-{tmp_path.name}"
    file.write_text("127.0.0.2 prefill\n127.0.0.3 decode --num-threads 1\n127.0.0.4 store\n")
    flags = [*tiny_model, "--served-model-name", mark, "--num-threads", "1", "--calibration-ms", "0"]
    begun = time.monotonic()
    up = Up(sshd, file, NODE, "--follow", "--port", "0", *flags)
    try:
        up.until("Ctrl-C stops all nodes")
        urls = dict(re.findall(r"^(\S+-\d) +\w+ +(http://127\.0\.0\.[234]:\d+) +127", up.seen, re.MULTILINE))
        assert set(urls) == {"prefill-0", "decode-0", "store-0"}
        expected = answer(urls["prefill-0"])
        told("ssh", FIRST, time.monotonic() - begun)
        up.until(r"^decode-0: .*\d")
        (victim,) = [pid for pid in running(mark) if b"store-0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        with SteadyClient(urls["prefill-0"]) as client:
            begun = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            lost = up.until(r"^127\.0\.0\.4: store-0 ended with exit code -?\d+; end of (.*):(?s:.*?)2 nodes go on$")
            told("ssh", NOTICED, time.monotonic() - begun)
            count = len(client.answers)
            wait_until(lambda: len(client.answers) > count + 1 or client.errors, "answers without the lost node")
        told.survived("ssh", len(client.answers), len(client.errors))
        assert client.errors == [] and set(client.answers) == {expected}
        assert up.end(signal.SIGTERM) == 0
        assert gone(mark)
        logs = "\n".join(path.read_text() for path in Path(lost[1]).parent.glob("*.log"))
        assert complaints(logs) == [] and logs.count("model") > 3
    finally:
        up.process.kill()
        assert gone(mark)


@pytest.fixture
def fakes(tmp_path) -> list[str]:
    """The command of a fake node on a host."""
    (tmp_path / "members").mkdir()
    return ["env", f"FAKE_MEMBERS={tmp_path / 'members'}", *FAKE]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_node_outlives_the_launcher(sshd, fakes, tmp_path, signum):
    """Not even if it is killed: the connections end, and that is a SIGTERM to the nodes."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.2 prefill\n127.0.0.3 store\n")
    up = Up(sshd, file, fakes, "--served-model-name", f"of-{tmp_path.name}")
    up.until("told with an API key only")
    up.until("Ctrl-C stops all nodes")
    assert len(running(f"of-{tmp_path.name}")) >= 2
    assert up.end(signum) == (0 if signum == signal.SIGINT else -signal.SIGKILL)
    assert gone(f"of-{tmp_path.name}")


def test_every_host_that_cannot_start_a_node_is_named(sshd, fakes, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("127.0.0.2 prefill\n127.0.0.9 decode\nnobody@127.0.0.3 store\n")
    up = Up(sshd, file, fakes)
    assert up.end() == 1
    assert "scripts/up: 2 of 3 hosts cannot start a node" in up.seen
    assert re.search(r"127\.0\.0\.9: .*Connection refused", up.seen)
    assert re.search(r"nobody@127\.0\.0\.3: .*Permission denied.*ssh-copy-id", up.seen)
    assert "127.0.0.2" not in up.seen and "Traceback" not in up.seen


def test_a_host_without_the_checkout_is_named(sshd, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("127.0.0.2 mixed\n")
    up = Up(sshd, file, [".venv/bin/python", "mooncake.py"], "--folder", str(tmp_path))
    assert up.end() == 1
    assert f"127.0.0.2: no .venv/bin/python in {tmp_path}: clone the repository there and run scripts/setup" in up.seen


def test_a_node_that_refuses_its_flags_is_reported_with_its_host(sshd, fakes, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("127.0.0.3 mixed\n")
    up = Up(sshd, file, fakes, "--model", "missing")
    assert up.end() == 1
    assert "scripts/up: 127.0.0.3: mixed-0 ended with exit code 2" in up.seen
    assert "no model named missing; give a directory" in up.seen


def test_a_question_needs_a_key(sshd, fakes, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("127.0.0.2 prefill\n127.0.0.3 decode\n")
    up = Up(sshd, file, fakes, "--ask", "Hello?")
    assert up.end() == 2 and "--api-key-file" in up.seen
    up = Up(sshd, file, fakes, "--ask", "Hello?", "--api-key", "secret")
    assert up.end() == 0, up.seen
    assert "You said: Hello?" in up.seen


# --- nodes that start and leave with the load


def test_scale_ssh_starts_a_node_on_the_host_of_its_number_and_ends_it(sshd, tmp_path):
    """Over a real ssh, with a node that sleeps."""
    node, file = tmp_path / "node", tmp_path / "hosts"
    node.write_text('#!/bin/sh\necho "$@"\nexec sleep 60\n')
    node.chmod(0o755)
    file.write_text(
        "# all\n127.0.0.2 prefill\n127.0.0.3 decode # slow\n127.0.0.4 decode --num-threads 1 --host 127.0.0.5\n"
    )
    env = os.environ | {"MOONCAKE_SSH": sshd.ssh, "MOONCAKE_RUN": str(tmp_path), "MOONCAKE_PYTHON": str(node)}

    def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "scripts/deploy/scale-ssh"), str(file), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    def pid_of(name: str) -> int:
        return int((tmp_path / f"{name}.pid").read_text())

    def ended(pid: int) -> bool:
        place = Path(f"/proc/{pid}/cmdline")
        return not place.exists() or not place.read_bytes()

    pids = []
    try:
        for number, address in ((0, "127.0.0.3"), (1, "127.0.0.5"), (2, "127.0.0.3")):
            name = f"scaled-decode-{number}"
            for _ in range(2):  # the second changes nothing
                done = scale("start", "decode", name, "127.0.0.2:8000", "--model", "a", "--num-threads", "3")
                assert done.returncode == 0, done.stderr + sshd.log()
                pids.append(pid_of(name))
            assert pids[-1] == pids[-2]
            wait_until((tmp_path / f"{name}.log").read_text, "its flags")
            config = parse((tmp_path / f"{name}.log").read_text().split()[1:])
            assert (config.role, config.node_id, config.join) == ("decode", name, "127.0.0.2:8000")
            assert (config.host, config.net, config.num_threads) == (address, "lan", 1 if number == 1 else 3)
        assert scale("stop", "decode", "scaled-decode-0", "127.0.0.2:8000").returncode == 0
        wait_until(lambda: ended(pids[0]), "the node has ended")
        assert not ended(pids[-1])
    finally:
        for pid in pids:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
    assert "no host with the role store" in scale("start", "store", "scaled-store-0", "h:1").stderr
    assert "no number" in scale("start", "decode", "mine", "h:1").stderr
    assert "neither start nor stop" in scale("dance", "decode", "n-0", "h:1").stderr
    assert "usage" in scale("start").stderr
