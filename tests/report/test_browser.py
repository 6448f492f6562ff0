"""Both kinds of page in a real browser, where there is one: wide and phone-wide, light and dark.

The pages stand in frames of a page that measures them and writes what it found into its own document, which Chromium prints;
what the pages write to the console comes on stderr.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.report.example_diagnosis import rendered
from tests.report.example_results import example

from hybridize.report.html import render_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--allow-file-access-from-files",
    "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom",
)  # fmt: skip
WIDTHS = (360, 1200)
MEASURE = """
const frames = [...document.querySelectorAll('iframe')];
const measure = frame => {
  const d = frame.contentDocument, root = d.documentElement, style = getComputedStyle(d.body);
  const svgs = [...d.querySelectorAll('svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(e => ({name: e.textContent, box: e.getBoundingClientRect()}));
    const room = 0.02 * box.width;
    const cut = texts.filter(({box: t}) => t.left < box.left - room || t.right > box.right + room
      || t.top < box.top - room || t.bottom > box.bottom + room);
    const over = [];
    texts.forEach(({name, box: t}, i) => texts.slice(i + 1).forEach(({name: other, box: u}) => {
      const wide = Math.min(t.right, u.right) - Math.max(t.left, u.left);
      const high = Math.min(t.bottom, u.bottom) - Math.max(t.top, u.top);
      const least = Math.min(t.width * t.height, u.width * u.height);
      if (wide > 0 && high > 0 && wide * high > 0.25 * least) over.push(`${name} | ${other}`);
    }));
    return {name: svg.getAttribute('aria-label'), width: box.width, height: box.height, visible: svg.checkVisibility(),
            cut: cut.map(text => text.name), over};
  });
  const outside = [...d.querySelectorAll('main *')].filter(e => !e.closest('svg') && !e.closest('.scroll *') && !e.closest('pre')
    && e.checkVisibility() && e.getBoundingClientRect().right > root.clientWidth + 0.5).map(e => e.outerHTML.slice(0, 80));
  const faces = [...d.querySelectorAll('p, li, td, th, h1, h2, h3, small, figcaption, dt, dd, a')].filter(e => e.checkVisibility());
  return {page: frame.name, scroll: root.scrollWidth, client: root.clientWidth, svgs, outside, background: style.backgroundColor,
          colours: [...new Set(faces.map(e => getComputedStyle(e).color))]};
};
window.onload = () => { document.getElementById('out').textContent = JSON.stringify(frames.map(measure)); };
"""


def look(folder: Path, pages: dict[str, str], dark: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """What the browser measured of each page at each width, and the lines of its console."""
    assert CHROMIUM
    frames = []
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
        frames += [
            f'<iframe name="{name}" src="{name}.html" style="border:0;width:{width}px;height:900px"></iframe>'
            for width in WIDTHS
        ]
    frame = folder / "frames.html"
    frame.write_text(
        "<!doctype html><meta charset=utf-8><meta name=color-scheme content='light dark'>"
        f"{''.join(frames)}<pre id=out></pre><script>{MEASURE}</script>"
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={folder / ('dark' if dark else 'light')}"
    command = [CHROMIUM, *FLAGS, scheme, profile, frame.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="out">(.+?)</pre>', result.stdout, flags=re.DOTALL)
    assert found, f"nothing was measured: {result.stdout[-300:]} {result.stderr[-1000:]}"
    text = found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(text), console


def faults(seen: dict[str, Any]) -> list[str]:
    """What is wrong with a page at one width."""
    where = f"{seen['page']} at {seen['client']} px"
    found = [f"{where}: {element} stands out of the page" for element in seen["outside"]]
    if seen["scroll"] > seen["client"]:
        found.append(f"{where}: scrolls sideways to {seen['scroll']} px")
    for svg in seen["svgs"]:
        if not svg["visible"] or min(svg["width"], svg["height"]) < 80:
            found.append(f"{where}: {svg['name']!r} is not visible ({svg['width']} x {svg['height']})")
        found += [f"{where}: {svg['name']!r} cuts {text!r}" for text in svg["cut"]]
        found += [f"{where}: {svg['name']!r} writes one text over another: {pair!r}" for pair in svg["over"]]
    for colour in seen["colours"]:
        if contrast(colour, seen["background"]) < 4:
            found.append(f"{where}: {colour} on {seen['background']} is hard to read")
    return found


def contrast(a: str, b: str) -> float:
    """Contrast of two `rgb(r, g, b)` colours, 1 to 21 (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages(tmp_path: Path, dark: bool) -> None:
    names = ("full", "three", "minimal", "plain_teacher", "nasty")
    pages = {name: rendered(name) for name in names} | {"conversion": render_html(example())}
    seen, console = look(tmp_path, pages, dark)
    assert console == []
    assert [(one["page"], one["client"]) for one in seen] == [
        (page, width) for page in pages for width in WIDTHS
    ]
    for one in seen:
        assert len(one["svgs"]) == pages[one["page"]].count("<svg")
    assert [fault for one in seen for fault in faults(one)] == []
    dark_page = contrast(seen[0]["background"], "rgb(0, 0, 0)") < 3
    assert dark_page == dark, f"the page's background is {seen[0]['background']}"


def test_faults_are_seen(tmp_path: Path) -> None:
    """The check itself: a wide box, an empty and a hidden figure, text cut off, pale text, an error of a script."""
    page = (
        "<!doctype html><body style='background:#ffffff'><main><div style='width:500px;height:9px'></div>"
        "<svg aria-label=empty width=0 height=0></svg><svg aria-label=hidden style='display:none' width=99 height=99></svg>"
        "<svg aria-label=short width=99 height=99><text x=80 y=50>much too long</text>"
        "<text x=5 y=20>one</text><text x=6 y=21>two</text></svg>"
        "<p style='color:#bbbbbb'>pale</p></main><script>missing()</script>"
    )
    seen, console = look(tmp_path, {"bad": page})
    assert len(console) == len(WIDTHS) and "missing is not defined" in console[0]
    narrow, wide = (" / ".join(faults(one)) for one in seen)
    for fault in (
        "'empty' is not visible",
        "'hidden' is not visible",
        "cuts 'much too long'",
        "is hard to read",
    ):
        assert fault in narrow and fault in wide
    assert "scrolls sideways" in narrow and "stands out" in narrow
    assert "scrolls sideways" not in wide and "stands out" not in wide
