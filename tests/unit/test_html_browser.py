"""The page in a real browser: it draws, it filters, no name runs, and nothing is asked for.

Chromium is Debian's; where there is none the tests are skipped. A screenshot of the last run lies in pytest's folder.
"""

import base64
import hashlib
import html
import json
import re
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safeload.rendering.html import OpcodeLine, OpcodeLines, html_page
from tests.reports_sample import HOSTILE_NAMES, hostile, large

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"),
]

PROBE = """
<script>
  window.addEventListener("load", function () { setTimeout(function () {
    var words = document.getElementById("words");
    var rows = Array.prototype.slice.call(document.querySelectorAll("#table tbody tr"));
    function visible() { return rows.filter(function (row) { return row.offsetParent !== null; }).length; }
    var answer = { title: document.title, rows: rows.length, before: visible(), scripts: document.scripts.length };
    answer.images = document.images.length;
    answer.handlers = document.querySelectorAll("[onmouseover],[onerror],[style]").length;
    answer.formShown = document.getElementById("filter").offsetParent !== null;
    answer.asked = performance.getEntriesByType("resource").length;
    answer.policy = window.violations;
    answer.drawn = Array.prototype.map.call(document.querySelectorAll("svg rect.accepted, svg rect.rejected"),
      function (rect) { return rect.getBoundingClientRect().width > 0; }).filter(Boolean).length;
    answer.banner = getComputedStyle(document.querySelector("header")).backgroundColor;
    words.value = "global-not-allowed";
    words.dispatchEvent(new Event("input"));
    answer.after = visible();
    answer.count = document.getElementById("shown").textContent;
    document.documentElement.setAttribute("data-answer", JSON.stringify(answer));
    document.body.textContent = "";
  }, 0); });
</script>
"""
"""Looks at the page from within. The page's own policy would not let it, so the copy that is looked at names it too."""

LISTENER = (
    '<script>window.violations = []; document.addEventListener("securitypolicyviolation", '
    "function (event) { window.violations.push(event.violatedDirective); });</script>"
)


def source_of(script: str) -> str:
    text = script.strip().removeprefix("<script>").removesuffix("</script>")
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def probed(page: str) -> str:
    """Return the page with our two scripts in it, which its policy is told of and nothing else."""
    more = f"{source_of(LISTENER)} {source_of(PROBE)}"
    page = page.replace("script-src ", f"script-src {more} ", 1)
    page = page.replace('<meta name="referrer"', f'{LISTENER}<meta name="referrer"', 1)
    return page.replace("</body>", f"{PROBE.strip()}</body>", 1)


def run(folder: Path, *arguments: str, seconds: float = 60) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
        "--window-size=1280,900",
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    return done.stdout


def answer_of(folder: Path, page: str) -> Any:
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    dom = run(folder, "--dump-dom", "--virtual-time-budget=2000", file.as_uri())
    match = re.search(r'data-answer="([^"]*)"', dom)
    assert match is not None
    return json.loads(html.unescape(match[1]))


def test_hostile_names_are_drawn_filtered_and_never_run(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, probed(html_page(hostile())))
    n = len(HOSTILE_NAMES)
    assert answer["title"] == "rejected: safeload report"
    assert answer["scripts"] == 3  # the page's and our two
    assert answer["images"] == answer["handlers"] == answer["asked"] == 0
    assert answer["policy"] == []
    assert answer["formShown"] is True
    assert (answer["rows"], answer["before"], answer["after"]) == (2 * n, 2 * n, n)
    assert answer["count"] == f"{n} of {2 * n} files"
    assert answer["drawn"] == 2 * n
    assert answer["banner"] not in {"rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"}


def test_the_policy_stops_what_the_escaping_might_let_through(tmp_path: Path) -> None:
    hole = '<script>document.title = "pwned"</script><img src="https://example.invalid/x"><p style="color:red">x</p>'
    page = probed(html_page(hostile())).replace("<main>", f"<main>{hole}", 1)
    answer = answer_of(tmp_path, page)
    assert answer["title"] == "rejected: safeload report"
    assert sorted(answer["policy"]) == ["img-src", "script-src-elem", "style-src-attr"]


def test_ten_thousand_files_are_drawn_and_filtered_in_a_few_seconds(tmp_path: Path) -> None:
    report = large()
    started = time.monotonic()
    answer = answer_of(tmp_path, probed(html_page(report)))
    assert (answer["rows"], answer["before"]) == (10_000, 10_000)
    assert answer["after"] == len(report.all_findings)
    assert answer["policy"] == []
    assert time.monotonic() - started < 30


def test_a_screenshot_shows_the_verdict_in_its_color(tmp_path: Path) -> None:
    name = f"m/bad{HOSTILE_NAMES[0]}"
    lines = [OpcodeLine(0, "PROTO", "0 → 0", "protocol 4", None), OpcodeLine(11, "GLOBAL", "0 → 1", "", "no os.system")]
    file = tmp_path / "page.html"
    file.write_text(html_page(hostile(), {name: OpcodeLines(lines, 2)}), encoding="utf-8")
    picture = tmp_path / "page.png"
    run(tmp_path, f"--screenshot={picture}", file.as_uri())
    rows = list(pixels(picture))
    assert len(rows) == 900
    red, green, blue = rows[10][600]
    assert red > green + 8
    assert red > blue + 8
    # Text, cards and borders: a page that did not draw would be of one color or two.
    assert len({pixel for row in rows[::7] for pixel in row[::3]}) > 40


def pixels(path: Path) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the rows of a PNG of 8-bit RGB or RGBA without interlacing (ISO/IEC 15948)."""
    data = path.read_bytes()
    at, body = 8, b""
    width = channels = 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        if kind == b"IHDR":
            width, _, depth, color, *_ = struct.unpack_from(">IIBBBBB", data, at + 8)
            assert depth == 8
            channels = {2: 3, 6: 4}[color]
        if kind == b"IDAT":
            body += data[at + 8 : at + 8 + length]
        at += length + 12
    raw = zlib.decompress(body)
    stride = width * channels
    above = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        line = bytearray(raw[start + 1 : start + 1 + stride])
        unfilter(raw[start], line, above, channels)
        yield [(line[i], line[i + 1], line[i + 2]) for i in range(0, stride, channels)]
        above = line


def unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> None:
    """Undo one row's filter in place (ISO/IEC 15948, 9)."""
    if kind == 0:
        return
    for i in range(len(line)):
        left = line[i - step] if i >= step else 0
        up, corner = above[i], above[i - step] if i >= step else 0
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        else:
            p = left + up - corner
            guess = min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
        line[i] = (line[i] + guess) & 0xFF
