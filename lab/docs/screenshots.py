"""Take the screenshots of the live page in docs/, over a cluster under load, in the machine's Chromium.

  scripts/tools.py screenshots
  scripts/tools.py screenshots --minutes 10 --folder /tmp/shots

Starts a prefill, two decode and a store node with the embedded model, lets clients chat with them, kills a decode node
and starts it again, and takes the pictures. Needs Chromium, playwright and Pillow: scripts/setup --test brings them.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lab.flag_types import above_zero
from lab.launch import rest
from lab.launch.cluster import LocalCluster

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).resolve().parents[2] / "docs"
NODES = "prefill=1,decode=2,store=1"
FLAGS = ("--model", "smollm2-135m-instruct", "--dram-bytes", "256M", "--kv-cache-bytes", "128M")
LOST_S = 20.0
"""How long the killed node is away."""
CLIENTS = 3
QUESTIONS = (
    "What is the capital of France?",
    "Which planets have rings?",
    "Why is the sea salty?",
    "Who wrote Faust?",
)
ASKED = "List three facts about the Moon as a Markdown list. Write the most important word of each in **bold**."
COLORS = 256
TIMEOUT_MS = 120_000


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: a window of this size, in the light or dark scheme. of: a selector; "": the top of the page."""

    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"]
    of: str = ""


SHOTS = (
    Shot("page-light", 1120, 1260, "light"),
    Shot("page-dark", 1920, 1260, "dark"),
    Shot("page-phone", 390, 1260, "dark"),
    Shot("page-request", 1920, 900, "light", of="#request"),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    scratch = tempfile.TemporaryDirectory(prefix="screenshots-")
    with scratch as run_dir, LocalCluster(NODES, FLAGS, run_dir=Path(run_dir)) as cluster:
        url = cluster["prefill-0"].url
        with talking(url):
            time.sleep(30 * args.minutes)
            cluster.kill("decode-1")
            time.sleep(LOST_S)
            cluster.restart("decode-1")
            time.sleep(30 * args.minutes)
            shoot(url, args.folder)
        cluster.check()
    for shot in SHOTS:
        path = args.folder / f"{shot.name}.png"
        print(f"{path}: {path.stat().st_size // 1000} kB")
    return 0


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--minutes", type=above_zero, default=4.0, help="of load before the pictures (default: 4)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures go (default: docs/)")
    return parser.parse_args(argv)


@contextmanager
def talking(url: str) -> Iterator[None]:
    """Clients that hold conversations until the end of the block. Raises the first error of a client."""
    stop, errors = threading.Event(), list[Exception]()

    def talk(client: int) -> None:
        try:
            while not stop.is_set():
                messages = [{"role": "system", "content": "You answer in one short sentence. " * 8}]
                for turn in range(len(QUESTIONS)):
                    question = QUESTIONS[(client + turn) % len(QUESTIONS)]
                    messages.append({"role": "user", "content": question})
                    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
                    answer = rest.post(f"{url}/v1/chat/completions", body)
                    messages.append(answer["choices"][0]["message"])
                    if stop.wait(0.5 * client):
                        return
        except rest.RestError as error:
            errors.append(error)

    clients = [threading.Thread(target=talk, args=(client,)) for client in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    if errors:
        raise errors[0]


def shoot(url: str, folder: Path) -> None:
    """Write one PNG for each of SHOTS. Raises SystemExit without a browser."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit("screenshots: needs playwright; scripts/setup --test installs it") from None
    if chromium is None:
        raise SystemExit("screenshots: needs Chromium; scripts/setup --test installs it as root on Debian")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            for shot in SHOTS:
                (folder / f"{shot.name}.png").write_bytes(small(taken(browser, url, shot)))
        finally:
            browser.close()


def taken(browser: Browser, url: str, shot: Shot) -> bytes:
    """The picture as PNG."""
    page = browser.new_page(viewport={"width": shot.width, "height": shot.height}, color_scheme=shot.scheme)
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    page.locator("#charts polyline").first.wait_for(state="attached")
    if shot.of:
        page.locator("#requests button").first.click()
        page.locator("#request tr.chosen").first.wait_for()
        png = page.locator(shot.of).screenshot()
    else:
        if shot.width > 1000:  # the chat is in the picture
            chat(page)
        page.evaluate("scrollTo(0, 0)")
        png = page.screenshot()
    page.close()
    return png


def chat(page: Page) -> None:
    page.locator("#prompt").fill(ASKED)
    page.locator("#prompt").press("Enter")
    page.get_by_role("button", name="show the sources of its blocks").wait_for()


def small(png: bytes) -> bytes:
    """With the picture's most frequent colors as its palette: areas keep their exact color, and only the edges of
    letters change a little. A repository keeps every version of a picture."""
    from PIL import Image

    into = BytesIO()
    whole = Image.open(BytesIO(png)).convert("RGB")
    found: list[tuple[int, Any]] = whole.getcolors(whole.width * whole.height) or []  # (count, color)
    counted = sorted(found, reverse=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in counted[:COLORS] for part in color])
    whole.quantize(palette=palette, dither=Image.Dither.NONE).save(into, "PNG", optimize=True)
    return into.getvalue()
