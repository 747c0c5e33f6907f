"""The page of framework.report as Chromium shows it: drawn, without a network, no wider than the window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from framework.studies.report import page
from framework.studies.story import read_story
from tests.studies.planted import full, plant, train_line

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom"]
WIDTHS = (390, 1280)
LOOK = """<script>
const asking = setInterval(() => {
  const root = document.documentElement;
  if (!root.dataset.drawn) return;
  clearInterval(asking);
  setTimeout(() => {
    document.querySelectorAll("details").forEach(each => { each.open = true; });
  const boxes = [...document.querySelectorAll("body *")].filter(each => !each.closest(".scroll *, svg *"));
    parent.postMessage({
      width: root.clientWidth, wide: root.scrollWidth, plots: document.querySelectorAll(".plot").length,
      drawn: [...document.querySelectorAll(".plot")].filter(each => each.querySelector("svg.main-svg .trace path")).length,
      outside: boxes.filter(each => each.getBoundingClientRect().right > root.clientWidth + 0.5).map(each => each.outerHTML.slice(0, 80)),
      fetched: performance.getEntriesByType("resource").map(each => each.name),
    }, "*");
  }, 500);
}, 50);
</script>"""


def looked_at(text: str, folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Of a page shown at WIDTHS side by side: what it says of itself at each, and what the console says."""
    (folder / "page.html").write_text(text.replace("</body>", f"{LOOK}</body>"))
    frames = "".join(f'<iframe src="page.html" width="{width}" height="900"></iframe>' for width in WIDTHS)
    listen = "const found = []; onmessage = said => { found.push(said.data); document.title = JSON.stringify(found); };"
    (folder / "host.html").write_text(f'<script>console.log("heard"); {listen}</script>{frames}')
    words = [str(CHROMIUM), *QUIET, f"--user-data-dir={folder / 'profile'}", f"file://{folder / 'host.html'}"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    title = re.search(r"<title>(.*?)</title>", shown.stdout)
    assert title is not None, shown.stderr
    unescaped = title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    found = {said["width"]: said for said in json.loads(unescaped)}
    return found, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    text = page(read_story(full(tmp_path / "here"), "run"), read_story(full(tmp_path / "there", name="other"), "against"))
    assert not re.findall(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"'](?!data:)", text.split("<script>")[0])
    found, console = looked_at(text, tmp_path)
    assert len(console) == 1, console  # our own word: the console is heard
    assert "heard" in console[0]
    assert len(found) == len(WIDTHS)
    for width, seen in zip(WIDTHS, sorted(found), strict=True):
        assert width - 20 <= seen <= width  # a scroll bar takes the rest
    for said in found.values():
        assert said["plots"] == said["drawn"] == 7
        assert said["wide"] == said["width"]
        assert said["outside"] == []
        assert said["fetched"] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_bad_page_is_seen_to_be_bad(tmp_path: Path) -> None:
    wide = '<div style="width:2000px">wide</div><img src="https://localhost:9/a.png"></main>'
    text = page(read_story(plant(tmp_path / "run", "bad", [train_line(1, 2.0), train_line(2, 1.0)]), "run")).replace("</main>", wide)
    found, console = looked_at(text, tmp_path)
    assert len(console) > 1  # the policy of the page refuses the picture
    assert all(said["wide"] >= 2000 and said["outside"] for said in found.values())
