"""The two files QEMU boots, made from the unpacked kernel package and kept in a cache directory.

vmlinux: the ELF kernel out of the bzImage. QEMU starts it directly (PVH), which saves ten seconds of decompression
under emulation. initrd.gz: busybox, the modules for 9p over virtio and for rdma_rxe, and an init that mounts the host's
root, read-only below a temporary overlay, and continues in it.
"""

from __future__ import annotations

import gzip
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.rdma_vm import packages
from lab.rdma_vm.errors import LabError

BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
RDMA_MODULES = ("crc32_generic", "ib_uverbs", "rdma_rxe", "veth", "dummy", "sch_netem")  # rxe asks for crc32 by name
UNPACK = (
    "boot/vmlinuz-*",
    "lib/modules/*/modules.*",
    *(f"lib/modules/*/kernel/drivers/{part}" for part in ("infiniband/core/*", "infiniband/sw/*", "virtio/*")),
    *(f"lib/modules/*/kernel/drivers/net/{part}" for part in ("veth*", "dummy*")),
    *(f"lib/modules/*/kernel/fs/{part}" for part in ("9p/*", "netfs/*", "fscache/*", "overlayfs/*", "configfs/*")),
    *(f"lib/modules/*/kernel/net/{part}" for part in ("9p/*", "sched/sch_netem*")),
    *(f"lib/modules/*/kernel/net/{part}" for part in ("ipv4/udp_tunnel*", "ipv6/ip6_udp_tunnel*")),
    "lib/modules/*/kernel/crypto/crc32*",
)


@dataclass(frozen=True, slots=True)
class Image:
    vmlinux: Path
    initrd: Path


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_directory() -> Path:
    return user_cache() / "mooncake" / "rxe-lab"


def prepare(cache: Path) -> Image:
    """The image for the newest kernel package, made on first use: about 80 MB, 10 s and a download."""
    package = packages.kernel_package()
    place = cache / package
    image = Image(place / "vmlinux", place / "initrd.gz")
    if not (image.vmlinux.exists() and image.initrd.exists()):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            _make(package, Path(scratch), Image(made / "vmlinux", made / "initrd.gz"))
            shutil.rmtree(place, ignore_errors=True)
            made.rename(place)
    return image


def _make(package: str, scratch: Path, image: Image) -> None:
    deb, tree = packages.download(package, scratch), scratch / "tree"
    tree.mkdir()
    packages.say("unpacking the kernel ...")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "x", "-C", tree, "--wildcards", *("./" + name for name in UNPACK)], stdin=archive.stdout)
    [modules] = (tree / "lib" / "modules").iterdir()
    subprocess.run(["depmod", "-b", tree, modules.name], check=True)
    [bzimage] = (tree / "boot").glob("vmlinuz-*")
    image.vmlinux.write_bytes(elf_of(bzimage.read_bytes()))
    with gzip.open(image.initrd, "wb", compresslevel=1) as out:
        for chunk in archive_of(initramfs(modules)):
            out.write(chunk)


def elf_of(bzimage: bytes) -> bytes:
    """The kernel inside a bzImage; its header has the payload's offset (Linux boot protocol 2.08)."""
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = bzimage[start : start + length]
    if payload.startswith(b"\xfd7zXZ\0"):
        elf = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x1f\x8b"):
        elf = zlib.decompressobj(31).decompress(payload)
    else:
        raise LabError(f"the kernel is packed in a way this script does not know: {payload[:6].hex()}")
    if not elf.startswith(b"\x7fELF"):
        raise LabError("the kernel's payload is no ELF file")
    return elf


def initramfs(modules: Path) -> dict[str, tuple[int, bytes]]:
    """path -> (mode, content) of everything in the guest's first file system; directories have no content."""
    directory, program = 0o040755, 0o100755
    files = dict.fromkeys(("bin", "dev", "proc", "sys", "mod", "lower", "rw", "newroot"), (directory, b""))
    busybox = shutil.which("busybox")
    if busybox is None:
        raise LabError("busybox-static is installed but busybox is not on PATH")
    files["bin/busybox"] = (program, Path(busybox).read_bytes())
    files["init"] = (program, (Path(__file__).parent / "guest" / "first.sh").read_bytes())
    needs = dependencies(modules)
    loaded: list[Path] = []
    for list_name, names in (("boot", BOOT_MODULES), ("rdma", RDMA_MODULES)):
        before = len(loaded)
        for name in names:
            loaded += [path for path in in_order(name, needs) if path not in loaded]
        wanted = loaded[before:]
        files[f"mod/{list_name}.list"] = (0o100644, "".join(f"{path.name}\n" for path in wanted).encode())
        files |= {f"mod/{path.name}": (0o100644, (modules / path).read_bytes()) for path in wanted}
    return files


def dependencies(modules: Path) -> dict[Path, list[Path]]:
    """depmod's findings: module -> the modules it needs, paths below `modules`."""
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        module, _, others = line.partition(":")
        needs[Path(module)] = [Path(other) for other in others.split()]
    return needs


def in_order(name: str, needs: dict[Path, list[Path]]) -> list[Path]:
    """The module called `name`, after everything it needs. Built-in modules (not in the list) need no loading."""
    for path, others in needs.items():
        if path.name.split(".")[0].replace("-", "_") == name.replace("-", "_"):
            return [*reversed(others), path]
    return []


def archive_of(files: dict[str, tuple[int, bytes]]) -> Iterator[bytes]:
    """A cpio archive in the "newc" format, the one the kernel unpacks."""
    for number, (name, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], start=1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
        yield head + b"\0" * (-len(head) % 4)
        yield content + b"\0" * (-len(content) % 4)
