"""Native code that is compiled at first use and kept in $XDG_CACHE_HOME/mooncake, or ~/.cache/mooncake.

The name of a file ends in a hash of everything that determines its content. A rename puts the complete file in place.
If several processes need the same file, one compiles it and the others wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

C_FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
"""Each product and each sum is rounded separately, as in the numpy references."""

TAIL_LINES = 15  # of a failing compiler's output, in the error

_starting = threading.Lock()
_running: list[subprocess.Popen[str]] = []
_abandoned = threading.Event()


class NotCompiled(RuntimeError):
    """The code cannot be compiled or loaded; the message says why: no compiler, its error, a missing CPU feature."""


class RefusedByCompiler(NotCompiled):
    """The compiler was there, and failed."""


def folder(kind: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mooncake" / kind


def path_of(kind: str, name: str, parts: Iterable[bytes], suffix: str = ".so") -> Path:
    """Where `kept` keeps its file, which may not exist."""
    key = hashlib.sha256()
    for part in parts:
        key.update(len(part).to_bytes(8, "little") + part)
    return folder(kind) / f"{name}-{key.hexdigest()[:20]}{suffix}"


def kept(kind: str, name: str, parts: Iterable[bytes], make: Callable[[Path], None], suffix: str = ".so") -> Path:
    """The path of the cached file; if it is missing, `make` writes it to the path it is given. `parts`: everything that
    determines the file's content. Raises NotCompiled."""
    path = path_of(kind, name, parts, suffix)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path.parent):
            if not path.exists():
                for left in path.parent.glob(f"{name}-*/"):  # by a process that was killed in its turn
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-") as scratch:
                    make(Path(scratch) / path.name)
                    (Path(scratch) / path.name).replace(path)
    except OSError as error:
        raise NotCompiled(f"cannot write {path.parent} ({error}); set XDG_CACHE_HOME") from error
    return path


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Admits one process at a time; the kernel releases the lock of a process that dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def c_compiler(packages: str = "gcc") -> str:
    """The path of the C compiler. Raises NotCompiled naming the Debian packages to install."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled(f"no C compiler on PATH (Debian: apt install {packages})")
    return compiler


def run(*commands: Sequence[str]) -> None:
    """Runs the commands concurrently. Raises NotCompiled with the end of the output of the first failing one."""
    piped = partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with _starting:
        if _abandoned.is_set():
            raise NotCompiled("this process is about to end")
        running = [piped(command) for command in commands]
        _running.extend(running)
    try:
        outputs = [process.communicate()[0] for process in running]
    except BaseException:
        _kill(running)
        raise
    finally:
        with _starting:
            for process in running:
                _running.remove(process)
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode and _abandoned.is_set():
            raise NotCompiled("this process is about to end")  # which has killed the compiler
        if process.returncode:
            tail = "\n".join(output.splitlines()[-TAIL_LINES:])
            raise RefusedByCompiler(f"compiling failed ({' '.join(command)}):\n{tail}")


def abandon() -> None:
    """End the compilers that run, and let no other begin: this process ends before it would need their code."""
    with _starting:
        _abandoned.set()
        _kill(_running)


def _kill(compilers: Sequence[subprocess.Popen[str]]) -> None:
    """With what they have started: g++ runs the real compiler as a child, and does not take it along when it ends.
    They stay in this process's group, so what kills the group kills them too."""
    for process in compilers:
        if process.poll() is None:
            for pid in [*_descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [each for child in children for each in (child, *_descendants(child))]


def library(source: Path, headers: Sequence[Path] = (), for_this_cpu: bool = False) -> ctypes.CDLL:
    """The C code of `source`, which includes `headers`; compiling it takes half a second. `for_this_cpu`: with all its
    instructions; signed integers then wrap around, too. Raises NotCompiled."""
    flags = [*C_FLAGS, *(("-march=native", "-fwrapv") if for_this_cpu else ())]

    def make(path: Path) -> None:
        run([c_compiler(), *flags, str(source), "-o", str(path)])

    decides = [source.read_bytes(), repr((C_FLAGS, os.uname().machine)).encode()]
    decides += [header.read_bytes() for header in headers]
    if for_this_cpu:
        decides.append(this_cpu())
    return opened(kept("cache", source.stem, decides, make))


def this_cpu() -> bytes:
    """What tells this kind of CPU from others: a cache may lie on a disk that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return b""
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})).encode()


def held(library: ctypes.CDLL) -> ctypes.CDLL:
    """The same code for calls of microseconds, which keep the interpreter lock: the thread that gives it up gets it
    back only when the one that took it waits for something, or after sys.getswitchinterval()."""
    return ctypes.PyDLL(library._name)


def opened(path: Path) -> ctypes.CDLL:
    """Raises NotCompiled."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiled(f"cannot load the compiled code: {error}") from error
