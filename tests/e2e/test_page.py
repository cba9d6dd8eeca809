"""The live page in a real browser, over a real cluster: watch it, chat by keyboard, open a request's timeline."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("playwright")
from playwright.async_api import Page, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium; scripts/setup --test installs it as root on Debian"
)
expect.set_options(timeout=60_000)  # ms; what does not come at all is what fails

NAMES = """[...document.querySelectorAll("button, textarea, input")].map(
    (e) => e.labels?.[0]?.textContent || e.ariaLabel || e.textContent)"""


@pytest.fixture(scope="module")
def cluster(start, tiny_model, tmp_path_factory):
    chatty = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(tiny_model[1], chatty)
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tiny_model = ["--model", str(chatty), *tiny_model[2:]]
    with start("prefill=1,decode=1,store=1", *tiny_model) as running:
        yield running


@pytest.fixture
async def page(cluster):
    async with async_playwright() as player:
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(color_scheme="light")
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        await page.goto(f"{cluster.nodes[0].url}/")
        yield page
        await browser.close()
        assert wrong == []


async def brightness(page: Page) -> int:
    color = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in color.removeprefix("rgb(").rstrip(")").split(","))


async def test_watch_chat_and_explain(page, cluster):
    await expect(page.locator("#summary")).to_contain_text("3 nodes")
    for name in ("prefill-0", "decode-0", "store-0"):
        await expect(page.locator("article", has_text=name)).to_contain_text("alive")

    assert await brightness(page) > 600
    await page.emulate_media(color_scheme="dark")  # the system's wish, until the reader has another
    assert await brightness(page) < 300
    await page.locator("#theme").press("Enter")
    assert await brightness(page) > 600

    await page.locator("#prompt").press_sequentially("<b>How</b> are you?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".message.user")).to_have_text("<b>How</b> are you?")  # text stays text
    answered = page.get_by_role("button", name="show the sources of its blocks")
    await expect(answered).to_be_visible(timeout=60_000)
    await answered.press("Enter")
    bars = page.locator("#request .timeline rect")
    await expect(bars.first).to_be_attached()
    rows = await page.locator("#request .timeline text:not(.tick)").all_text_contents()
    assert {"prefill-0", "decode-0"} <= {row.removesuffix(": KV") for row in rows}
    await expect(page.locator("#request tr.chosen")).to_have_count(2)
    await expect(page.locator("#rails")).to_contain_text("shm")
    await expect(page.locator("#cluster svg line.link").first).to_be_attached()
    answers = page.locator("#charts figure", has_text="Time to first token").locator("circle, polyline")
    await expect(answers.first).to_be_attached()  # the node's history has the answer

    await page.reload()
    await expect(page.locator(".message.user")).to_have_text("<b>How</b> are you?")
    await page.get_by_role("button", name="show the sources of its blocks").press("Enter")
    await expect(bars.first).to_be_attached()

    await page.locator("#requests button").first.press("Enter")
    await expect(page.locator("#request h3").first).to_be_focused()
    names = await page.evaluate(NAMES)
    assert len(names) > 5 and all(name.strip() for name in names), names

    await page.set_viewport_size({"width": 360, "height": 740})  # a telephone: tables scroll, the page does not
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360
