"""The page as text: what it holds, that it asks for nothing, and that a name stays a name."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from safeload.errors import Finding
from safeload.rendering import html
from safeload.rendering.html import OpcodeLine, OpcodeLines, html_page
from safeload.rendering.rules import RULES
from safeload.rendering.text import shown as shown_as
from safeload.rendering.treemap import tiles
from safeload.report import FileReport, Report
from safeload.tensors import DType, Extent, TensorSpec
from tests.reports_sample import HOSTILE_NAMES, RUN, accepted, audited, hostile, large, refused

TAGS = {
    *(
        "a",
        "body",
        "caption",
        "code",
        "dd",
        "defs",
        "details",
        "div",
        "dl",
        "dt",
        "form",
        "g",
        "h1",
        "h2",
        "h3",
        "head",
    ),
    *("header", "html", "input", "label", "li", "main", "meta", "option", "output", "p", "pattern", "rect", "script"),
    *("section", "select", "span", "strong", "style", "summary", "svg", "table", "tbody", "td", "text", "th", "thead"),
    *("title", "tr", "ul"),
}
VOID = {"input", "meta"}


class Page(HTMLParser):
    """Every tag with its attributes, every text with the tags around it, and whether tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.unbalanced = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID and tag != "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.unbalanced += not self.open or self.open.pop() != tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, *tags: str) -> list[str]:
        return [data for tag, data in self.texts if tag in tags and data.strip()]


REPORTS = {
    "accepted": audited(accepted("m/a")),
    "empty": audited(),
    "hostile": hostile(),
    "large": large(600),
    "no-facts": Report((refused("x"),)),
    "run-only": Report((), (Finding("untrusted-key", "nobody"),), RUN),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=list(REPORTS))
def test_a_page_is_whole_and_has_our_tags_only(report: Report) -> None:
    page = Page(html_page(report))
    assert page.unbalanced == 0
    assert page.open == []
    assert {tag for tag, _ in page.tags} <= TAGS


@pytest.mark.parametrize("report", REPORTS.values(), ids=list(REPORTS))
def test_a_page_asks_for_nothing(report: Report) -> None:
    page = Page(html_page(report))
    asking = {"src", "srcset", "action", "formaction", "data", "poster", "background", "style", "ping", "xlink:href"}
    for tag, attributes in page.tags:
        assert not asking & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        if "href" in attributes:
            assert re.fullmatch(r"#f[0-9]+", attributes["href"] or "")
    assert not page.all("link")
    style = "".join(text for tag, text in page.texts if tag == "style")
    assert "@import" not in style
    assert set(re.findall(r"url\(([^)]*)\)", style)) == {"#hatch"}
    assert "http" not in "".join(text for tag, text in page.texts if tag == "script")


def test_the_policy_names_the_one_script_and_the_one_style_by_digest() -> None:
    page = Page(html_page(hostile()))
    (policy,) = [m["content"] or "" for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = [text for name, text in page.texts if name == tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert directives[directive] == f"'sha256-{digest}'"
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert "unsafe" not in policy
    # It binds what comes after it, so that nothing that could ask for anything may come before.
    assert [tag for tag, _ in page.tags[:4]] == ["html", "head", "meta", "meta"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_is_shown_and_nothing_else(name: str) -> None:
    tensor = TensorSpec(name, DType("int8"), (1,), "C", Extent(0, 1))
    good = FileReport(f"m/{name}", "pickle", 1, "0" * 64, tensors=(tensor,))
    line = OpcodeLine(0, "GLOBAL", "0 → 1", name, name)
    report = audited(good, refused(f"m/x{name}"))
    source = html_page(report, {f"m/x{name}": OpcodeLines([line], 1)})
    assert all(c.isprintable() or c == "\n" for c in source)
    plain = Page(html_page(audited(good.__class__("m/y", "pickle", 1, "0" * 64, tensors=good.tensors), refused("m/z"))))
    page = Page(source)
    assert {tag for tag, _ in page.tags} - {"caption"} <= {tag for tag, _ in plain.tags} | TAGS
    assert len(page.all("script")) == len(page.all("style")) == 1
    shown = shown_as(f"m/{name}")
    assert shown in page.text("td")
    assert any(text.startswith(f"m/x{shown_as(name)}") for text in page.text("summary"))


def test_the_verdict_comes_first_and_then_who_signed() -> None:
    page = Page(html_page(audited(refused("m/a"))))
    body = [text for tag, text in page.texts if tag in {"h1", "h2"}]
    assert body == ["rejected", "Who signed", "What was checked", "Why it is refused", "Sizes", "Files"]
    assert "Release key <i>" in page.text("strong")
    assert "Nobody." in page.text("strong")
    assert "ef" * 32 in page.text("code")


def test_an_accepted_report_says_so_and_has_nothing_refused() -> None:
    page = Page(html_page(audited(accepted("m/a"))))
    assert page.text("h1") == ["accepted"]
    assert "Why it is refused" not in page.text("h2")


def test_known_findings_are_told_apart() -> None:
    old = refused("m/old")
    page = Page(html_page(audited(old, known=(old,))))
    assert page.all("header") == [{"class": "known"}]
    assert page.text("h1") == ["rejected"]
    assert any("looked at by hand" in text for text in page.text("p"))
    assert [row["class"] for row in page.all("tr") if "id" in row] == ["known"]


def test_opcodes_are_shown_with_the_one_that_is_refused() -> None:
    lines = [OpcodeLine(0, "PROTO", "0 → 0", "protocol 4", None), OpcodeLine(11, "GLOBAL", "0 → 1", "", "no os.system")]
    page = Page(html_page(audited(refused("m/a")), {"m/a": OpcodeLines(lines, 50)}))
    assert [row for row in page.all("tr") if row.get("class") == "bad"] == [{"class": "bad"}]
    assert {"PROTO", "GLOBAL"} <= set(page.text("code"))
    assert " no os.system" in page.text("td")
    assert any("2 of 50" in text for text in page.text("caption"))


def test_every_file_has_a_row_and_every_help_is_told_once() -> None:
    report = large(1000)
    page = Page(html_page(report))
    rows = [row for row in page.all("tr") if "id" in row]
    assert [row["id"] for row in rows] == [f"f{n}" for n in range(1000)]
    assert sum(row["class"] == "rejected" for row in rows) == len(report.all_findings)
    helps = RULES["global-not-allowed"].help.partition("`")[0]
    assert sum(text.startswith(helps) for text in page.text("p")) == 1


def test_what_is_refused_is_drawn_even_if_it_is_small() -> None:
    files = [accepted(f"m/{n}", size=10_000) for n in range(html.MAX_TILES + 10)]
    page = Page(html_page(audited(*files, refused("m/tiny", size=1))))
    assert [r for r in page.all("rect") if r.get("class") == "rejected"]
    titles = page.text("title")
    assert "m/tiny: 1 B, rejected" in titles
    assert any(title.startswith("11 more files") and title.endswith("accepted") for title in titles)


def test_a_tile_of_many_files_is_not_green_if_one_of_them_is_refused() -> None:
    files = [refused(f"m/{n}", size=100) for n in range(html.MAX_TILES + 1)]
    titles = Page(html_page(audited(*files))).text("title")
    assert "1 more files: 100 B, rejected" in titles


@pytest.mark.parametrize("sizes", [[1], [6, 6, 4, 3, 2, 2, 1], [10**12, 1], [1] * 1000, list(range(2000, 0, -1))])
def test_tiles_fill_the_area_each_with_its_share(sizes: list[int]) -> None:
    placed = tiles(sizes, 1200, 380)
    total = sum(sizes)
    for size, tile in zip(sizes, placed, strict=True):
        assert tile.width * tile.height == pytest.approx(1200 * 380 * size / total, rel=1e-6)
        assert -1e-6 <= tile.x <= tile.x + tile.width <= 1200 + 1e-6
        assert -1e-6 <= tile.y <= tile.y + tile.height <= 380 + 1e-6


def test_tiles_do_not_overlap() -> None:
    placed = tiles([6, 6, 4, 3, 2, 2, 1], 600, 400)
    for n, a in enumerate(placed):
        for b in placed[:n]:
            apart_x = a.x + a.width <= b.x + 1e-9 or b.x + b.width <= a.x + 1e-9
            assert apart_x or a.y + a.height <= b.y + 1e-9 or b.y + b.height <= a.y + 1e-9


def test_many_refused_files_and_tensors_are_counted_where_they_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_REFUSED", 2)
    monkeypatch.setattr(html, "MAX_TENSORS", 1)
    page = Page(html_page(audited(*(refused(f"m/{n}") for n in range(5)), accepted("m/a"), accepted("m/b"))))
    paragraphs = page.text("p")
    assert "3 more are refused; the JSON report has the reasons of each." in paragraphs
    assert "1 more are not shown; the JSON report has all of them." in paragraphs


def test_what_is_to_be_pasted_keeps_its_lines_and_names_stay_names() -> None:
    hint = 'write:\n[[files.inert]]\npatterns = ["</pre><b>\x1b"]'
    finding = Finding("not-a-pickle", "of no known format", hint=hint)
    page = Page(html_page(audited(FileReport("m/a", "unknown", 1, "0" * 64, (finding,)))))
    assert page.unbalanced == 0
    assert ("p", "write:") in page.texts
    assert ["".join(text for tag, text in page.texts if tag == "pre")] == [
        '[[files.inert]]\npatterns = ["</pre><b>\\x1b"]'
    ]
