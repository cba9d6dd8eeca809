"""The live page in a real browser over a canned cluster: nothing is cut, nothing is lost on a reload, and text from a
model never becomes HTML."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("playwright")
from playwright.async_api import Locator, Page, async_playwright, expect

from tests.net.fake_frontend import serving
from tests.net.http.common.canned_cluster import REASON, Cluster

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium; scripts/setup --test installs it as root on Debian"
)
WIDTHS = (390, 1120, 1920)

ANSWER = """# A *title*
Some **bold `code`** and [a page](https://example.org/x?a=1) but [not this](javascript:alert(1)).
- one <img src=x onerror=alert(1)>
- two
  1. inner

| a | b |
|---|---|
| 1 | <script>alert(2)</script> |

```html
<b>**not bold**</b>
```
> quoted"""


@pytest.fixture
async def cluster():
    return Cluster()


@pytest.fixture
async def page(cluster):
    async with serving(cluster) as url, async_playwright() as player:
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1120, "height": 900})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        await page.goto(url)
        yield page
        await browser.close()
        assert wrong == []


async def ask(page: Page, text: str) -> Locator:
    """Ask for an echo of the text (the fake model repeats its prompt); returns the answer."""
    await page.locator("#settings summary").click()
    await page.locator("[name=max_tokens]").fill(str(len(text)))
    await page.locator("[name=max_tokens]").blur()
    await page.locator("#prompt").fill(text)
    await page.locator("#prompt").press("Enter")
    await expect(page.get_by_role("button", name="show the sources of its blocks")).to_be_visible()
    return page.locator(".message.assistant .text")


async def test_an_answer_is_shown_as_markdown_and_never_as_html(page):
    answer = await ask(page, ANSWER)
    await expect(answer.locator("h4 em")).to_have_text("title")
    await expect(answer.locator("strong code")).to_have_text("code")
    await expect(answer.locator("ul > li")).to_have_count(2)
    await expect(answer.locator("ul ol li")).to_have_text("inner")
    await expect(answer.locator("pre code")).to_have_text("<b>**not bold**</b>")
    await expect(answer.locator("blockquote")).to_have_text("quoted")
    await expect(answer.locator("tbody td").nth(1)).to_have_text("<script>alert(2)</script>")
    await expect(answer.locator("ul > li").first).to_have_text("one <img src=x onerror=alert(1)>")
    assert await answer.locator("img, script, b, [onerror]").count() == 0
    links = answer.locator("a")
    assert await links.evaluate_all("all => all.map((a) => [a.href, a.textContent, a.rel])") == [
        ["https://example.org/x?a=1", "https://example.org/x?a=1", "noopener noreferrer"]
    ]
    await expect(answer).to_contain_text("[not this](javascript:alert(1))")
    await expect(page.locator(".message.user")).to_have_text(ANSWER)
    await page.locator("[name=markdown]").uncheck()
    await expect(answer).to_have_text(ANSWER)


async def test_the_chat_and_its_settings_outlive_a_reload(page, cluster):
    await page.locator("#settings summary").click()
    for name, value in {"temperature": "1.5", "top_p": "0.5", "seed": "7", "system": "Be short."}.items():
        await page.locator(f"[name={name}]").fill(value)
    await page.locator("#settings summary").click()
    text = "one **two**"
    await ask(page, text)
    await page.reload()
    await expect(page.locator(".message.user")).to_have_text(text)
    await expect(page.locator(".message.assistant .text")).to_contain_text("Be short.")  # the fake model echoes it
    assert await page.locator("[name=temperature]").input_value() == "1.5"
    await page.locator("#prompt").fill("again")
    await page.locator("#prompt").press("Enter")
    await expect(page.locator(".message.assistant")).to_have_count(2)
    await expect(page.get_by_role("button", name="show the sources of its blocks")).to_have_count(2)
    sampling = cluster.calls[-1]["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["seed"]) == (1.5, 0.5, 7)
    messages, _ = cluster.rendered[-1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    await page.get_by_role("button", name="New chat").click()
    await page.reload()
    await expect(page.locator("#summary")).to_contain_text("3 nodes")
    await expect(page.locator(".message")).to_have_count(0)


async def test_a_wrong_setting_is_pointed_out_and_not_sent(page, cluster):
    await page.locator("#settings summary").click()
    await page.locator("[name=temperature]").fill("9")
    await page.locator("#settings summary").click()
    await page.locator("#prompt").fill("hello")
    await page.locator("#prompt").press("Enter")
    await expect(page.locator("[name=temperature]")).to_be_focused()
    assert await page.locator("#prompt").input_value() == "hello" and cluster.calls == []


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_chosen_node_is_not_cut_off_and_nothing_overflows(page, width):
    await page.set_viewport_size({"width": width, "height": 900})
    await page.locator("#requests button").first.click()
    chosen = page.locator("#request tr.chosen")
    await expect(chosen).to_have_count(2)
    frame = await page.locator("#request .scroll").bounding_box()
    for i in range(2):
        box = await chosen.nth(i).get_by_text("chosen", exact=True).bounding_box()
        assert box is not None and frame is not None
        assert frame["x"] <= box["x"] and box["x"] + box["width"] <= frame["x"] + frame["width"]
    heads = await page.locator("#request .candidates thead tr").all_inner_texts()
    assert heads[0].startswith("prefill on") and heads[1].split("\t") == ["decode on", "decision", "step", "token"]
    await expect(page.locator("#request")).to_contain_text("48 tokens from the pool")
    await expect(page.locator("#request tr.skipped")).to_contain_text(REASON)
    await expect(page.locator("#charts figure")).to_have_count(8)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_figures_say_of_how_many_requests_they_are(page):
    tiles = page.locator("#figures .tile")
    await expect(tiles.first).to_contain_text("120 ms")
    await expect(tiles.first).to_contain_text("of 1 request")
    await expect(tiles.last).to_contain_text("of 0 requests")


async def test_a_card_shows_the_kv_that_is_held_cached_and_free(page):
    card = page.locator("article", has_text="prefill-0")
    for said in ("4.0 MiB held", "40.0 MiB cached", "20.0 MiB free", "44.0 MiB of 64.0 MiB"):
        await expect(card).to_contain_text(said)
    widths = await card.locator(".bar").first.locator("i").evaluate_all("all => all.map((one) => one.style.width)")
    assert widths == ["6.25%", "62.5%", "31.25%"]


async def test_tenants_are_added_up_over_the_nodes(page, cluster):
    cells = page.locator("#tenants tbody tr")
    await expect(cells).to_have_count(1)
    assert await cells.locator("td").all_inner_texts() == ["team-a", "9.0 MiB", "12.0 MiB", "75 %", "3"]

    async def live():
        nodes = [cluster._node(name, None) for name in ("store-0", "store-1", "prefill-0")]
        nodes[1]["tenants"]["other"] = {"bytes": 1 << 20, "quota": None, "refused": 0}
        return {"unix_s": 1e9, "node_id": "store-0", "nodes": nodes}

    cluster.live = live
    await expect(cells).to_have_count(2)
    rows = [await cells.nth(i).locator("td").all_inner_texts() for i in range(2)]
    assert rows == [["team-a", "18.0 MiB", "24.0 MiB", "75 %", "6"], ["other", "1.0 MiB", "–", "–", "0"]]


async def test_the_picture_has_every_node_and_connection(page):
    picture = page.locator("#cluster svg")
    for name in ("prefill-0", "decode-0", "store-0"):
        await expect(picture.locator(".name", has_text=name)).to_be_visible()
    await expect(picture.locator("line.link")).to_have_count(2)
    await expect(picture.locator("text.on-link").first).to_have_text("shared memory")
    await expect(page.locator("#rails")).to_contain_text("shared memory (shm)")


MEETING = """() => {
  const boxes = (found) => [...found].map((one) => one.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const nodes = boxes(document.querySelectorAll("#cluster rect.node"));
  const labels = boxes(document.querySelectorAll("#cluster g:has(> .on-link)"));
  return labels.flatMap((a, i) => [...nodes, ...labels.slice(i + 1)].filter((b) => meet(a, b))).length;
}"""
"""Number of labels of connections that cover a node or one another."""


@pytest.mark.parametrize("width", WIDTHS)
async def test_every_connection_is_labelled_and_no_label_covers_anything(page, cluster, width):
    """Where there is no free place, a line below the picture says it."""
    await page.set_viewport_size({"width": width, "height": 900})
    names = ["prefill-0", "decode-0", "decode-1", "store-0"]

    async def live():
        nodes = [cluster._node(name, names[0]) for name in names]
        (path,) = nodes[1]["paths"]
        for i, node in enumerate(nodes):
            node["paths"] = [path | {"peer": other} for other in names[i + 1 :]]
        return {"unix_s": 1e9, "node_id": names[0], "nodes": nodes}

    cluster.live = live
    await expect(page.locator("#cluster line.link")).to_have_count(6)
    assert await page.evaluate(MEETING) == 0
    below = await page.locator("#cluster > div").count()
    assert await page.locator("#cluster g:has(> .on-link)").count() + below == 6
    assert width == 390 or below < 3


async def test_a_timeline_fits_into_the_page(page, cluster):
    event = {"node": "b", "detail": {}}
    spans = [
        ("accepted", 0.0),
        ("placed", 0.01),
        ("waiting", 0.01),
        ("running", 0.02),
        ("first_token", 0.2),
        ("answered", 1.0),
    ]
    found = cluster.find_timeline

    async def find_timeline(request_id: str):
        return await found(request_id) | {"events": [event | {"event": name, "t": t} for name, t in spans]}

    cluster.find_timeline = find_timeline
    await page.locator("#requests button").first.click()
    await expect(page.locator("#request svg.timeline")).to_be_visible()
    assert await page.locator("#request .wide").evaluate("one => one.scrollWidth <= one.clientWidth")


async def test_charts_show_the_kept_minutes_with_marks_and_ask_only_for_what_is_new(page, cluster):
    chart = page.locator("#charts figure", has_text="Time to first token")
    await expect(chart.locator("polyline")).to_have_count(3)
    points = await chart.locator("polyline").first.get_attribute("points")
    assert points is not None and len(points.split()) == 20
    await expect(chart.locator(".legend")).to_contain_text("of 1 request")
    await expect(chart.locator("line.mark.fault title")).to_have_text("decode-1 was lost")
    await expect(page.locator("#marks li")).to_have_count(2)
    await expect(page.locator("#marks")).to_contain_text("prefill-0 takes new requests for decode")
    await expect(page.locator("#silent")).to_contain_text("without decode-1")
    rails = page.locator("#charts figure", has_text="Bytes between nodes")
    await expect(rails.locator(".legend")).to_contain_text("prefill-0 – decode-0, shared memory")
    newest = cluster.history.since(0)["intervals"][-1]["number"]
    await expect(page.locator("#silent")).to_be_visible()
    async with page.expect_response(lambda answer: "after=" in answer.url and "after=0" not in answer.url):
        pass
    assert cluster.asked_after[0] == 0 and 0 < cluster.asked_after[1] < newest
    await expect(chart.locator("polyline").first).to_be_attached()
    points = await chart.locator("polyline").first.get_attribute("points")
    assert points is not None and len(points.split()) == 20, "what it knew is still there"
    await chart.scroll_into_view_if_needed()
    box = await chart.locator("svg").bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + 2, box["y"] + 30)
    await expect(chart.locator(".legend b").first).to_have_text("–")  # the first minute is unknown
