"""Runs tests/rdma with real RDMA verbs on any x86-64 Debian machine, in an emulated machine with Soft-RoCE. It boots
a stock kernel with rdma_rxe under plain emulation, with this machine's files and this Python.

    scripts/tools.py rdma-vm                      tests/rdma, two minutes; the first run fetches about 100 MB
    scripts/tools.py rdma-vm tests/rdma -k rails  arguments go to pytest
    scripts/tools.py rdma-vm --script FILE        runs any bash script instead, as root of the guest

It shows that the verbs code is right, not how fast it is: under emulation a 16 MiB write moves at 0.2 GB/s. It cannot
show GPUDirect, on-demand paging, and the ordering of real hardware.

Exit code: pytest's (or the script's); 3 = the lab is not available here, with the reason; a run without a test fails.
"""

from __future__ import annotations

import argparse
import compileall
import shutil
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from lab.flag_types import above_zero, positive
from lab.rdma_vm import image, packages, vm
from lab.rdma_vm.errors import LabError, NoVm
from net import compiled
from net.transfer.rdma import build

UNAVAILABLE = 3
NO_TESTS = 5  # pytest's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, help="bash script to run in the guest instead of the tests")
    parser.add_argument(
        "--timeout",
        type=above_zero,
        default=1800,
        metavar="S",
        help="of one boot, many times what it needs on an idle machine (default 1800)",
    )
    parser.add_argument("--cores", type=positive, default=1, help="cores of the guest; 2 to find races (default 1)")
    parser.add_argument(
        "--memory", type=positive, default=3072, metavar="MIB", help="memory of the guest (default 3072)"
    )
    parser.add_argument("--cache", type=Path, default=image.cache_directory(), help="kernel folder (%(default)s)")
    parser.add_argument("--junit", type=Path, help="copy the junit results here")
    parser.add_argument("--prepare", action="store_true", help="only install and fetch the packages")
    options, arguments = parser.parse_known_args()
    try:
        packages.install_tools()
        boot_image = image.prepare(options.cache)
        build.module()  # here, where compiling takes a second, not under emulation
        compile_checkout()
        if options.prepare:
            return 0
        machine = vm.Machine(options.memory, options.cores)
        with tempfile.TemporaryDirectory() as out:
            return _run(options, with_tests(arguments), boot_image, machine, Path(out))
    except NoVm as reason:
        packages.say(f"skipped: {reason}")
        return UNAVAILABLE
    except (LabError, compiled.NotCompiled) as error:
        packages.say(f"failed: {error}")
        return 1


def compile_checkout() -> None:
    """Writes the bytecode of the checkout, which every process of the guest would otherwise compile in its memory."""
    for place in vm.ROOT.iterdir():
        if place.is_dir() and (place / "__init__.py").exists():
            compileall.compile_dir(place, quiet=2)
        elif place.suffix == ".py":
            compileall.compile_file(place, quiet=2)


def with_tests(arguments: list[str]) -> list[str]:
    """pytest's arguments; tests/rdma unless they name a file or folder of tests."""
    named = any(argument.startswith("tests") for argument in arguments)
    return arguments if named else ["tests/rdma", *arguments]


def _run(
    options: argparse.Namespace, arguments: list[str], boot_image: image.Image, machine: vm.Machine, out: Path
) -> int:
    (out / "arguments").write_text("".join(f"{argument}\n" for argument in arguments))
    script = options.script or vm.GUEST / "tests.sh"
    code: int = vm.boot(boot_image, script, out, machine, options.timeout)
    if options.script:
        return code
    results = out / "junit.xml"
    if not results.exists():
        raise LabError(f"pytest left no results in the guest (exit code {code})")
    if options.junit:
        shutil.copy(results, options.junit)
    counts = count(results)
    packages.say(", ".join(f"{number} {name}" for name, number in counts.items()))
    return code or (0 if counts["tests"] > counts["skipped"] else NO_TESTS)


def count(junit: Path) -> dict[str, int]:
    """tests, failures, errors and skipped of a junit file."""
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    found = [[int(suite.get(name, 0)) for name in names] for suite in suites]
    return dict(zip(names, map(sum, zip(*found, strict=True)), strict=True)) if found else dict.fromkeys(names, 0)


if __name__ == "__main__":
    sys.exit(main())
