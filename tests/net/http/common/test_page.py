"""The live page is served whole: every file it names exists, nothing comes from elsewhere, its data wants the key."""

from __future__ import annotations

import re
import shutil

import aiohttp
import pytest

from net.http.common.page import ASSETS, FOLDER
from tests.net.fake_frontend import FakeFrontend, serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
async def api():
    async with serving(FakeFrontend()) as url, aiohttp.ClientSession(url) as session:
        yield session


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")]
)
async def test_files_and_their_headers(api, path, kind):
    async with api.get(path) as response:
        assert (response.status, response.content_type) == (200, kind)
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        assert await response.read() == (FOLDER / (path[1:] or "index.html")).read_bytes()


def test_every_file_named_exists_and_nothing_is_fetched_from_elsewhere():
    for name in ASSETS:
        text = (FOLDER / name).read_text()
        named = re.findall(r'(?:src|href)="([^"#]+)"|from "\./([^"]+)"', text)
        assert {one or other for one, other in named} <= set(ASSETS), name
        assert not re.search(r"https?://(?!www\.w3\.org/)|innerHTML|\bstyle=", text), name


async def test_the_page_needs_no_key_and_its_data_does():
    async with serving(FakeFrontend(), api_key="secret") as url, aiohttp.ClientSession(url) as session:
        for path in ("/", *(f"/{name}" for name in ASSETS)):
            assert (await session.get(path)).status == 200, path
        for path in ("/live", "/live/history", "/live/requests/x"):
            assert (await session.get(path)).status == 401, path
            assert (await session.get(path, headers={"Authorization": "Bearer secret"})).status in (200, 404), path


async def test_the_history_after_an_interval(api):
    for after, number in (("", 0), ("?after=0", 0), ("?after=123456", 123456)):
        async with api.get(f"/live/history{after}") as response:
            assert (response.status, (await response.json())["after"]) == (200, number)
    for wrong in ("x", "-1", "1.5", "", "9" * 19):
        async with api.get("/live/history", params={"after": wrong}) as response:
            assert response.status == 400 and (await response.json())["error"]["param"] == "after", wrong


async def test_a_request_by_its_id_or_the_id_of_its_response(api):
    async with api.post("/v1/completions", json={"prompt": "ab"}, headers={"X-Request-Id": "mine"}) as response:
        assert response.status == 200
    for name in ("mine", "cmpl-mine"):
        async with api.get(f"/live/requests/{name}") as response:
            assert await response.json() == {"request_id": "mine"}
    async with api.get("/live/requests/other") as response:
        assert response.status == 404


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; scripts/setup --test installs it as root on Debian")
async def test_the_page_asks_for_the_key_once():
    playwright = pytest.importorskip("playwright.async_api")
    async with serving(FakeFrontend(), api_key="secret-key") as url, playwright.async_playwright() as player:
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            await page.goto(url)
            for key in ("wrong", "secret-key"):
                await playwright.expect(page.locator("#login")).to_be_visible()
                await page.locator("#key").fill(key)
                await page.keyboard.press("Enter")
            summary = page.locator("#summary")
            await playwright.expect(summary).to_contain_text("seen from fake")
            await page.reload()
            await playwright.expect(summary).to_contain_text("seen from fake")
            await playwright.expect(page.locator("#login")).to_be_hidden()
        finally:
            await browser.close()
