"""The pictures of the live page: the script makes them, they are small, and docs/ shows every one."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lab.docs.screenshots import FOLDER, SHOTS, shoot
from tests.net.fake_frontend import serving
from tests.net.http.common.canned_cluster import Cluster

MAX_BYTES = 150_000
PNG = b"\x89PNG\r\n\x1a\n"


def size(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


@pytest.mark.skipif(
    (shutil.which("chromium") or shutil.which("google-chrome")) is None,
    reason="needs Chromium; scripts/setup --test installs it as root on Debian",
)
async def test_every_picture_is_taken(tmp_path: Path):
    pytest.importorskip("playwright")
    pytest.importorskip("PIL")
    async with serving(Cluster()) as url:
        await asyncio.to_thread(shoot, url, tmp_path)
    for shot in SHOTS:
        png = (tmp_path / f"{shot.name}.png").read_bytes()
        assert png.startswith(PNG) and len(png) < MAX_BYTES, shot.name
        if not shot.of:
            assert size(png) == (shot.width, shot.height)


@pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot.name)
def test_the_kept_pictures_are_small_and_shown(shot):
    png = (FOLDER / f"{shot.name}.png").read_bytes()
    assert png.startswith(PNG) and len(png) < MAX_BYTES
    assert f"({shot.name}.png)" in (FOLDER / "operations.md").read_text()
