"""The rooms are installed below one folder, mooncake_rooms/, and not at the top of site-packages.

Their names are short (cache, net, sched), and other packages and the standard library have such names, too. At the top
lie the packages of connect/site/ and mooncake_client.py. The command line lies next to the rooms, because the package
`mooncake` at the top has upstream's names (docs/connect.md).
"""

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOMS = ("attention", "cache", "connect", "engine", "lab", "net", "sched")
SITE = ("mooncake", "mooncake_rooms")
found = find_namespace_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
packages = [name for name in found if not name.startswith("connect.site")]


class WithCommand(build_py):
    """Adds mooncake.py to the package mooncake_rooms."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        command = [(package, "mooncake", "mooncake.py")] if package == "mooncake_rooms" else []
        return super().find_package_modules(package, package_dir) + command


setup(
    packages=[*SITE, *(f"mooncake_rooms.{name}" for name in packages)],
    package_dir={name: f"connect/site/{name}" for name in SITE} | {f"mooncake_rooms.{room}": room for room in ROOMS},
    cmdclass={"build_py": WithCommand},
)
