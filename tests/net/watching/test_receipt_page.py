"""Invariant: the page shows what the server counts, as it happens, and says so when it cannot; it
is for small screens, dark rooms and screen readers too, and asks nobody but its server.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from pion_server.net.watching import RECEIPT
from pion_server.stats import ESTIMATED_SECONDS_PER_TOKEN

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# No sandbox: CI runs as root. No other host: the browser itself would like to call home.
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
TOKENS = 1000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser, or a skip that says what is missing."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs Chromium and its driver (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, Service(driver)) as chrome:
        yield chrome


class Page:
    """The receipt in a browser."""

    def __init__(self, chrome: Any, eventually: Callable[..., None]) -> None:
        self._chrome = chrome
        self._eventually = eventually

    def open(self, url: str, width: int = 1000, scheme: str = "light") -> None:
        """Afterwards the page has its first numbers."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        command = self._chrome.execute_cdp_cmd
        command("Emulation.setDeviceMetricsOverride", screen)
        command("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
        self._chrome.get("about:blank")
        self.requests()
        self.console()
        self._chrome.get(url)
        self.shows(state="Live")

    def run(self, script: str) -> Any:
        return self._chrome.execute_script(f"return {script}")

    def text(self, element: str) -> str:
        """What is to be seen of an element."""
        found = f"document.getElementById('{element}')"
        return str(self.run(f"{found}.checkVisibility() ? {found}.innerText : ''"))

    def shows(self, **expected: str) -> None:
        """Sooner or later the elements have these texts."""
        self._eventually(lambda: {name: self.text(name) for name in expected} == expected)

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self._chrome.get_log("browser")]

    def requests(self) -> list[str]:
        """URLs that were asked for since the last call."""
        events = (json.loads(e["message"])["message"] for e in self._chrome.get_log("performance"))
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]


@pytest.fixture
def page(chromium: Any, eventually: Any) -> Page:
    return Page(chromium, eventually)


def test_hits_show_while_the_page_is_open(page: Page, watch: Any, stored: Any) -> None:
    watched = watch("--max-memory", "16mb")
    page.open(watched.url)
    page.shows(
        hits="0", misses="0", rate="\N{EN DASH}", measured="0 s", estimated="0 s", log="none"
    )
    assert page.run("document.getElementById('bars').getAttribute('d')") == ""

    client = watched.client()
    stored(client, "timed", TOKENS, "PREFILL_MS", 2500)
    stored(client, "untimed", TOKENS)
    for name in ("timed", "timed", "untimed", "nobody"):
        client.execute_command("KV.PREFIX.LOOKUP", name)
    client.execute_command("KV.PREFIX.FETCH", "timed")
    page.shows(hits="3", misses="1", rate="75.0 %", tokens="3,000", bytes="8.0 kB")
    page.shows(measured="5 s", estimated="0.56 s")
    page.shows(**{"measured-hits": "2 hits", "estimated-hits": "1 hit"})
    page.shows(prefixes="2", sessions="4", keys="0", clients="1", limit="of 16.0 MB of memory")
    assert 0 < page.run("document.getElementById('used').value") < 0.01
    page.shows(**{"recent-sum": "3 hits since this page was opened"})
    assert page.run("document.getElementById('bars').getAttribute('d')").startswith("M")

    client.execute_command("PION.STATS", "RESET")
    page.shows(hits="0", misses="0", measured="0 s", estimated="0 s", prefixes="2")
    client.execute_command("KV.PREFIX.LOOKUP", "timed")
    page.shows(hits="1", **{"recent-sum": "4 hits since this page was opened"})

    assert page.console() == []
    asked = page.requests()
    assert {url for url in asked if not url.startswith("data:")} == {
        watched.url,
        f"{watched.url}stats.json",
    }
    assert asked.count(f"{watched.url}stats.json") > 1


def test_a_server_that_goes_and_comes_back(page: Page, watch: Any) -> None:
    watched = watch()
    page.open(watched.url)
    watched.server.stop()
    page.shows(state="The server does not answer")
    assert re.match(r"· the numbers are from \d", page.text("life"))
    assert page.run("document.getElementById('state').className") == "bad"
    watch(port=watched.web_port)
    page.shows(state="Live")
    assert page.run("document.getElementById('state').className") == ""


def test_refused_writes_are_told(page: Page, watch: Any, full_disk: Any, tmp_path: Path) -> None:
    watched = watch("--data-dir", str(tmp_path / "data"))
    page.open(watched.url)
    page.shows(log="0 B", refused="")
    with full_disk(watched):
        page.shows(
            refused="writes are refused, reads go on: the log cannot be written (File too large);"
            " it is tried again by itself"
        )
    page.shows(log="2.1 MB", refused="")


def test_each_tenant_has_a_row(page: Page, watch: Any, stored: Any) -> None:
    watched = watch("--tenant", "ann:a-secret:1mb", "--tenant", "bob:b-secret")
    ann, bob = watched.client("ann", "a-secret"), watched.client("bob", "b-secret")
    stored(ann, "ns", TOKENS, "PREFILL_MS", 90_000)
    stored(bob, "ns", TOKENS)
    for client in (ann, bob, bob):
        client.execute_command("KV.PREFIX.LOOKUP", "ns")
    page.open(watched.url)
    page.shows(
        hits="3", measured="1 min 30 s", estimated="1.11 s", limit="of memory, without a limit"
    )
    rows = "[...document.querySelectorAll('#rows tr')].map(r => [...r.cells].map(c => c.innerText))"
    ann_row, bob_row = page.run(rows)
    assert ann_row[:7] == ["ann", "1", "100.0 %", "1,000", "1 min 30 s", "≈ 0 s", "1"]
    assert bob_row[:7] == ["bob", "2", "100.0 %", "2,000", "0 s", "≈ 1.11 s", "1"]
    assert ann_row[7].endswith(" of 1.0 MB")


def test_a_single_tenant_has_no_table(page: Page, watched: Any) -> None:
    page.open(watched.url)
    assert page.text("tenants") == ""


# Every element with text of its own, and the contrast of its colours (WCAG 2.2).
CONTRASTS = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const ground = element => {
    const colour = rgb(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
  };
  const light = colour => colour.slice(0, 3).map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  return [...document.body.querySelectorAll("*")]
    .filter(e => e.checkVisibility())
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(e => {
      const pair = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
      return [e.innerText, (Math.max(...pair) + .05) / (Math.min(...pair) + .05)];
    });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_in_the_light_and_in_the_dark(page: Page, watched: Any, scheme: str) -> None:
    page.open(watched.url, scheme=scheme)
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 30
    assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []
    red, *_ = map(
        int, re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor"))
    )
    assert (red > 200) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 375, 1400])
def test_it_fits_the_screen(page: Page, watch: Any, width: int) -> None:
    """The table of tenants may be wider, and then moves inside of its frame."""
    watched = watch("--tenant", f"{'a' * 64}:a-secret", "--tenant", "bob:b-secret")
    page.open(watched.url, width)
    page.shows(prefixes="0")
    assert page.run("innerWidth") == width
    assert page.run("document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('p, dd, dt, h2, figcaption')]"
    assert (
        page.run(f"{cut}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)")
        == []
    )


def test_screen_readers_are_told_what_is_what(page: Page, watched: Any) -> None:
    page.open(watched.url)
    tree = page._chrome.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"]
    }
    headings = {name for role, name in named if role == "heading"}
    assert headings >= {"Pion value receipt", "Prefill spared", "Served", "Held now"}
    assert {name for role, name in named if role == "region"} >= headings - {"Pion value receipt"}
    assert ("image", "No hits in the last five minutes") in named
    assert [role for role, name in named if role == "image" and not name] == []


def test_measured_and_estimated_are_explained() -> None:
    """The figure is that of stats.py."""
    assert f"{ESTIMATED_SECONDS_PER_TOKEN * 1e6:.0f} µs a token" in RECEIPT
    assert "<b>Measured</b>" in RECEIPT
    assert "<b>Estimated</b>" in RECEIPT


def test_nothing_comes_from_elsewhere() -> None:
    links = re.findall(r"""(?:src|href|url|import|fetch)\s*[=(]\s*["']?([^"'\s)]+)""", RECEIPT)
    assert sorted(link for link in links if not link.startswith(("/", "data:"))) == []
