"""The parts of the RDMA lab that need no kernel: archives, module order, results, and why it cannot run."""

import struct
import subprocess
import sys
import zlib

import pytest

from lab.rdma_vm import command as rxe_vm
from lab.rdma_vm import (
    image,
    packages,
)
from lab.rdma_vm.errors import LabError, NoVm


def test_the_archive_is_one_that_cpio_tools_would_read():
    files = {"bin": (0o040755, b""), "bin/tool": (0o100755, b"abc"), "empty": (0o100644, b"")}
    data, found, at = b"".join(image.archive_of(files)), {}, 0
    while True:
        assert data[at : at + 6] == b"070701" and at % 4 == 0
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        at += (110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            break
        found[name] = (mode, data[at : at + size])
        at += (size + 3) // 4 * 4
    assert found == files


def test_modules_come_after_what_they_need(tmp_path):
    (tmp_path / "modules.dep").write_text(
        "a/rdma_rxe.ko: b/ib_core.ko c/udp-tunnel.ko\nb/ib_core.ko:\nc/udp-tunnel.ko:\n"
    )
    needs = image.dependencies(tmp_path)
    assert [path.name for path in image.in_order("rdma_rxe", needs)] == ["udp-tunnel.ko", "ib_core.ko", "rdma_rxe.ko"]
    assert [path.name for path in image.in_order("udp_tunnel", needs)] == ["udp-tunnel.ko"]
    assert image.in_order("built_in", needs) == []


def test_the_kernel_is_taken_out_of_its_wrapping():
    elf = b"\x7fELF" + bytes(100)
    packer = zlib.compressobj(wbits=31)
    payload = packer.compress(elf) + packer.flush()
    head = bytearray(1024)
    head[0x1F1] = 1
    struct.pack_into("<II", head, 0x248, 0, len(payload))
    assert image.elf_of(bytes(head) + payload) == elf
    with pytest.raises(LabError, match="way this script does not know"):
        image.elf_of(bytes(head) + b"?" * len(payload))


def test_results_are_counted_and_none_is_a_failure(tmp_path):
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite tests="3" failures="1" errors="0" skipped="2"/></testsuites>')
    assert rxe_vm.count(junit) == {"tests": 3, "failures": 1, "errors": 0, "skipped": 2}
    junit.write_text("<testsuites></testsuites>")
    assert rxe_vm.count(junit)["tests"] == 0


def test_only_the_tests_for_the_lab_run_in_it():
    assert rxe_vm.with_tests([]) == ["tests/rdma"]
    assert rxe_vm.with_tests(["-q", "-k", "rails"]) == ["tests/rdma", "-q", "-k", "rails"]
    assert rxe_vm.with_tests(["tests/rdma/test_verbs.py", "-q"]) == ["tests/rdma/test_verbs.py", "-q"]


def test_the_checkout_is_compiled_before_the_guest_starts(tmp_path, monkeypatch):
    (tmp_path / "room").mkdir()
    (tmp_path / "folder").mkdir()
    for name in ("top.py", "room/__init__.py", "room/part.py", "room/wrong.py", "folder/script.py"):
        (tmp_path / name).write_text("1 +" if "wrong" in name else "")
    monkeypatch.setattr(rxe_vm.vm, "ROOT", tmp_path)
    rxe_vm.compile_checkout()
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert compiled == {"top", "__init__", "part"}


def test_a_machine_of_another_kind_is_told_so(monkeypatch):
    monkeypatch.setattr(packages.platform, "machine", lambda: "aarch64")
    with pytest.raises(NoVm, match="x86-64"):
        packages.install_tools()


def test_help_teaches():
    done = subprocess.run(
        [sys.executable, "-m", "lab.rdma_vm.command", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Soft-RoCE" in done.stdout
