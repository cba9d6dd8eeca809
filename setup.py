"""The rooms are installed below one folder, mooncake_rooms/, and not at the top of site-packages.

Their names are short (cache, net, sched), and other packages and the standard library have such names, too.
mooncake.py and mooncake_client.py put that folder on the path.
"""

from setuptools import find_namespace_packages, setup

ROOMS = ("attention", "cache", "engine", "lab", "net", "sched")
packages = find_namespace_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])

setup(
    packages=[f"mooncake_rooms.{name}" for name in packages],
    package_dir={f"mooncake_rooms.{room}": room for room in ROOMS},
)
