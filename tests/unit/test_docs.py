"""Every page under docs/ is run: its Python in one go, its command lines as shown, and its links are followed.

A page is told in the order of its blocks, in a folder of its own that is empty at the beginning. What a command is
shown to print has to be what it prints, but for digests and times.
"""

import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.readme_blocks import ROOT, all_blocks, commands, run, shape

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GENERATED = {"cli.md"}
"""Its examples are run by test_cli_examples.py, from where they are made."""

RUN = {"console", "python"}
SHOWN = {"json", "text", "toml", "yaml", ""}
"""Blocks that hold no commands."""

ELSEWHERE = {
    "docker": "there is no Docker daemon in a test; tests/unit/test_deploy.py reads the Dockerfile",
    "kubectl": "there is no cluster in a test; tests/unit/test_deploy.py runs what the pod runs",
    "make": "tests/unit/test_readme.py holds every target that is named against the Makefile",
}
"""Programs whose command lines are shown and cannot be run here."""


def page_text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": f"docs.{page.stem}"}
    for number, (language, block) in enumerate(all_blocks(page_text(page)), 1):
        if language == "python":
            exec(compile(block, f"{page.name}, block {number}", "exec", dont_inherit=True), names)  # noqa: S102 - ours
        elif language == "console":
            for command, shown in commands(block):
                check_command(command, shown, tmp_path, f"{page.name}, block {number}")
    assert not (tmp_path / "pwned").exists()


def check_command(command: str, shown: str, folder: Path, where: str) -> None:
    if shlex.split(command, comments=True)[0] in ELSEWHERE:
        return
    printed, code = run(command, folder)
    assert matches(printed, shown), f"{where}: {command}\n--- printed\n{printed}\n--- shown\n{shown}"
    verdicts = [line for line in printed.splitlines() if re.match(r"(rejected|not equal|different)\b", line)]
    expected = 1 if verdicts else 2 if printed.startswith("safeload: error:") else 0
    assert code == expected, f"{where}: {command} ended with {code}\n{printed}"


def matches(printed: str, shown: str) -> bool:
    """Whether a page shows what was printed; a line `...` stands for lines that it leaves out."""
    found, expected = shape(measured(printed)), shape(measured(shown))
    if "..." not in shown.splitlines():
        return found == expected
    lines = set(expected.splitlines()) - {"..."}
    return bool(lines) and lines <= set(found.splitlines())


def measured(text: str) -> str:
    """Return output without what a machine or the day decides: speeds, memory, versions and times."""
    text = re.sub(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z", "<time>", text)
    text = re.sub(r"\b[0-9.]+ (GB/s|GiB|MiB/s)", r"<n> \1", text)
    return re.sub(r"\b[0-9]+\.[0-9]+\.[0-9]+[-.\w]*", "<version>", text)


def test_a_changed_page_is_noticed(tmp_path: Path) -> None:
    check_command("echo a; echo b", "a\nb\n", tmp_path, "")
    check_command("echo a; echo b", "b\n...\n", tmp_path, "")
    for shown in ("a\n", "a\nc\n", "c\n...\n", "...\n"):
        with pytest.raises(AssertionError):
            check_command("echo a; echo b", shown, tmp_path, "")
    with pytest.raises(AssertionError, match="ended with 3"):
        check_command("echo a; exit 3", "a\n", tmp_path, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_block_that_nobody_runs(page: Path) -> None:
    languages = {language for language, _ in all_blocks(page_text(page))}
    assert languages <= RUN | SHOWN | ({"sh"} if page.name in GENERATED else set())
    # A fence that is indented, or opened and never closed, would hide a block from this test.
    assert page_text(page).count("```") == 2 * len(all_blocks(page_text(page)))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page_text(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "SECURITY.md"], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page_text(page), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
        if anchor:
            assert anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_ours_that_is_named_exists(page: Path) -> None:
    text = page_text(page)
    named = re.findall(r"`((?:tests|benchmarks|docs|examples|deploy|schemas|policies|safeload)/[\w./-]+\.\w+)`", text)
    named += [f"{module.replace('.', '/')}.py" for module in re.findall(r"python -m (benchmarks\.\w+)", text)]
    assert [name for name in named if not (ROOT / name).exists()] == []


# ---------------------------------------------------------------- pages that are made


def script(name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": name, "__file__": str(DOCS / f"{name}.py")}
    source = (DOCS / f"{name}.py").read_text(encoding="utf-8")
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), names)  # noqa: S102 - ours
    return lambda function, *arguments: names[function](*arguments)


def test_the_page_of_the_command_is_current() -> None:
    assert page_text(DOCS / "cli.md") == script("make_cli")("page_text"), "run: python docs/make_cli.py"


def picture_lines(svg: str) -> list[str]:
    """Return the text of a picture of a terminal, line by line."""
    root = ET.fromstring(svg)  # noqa: S314 - made by us
    rows: dict[float, list[tuple[float, str]]] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in text.attrib:
            place = float(text.attrib["y"])
            rows.setdefault(place, []).append((float(text.attrib["x"]), "".join(text.itertext())))
    return ["".join(part for _, part in sorted(row)).replace("\xa0", " ").rstrip() for _, row in sorted(rows.items())]


@pytest.fixture(scope="module")
def demo() -> str:
    return "\n".join(script("make_demo")("shown", script("make_demo")("recorded")))


def test_the_picture_is_of_the_demo_as_it_is_now(demo: str) -> None:
    def same(text: str) -> str:
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        text = re.sub(r"sha256:[0-9a-f]{12}\.\.\.", "sha256:<digest>...", text)
        return re.sub(r"in [0-9.]+ s\.", "in <time>.", text)

    drawn = same("\n".join(line for line in picture_lines(page_text(DOCS / "demo.svg")) if line))
    printed = same("\n".join(line.rstrip() for line in demo.splitlines() if line.strip()))
    assert drawn == printed, "run: python docs/make_demo.py"


def test_the_picture_asks_nobody_for_anything() -> None:
    svg = page_text(DOCS / "demo.svg")
    assert set(re.findall(r"https?://[^\s\"']+", svg)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<image|<foreignObject|\bhref=|@import|url\((?!#)", svg)


# ---------------------------------------------------------------- what the specification says of the code


def test_the_limits_of_strict_json_are_those_of_the_specification() -> None:
    from safeload import manifest
    from safeload.trust import dsse, store, strict_json

    spec = page_text(DOCS / "spec.md")
    mib = 1024 * 1024
    rows = {
        "envelope": (dsse.MAX_ENVELOPE_BYTES // mib, dsse._MAX_DEPTH, dsse._MAX_VALUES),
        "manifest (payload)": (manifest.MAX_PAYLOAD_BYTES // mib, manifest._MAX_DEPTH, strict_json.MAX_VALUES),
        "trust store": (store.MAX_TRUST_BYTES // mib, store._MAX_DEPTH, strict_json.MAX_VALUES),
    }
    for name, (size, depth, values) in rows.items():
        assert f"| {name} | {size} MiB | {depth} | {values:,} |" in spec


def test_every_field_of_the_manifest_stands_in_the_specification() -> None:
    from dataclasses import fields

    from safeload.manifest import FileEntry, Manifest, ManifestTensor
    from safeload.trust.store import _StoreFile

    manifest, files, tensors = re.split(r"^### (?:Files|Tensors)$", page_text(DOCS / "spec.md"), flags=re.MULTILINE)
    manifest = manifest[manifest.index("## 3. The manifest") :]
    store = tensors[tensors.index("## 6. The trust store") :]
    for text, names in (
        (manifest, Manifest.model_fields),
        (files, [field.name for field in fields(FileEntry)]),
        (tensors, [field.name for field in fields(ManifestTensor)]),
        (store, _StoreFile.model_fields),
    ):
        rows = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
        assert [name for name in names if f"`{name}`" not in rows] == []


def test_every_role_and_format_stands_in_the_specification() -> None:
    from typing import get_args

    from safeload.manifest import FORMATS, Role

    spec = page_text(DOCS / "spec.md")
    assert [name for name in (*FORMATS, *get_args(Role)) if f"`{name}`" not in spec] == []


def test_every_key_of_a_policy_stands_in_the_specification() -> None:
    from safeload.policy import Policy

    section = page_text(DOCS / "spec.md").split("## 7. The policy")[1].split("## 8.")[0]
    keys = {"version", "name", "description", "formats", "pickle", "files", "shards", "limits"}
    assert {name for name in Policy.model_fields if name in keys} == keys
    assert [name for name in keys if name not in section] == []


def test_the_glossary_is_in_order_and_says_each_term_once() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*", page_text(DOCS / "glossary.md"), re.MULTILINE)
    assert len(terms) > 20
    assert terms == sorted(set(terms), key=str.casefold)


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page_text(DOCS / "threat-model.md")))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def table(page: str, below: str) -> dict[str, list[str]]:
    """Return the cells of the first table below some text, by the first cell of each row."""
    lines = page[page.index(below) :].partition("\n|")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*) \|$", lines, re.MULTILINE)
    return {cells[0]: cells[1:] for cells in (row.split(" | ") for row in rows)}


def test_what_the_comparison_says_of_our_scan_is_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import compare_verdicts
    from safeload import cli

    shown = table(page_text(DOCS / "comparison.md"), "compare_verdicts")
    for number, case in enumerate(compare_verdicts.cases()):
        path = tmp_path / str(number) / case.folder / case.name
        path.parent.mkdir(parents=True)
        path.write_bytes(case.data)
        code = cli.main(["scan", str(path.parent if case.folder else path)])
        assert shown[case.what][0] == {0: "passed", 1: "refused"}[code], case.what
        assert (code == 0) is case.is_good, case.what
    capsys.readouterr()
    assert len(shown) == number + 1


def test_what_the_comparison_says_of_damage_is_so(tmp_path: Path) -> None:
    from benchmarks import compare_damage

    shown = table(page_text(DOCS / "comparison.md"), "compare_damage")
    assert list(shown) == list(compare_damage.DAMAGES)
    compare_damage.make(tmp_path / "origin")
    for number, (what, damage) in enumerate(compare_damage.DAMAGES.items()):
        shutil.copytree(tmp_path / "origin", tmp_path / str(number))
        damage(tmp_path / str(number) / "checkpoint")
        assert shown[what][0] == compare_damage.by_safeload(tmp_path / str(number)), what


def test_all_pages_are_there() -> None:
    assert {page.name for page in PAGES} >= {
        *("cli.md", "comparison.md", "glossary.md", "spec.md", "threat-model.md"),
        *("tutorial-auditor.md", "tutorial-gatekeeper.md", "tutorial-inference.md"),
    }


def test_the_script_of_the_command_s_page_says_whether_it_is_current() -> None:
    command = [sys.executable, str(DOCS / "make_cli.py"), "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
