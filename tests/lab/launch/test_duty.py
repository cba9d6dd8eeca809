"""A duty cycle on processes: the share of the time they run, and that they always go on at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.launch import duty as cycle
from lab.launch.duty import slowed

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def spinner() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield process
        finally:
            process.kill()


def state(pid: int) -> str:
    """T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def duties(pid: int) -> list[int]:
    """Processes that run a duty cycle for children of this process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if "duty.py" in Path(f"/proc/{one}/cmdline").read_text()]


def until(condition, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.001)


class FakeClock:
    """Time passes while the duty cycle waits for its pipe; it wakes some seconds late, each in turn."""

    def __init__(self, late_s: list[float], end_s: float) -> None:
        self.now, self._late_s, self._end_s = 0.0, [*late_s], end_s
        self.states: list[tuple[float, signal.Signals]] = []

    def monotonic(self) -> float:
        return self.now

    def closed(self, pipe: int, wait_s: float) -> bool:
        late_s = self._late_s.pop(0)
        self._late_s.append(late_s)
        self.now += max(0.0, wait_s) + late_s
        return self.now >= self._end_s

    def send(self, handle: int, number: signal.Signals) -> None:
        self.states.append((self.now, number))

    def stops_s(self) -> list[float]:
        times = [at for at, _ in self.states]
        return [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]


@pytest.mark.parametrize(
    ("late_s", "ran"),
    [
        ([0.0], 0.3),
        ([0.004, 0.0], 0.3),
        ([0.012, 0.0], 0.3),
        ([0.0, 0.004], 0.3),
        ([0.0, 0.03, *[0.0] * 10], 0.3),
        ([0.1, 0.0], 0.103 / 0.143),
    ],
    ids=["in time", "late to stop", "later", "late to go on", "later, now and then", "too late to make up for"],
)
def test_a_stop_makes_up_for_a_late_start_up_to_its_longest(monkeypatch, late_s, ran):
    clock = FakeClock(late_s, end_s=10.0)
    monkeypatch.setattr(cycle, "time", clock)
    monkeypatch.setattr(cycle, "_closed", clock.closed)
    monkeypatch.setattr(cycle, "_send", clock.send)
    assert cycle.alternate([0], 0.3, 0.01, 0) == pytest.approx(ran, abs=0.01)
    signals = [number for _, number in clock.states]
    assert len(signals) > 50 and signals == [signal.SIGSTOP, signal.SIGCONT] * (len(signals) // 2)
    assert max(clock.stops_s()) <= cycle.LONGEST_STOPS * 0.01 + max(late_s) + 1e-9


def test_a_process_runs_in_turns_and_goes_on_afterwards(spinner):
    with slowed([spinner.pid], 0.3) as found:
        for _ in range(5):
            until(lambda: state(spinner.pid) == "T", "stopped")
            until(lambda: state(spinner.pid) != "T", "continued")
    assert state(spinner.pid) != "T" and duties(os.getpid()) == []
    assert 0 < found.ran < 1
    assert spinner.poll() is None


def test_the_end_of_a_slow_process_ends_nothing_else(spinner):
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    with slowed([spinner.pid, other.pid], 0.5):
        other.kill()
        other.wait()
        until(lambda: state(spinner.pid) == "T", "stopped")
        until(lambda: state(spinner.pid) != "T", "continued")
    assert state(spinner.pid) != "T"


def test_processes_go_on_when_the_duty_cycle_is_killed_and_the_caller_hears_of_it(spinner):
    with pytest.raises(ChildProcessError, match="-9"), slowed([spinner.pid], 0.05):
        until(lambda: state(spinner.pid) == "T", "stopped")
        (duty,) = duties(os.getpid())
        os.kill(duty, signal.SIGKILL)
        time.sleep(0.05)
    assert state(spinner.pid) != "T"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_go_on_when_the_owner_is_killed(spinner, number):
    """Not even SIGKILL to the owner leaves a process stopped: its pipe closes."""
    owner = f"""
        import time
        from lab.launch.duty import slowed
        with slowed([{spinner.pid}], 0.05):
            print("slow", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(owner)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"slow\n"
        until(lambda: state(spinner.pid) == "T", "stopped")
        (duty,) = duties(process.pid)
        process.send_signal(number)
    until(lambda: not Path(f"/proc/{duty}").exists() or state(duty) == "Z", "the duty cycle has ended")
    assert state(spinner.pid) != "T"


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_a_share_lies_between_nothing_and_everything(share):
    with pytest.raises(ValueError, match="between 0 and 1"), slowed([os.getpid()], share):
        pass
