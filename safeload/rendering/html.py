"""One page that holds a whole report: to be forwarded, kept, and opened anywhere, years later and offline.

The page asks for nothing from anywhere, and its content security policy lets a browser run exactly one script and apply
one style sheet, both named by their digest: a name from a hostile checkpoint that got through the escaping would still
be text. Everything is there without the script; it only filters the table of files.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_markup
from typing import Any, Final

from safeload.errors import Finding
from safeload.rendering.rules import is_known, known_reasons, rule_of
from safeload.rendering.text import count, printable, shape_text, shown
from safeload.rendering.treemap import Tile, tiles
from safeload.report import FileReport, Report
from safeload.sizes import human_size

MAX_REFUSED: Final = 200
"""Refused files that are shown with all that is wrong with them; each is in the table of files all the same."""

MAX_TENSORS: Final = 20_000
"""Rows of tensors: some 3 MB of page. The JSON report has all of them."""

MAX_TILES: Final = 1500
"""Files that are drawn one by one; the others share a tile, as each would be thinner than a line."""

_OPEN_REFUSED: Final = 10
_MAP_WIDTH, _MAP_HEIGHT = 1200, 380
_PIXELS_A_CHARACTER: Final = 6.6
"""Of the labels in the drawing, at their size of 11 pixels."""


@dataclass(frozen=True, slots=True)
class OpcodeLine:
    """One instruction of a refused pickle.

    Attributes:
        offset: Where it stands, in bytes.
        opcode: Its name.
        stack: How many values lay on the stack before and after it.
        text: What it left there.
        refusal: Why it is refused, or None.
    """

    offset: int
    opcode: str
    stack: str
    text: str
    refusal: str | None


@dataclass(frozen=True, slots=True)
class OpcodeLines:
    """The instructions of one refused pickle: those that are shown, and how many there are."""

    lines: Sequence[OpcodeLine]
    n_all: int


def html_page(report: Report, opcodes: Mapping[str, OpcodeLines] | None = None) -> str:
    """Return a report as one HTML document.

    Args:
        report: What to show; where it is that of an audit, its facts say so.
        opcodes: What refused pickles would have had a reader do, by the path of the file.
    """
    return "\n".join(_page(report, opcodes or {})) + "\n"


def _page(report: Report, opcodes: Mapping[str, OpcodeLines]) -> Iterator[str]:
    sources = f"script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield "<head>"
    yield '<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="referrer" content="no-referrer">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{report.verdict}: safeload report</title>"
    yield f"<style>{_STYLE}</style>"
    yield "</head>"
    yield "<body>"
    yield from _banner(report)
    yield "<main>"
    yield from _signers(report)
    yield from _checks(report)
    yield from _refused(report, opcodes)
    yield from _sizes(report)
    yield from _files(report)
    yield from _tensors(report)
    yield "</main>"
    yield f"<script>{_SCRIPT}</script>"
    yield "</body>"
    yield "</html>"


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _name(untrusted: str) -> str:
    """Return a name from a checkpoint as text of the page."""
    return escape_markup(shown(untrusted))


def _words(sentence: object) -> str:
    """Return words of ours, which may quote such a name, as text of the page."""
    return escape_markup(printable(str(sentence)))


# ---------------------------------------------------------------- verdict, signers, checks


def _banner(report: Report) -> Iterator[str]:
    reasons = known_reasons(report)
    findings = report.all_findings
    new = [finding for finding in findings if not is_known(finding, reasons)]
    audit = _audit(report)
    state = report.verdict if new or report.verdict == "accepted" or not audit else "known"
    refused = sum(bool(file.findings) for file in report.files)
    size = human_size(sum(file.size or 0 for file in report.files))
    yield f'<header class="{state}">'
    yield f"<h1>{report.verdict}</h1>"
    if report.verdict == "accepted":
        yield "<p>Nothing was found to refuse. That says nothing about what the numbers do.</p>"
    elif findings:
        known = f", {len(findings) - len(new)} of them known" if reasons else ""
        verb = "is" if len(findings) == 1 else "are"
        reason = count(len(findings), "reason")
        yield f"<p>There {verb} {reason} to refuse{known}. Do not load what is listed below.</p>"
    else:
        yield "<p>No file was found.</p>"
    if audit:
        yield f'<p>The audit has <strong class="gate">{_words(audit.get("gate"))}</strong>.</p>'
    facts = [f"{len(report.files):,} file{'' if len(report.files) == 1 else 's'}, {size}", f"{refused:,} refused"]
    tool = report.facts.get("tool")
    if isinstance(tool, Mapping):
        facts.append(f"{_words(tool.get('name'))} {_words(tool.get('version'))}")
    if report.facts.get("time"):
        facts.append(_words(report.facts["time"]))
    yield f'<p class="facts">{" · ".join(facts)}</p>'
    yield "</header>"


def _audit(report: Report) -> Mapping[str, Any]:
    audit = report.facts.get("audit")
    return audit if isinstance(audit, Mapping) else {}


def _signers(report: Report) -> Iterator[str]:
    whole = {"path": "", "manifest": report.facts.get("manifest"), "bundle": report.facts.get("bundle")}
    roots: Sequence[Mapping[str, Any]] = _audit(report).get("roots") or [whole]
    yield '<section id="signed"><h2>Who signed</h2><div class="cards">'
    for root in roots:
        manifest, bundle = root.get("manifest"), root.get("bundle")
        yield f'<div class="card {"signed" if manifest or bundle else "unsigned"}">'
        if root["path"]:
            yield f"<h3>{_name(str(root['path']))}</h3>"
        if manifest:
            yield from _manifest(manifest)
        elif bundle:
            yield from _manifest({**bundle, "revision": f"signed by {bundle.get('method')}"})
        else:
            yield f"<p><strong>Nobody.</strong> {_NOBODY}</p>"
        yield "</div>"
    yield "</div>"
    policy = report.facts.get("policy")
    if isinstance(policy, Mapping):
        name, sha256 = _words(policy.get("name")), _words(policy.get("sha256"))
        yield f"<p>Held against the policy <strong>{name}</strong> <code>sha256:{sha256}</code></p>"
    yield "</section>"


_NOBODY: Final = "It was scanned, and nothing is known of who made it, nor whether it is whole."


def _manifest(manifest: Mapping[str, Any]) -> Iterator[str]:
    yield "<ul>"
    for signer in manifest.get("signers", ()):
        name = _words(signer.get("name") or "a key without a name")
        yield f"<li><strong>{name}</strong> <code>{_words(signer.get('keyid'))}</code></li>"
    yield "</ul><dl>"
    shown_keys = {"model": "model", "revision": "revision", "version": "version", "publisher": "publisher"}
    shown_keys |= {"expires": "expires", "sha256": "manifest"}
    for key, label in shown_keys.items():
        if manifest.get(key) is not None:
            late = " (past its time)" if key == "expires" and manifest.get("expired") else ""
            yield f"<dt>{label}</dt><dd>{_words(manifest[key])}{late}</dd>"
    yield "</dl>"


def _checks(report: Report) -> Iterator[str]:
    audit = _audit(report)
    if not audit:
        return
    yield '<section id="checks"><h2>What was checked</h2><div class="cards">'
    for title, key, kind in (("Checked", "checked", "signed"), ("Not checked", "not_checked", "unsigned")):
        lines = "".join(f"<li>{_words(line)}</li>" for line in audit.get(key, ()))
        yield f'<div class="card {kind}"><h3>{title}</h3><ul>{lines}</ul></div>'
    yield "</div></section>"


# ---------------------------------------------------------------- what is refused


def _refused(report: Report, opcodes: Mapping[str, OpcodeLines]) -> Iterator[str]:
    reasons = known_reasons(report)
    refused = [file for file in report.files if file.findings]
    # What is new comes first; sorting keeps the order of the files among themselves.
    refused.sort(key=lambda file: all((file.path, finding.code) in reasons for finding in file.findings))
    if not refused and not report.findings:
        return
    yield '<section id="refused"><h2>Why it is refused</h2>'
    told: set[str] = set()
    for finding in report.findings[:MAX_REFUSED]:
        path = "" if finding.file is None else f"<h3>{_name(finding.file)}</h3>"
        yield f'<div class="card rejected">{path}{_finding(finding, reasons, told)}</div>'
    for number, file in enumerate(refused[:MAX_REFUSED]):
        codes = ", ".join(sorted({finding.code for finding in file.findings}))
        yield f"<details{' open' if number < _OPEN_REFUSED else ''}>"
        yield f'<summary>{_name(file.path)} <span class="code">{_words(codes)}</span></summary>'
        for finding in file.findings:
            yield _finding(finding.in_file(file.path), reasons, told)
        if file.globals:
            names = ", ".join(f"<code>{_name(name)}</code>" for name in file.globals)
            yield f"<p>It names {names}.</p>"
        if file.path in opcodes:
            yield from _opcodes(opcodes[file.path])
        yield "</details>"
    left = max(0, len(refused) - MAX_REFUSED) + max(0, len(report.findings) - MAX_REFUSED)
    if left:
        yield f"<p>{left} more are refused; the JSON report has the reasons of each.</p>"
    yield "</section>"


def _finding(finding: Finding, reasons: Mapping[tuple[str, str], str], told: set[str]) -> str:
    """Return a finding, and why that is a reason to refuse where this page has not told it yet."""
    where = "" if finding.offset is None else f" <span>at byte {finding.offset:,}</span>"
    rule = rule_of(finding.code)
    lines = [f'<p class="finding"><code>{_words(finding.code)}</code> {_words(finding.message)}{where}</p>']
    if finding.hint is not None:
        first, *to_paste = finding.hint.split("\n")
        lines.append(f'<p class="hint">{_words(first)}</p>')
        if to_paste:
            # Line by line, so that a name's line feed is shown as one and begins no line of its own.
            lines.append("<pre>" + "\n".join(map(_words, to_paste)) + "</pre>")
    if is_known(finding, reasons):
        lines.append(f'<p class="hint">Known: {_words(reasons[finding.file or "", finding.code])}</p>')
    if rule.kind not in told:
        told.add(rule.kind)
        # The help is ours: what stands between backticks is something to type.
        parts = enumerate(escape_markup(rule.help).split("`"))
        words = "".join(f"<code>{part}</code>" if number % 2 else part for number, part in parts)
        lines.append(f'<p class="why">{words}</p>')
    return "".join(lines)


def _opcodes(opcodes: OpcodeLines) -> Iterator[str]:
    yield '<div class="scroll"><table class="opcodes">'
    yield "<caption>What a reader that unpickles would do, instruction by instruction"
    if opcodes.n_all > len(opcodes.lines):
        yield f" ({len(opcodes.lines):,} of {opcodes.n_all:,}: the first, and those before each refusal)"
    yield "</caption><thead><tr>"
    yield from (f'<th scope="col">{title}</th>' for title in ("byte", "instruction", "stack", "what it leaves there"))
    yield "</tr></thead><tbody>"
    for line in opcodes.lines:
        bad = line.refusal is not None
        text = f"<strong>refused:</strong> {_words(line.refusal)}" if bad else _words(line.text)
        cells = f"<td>{line.offset:,}</td><td><code>{_words(line.opcode)}</code></td><td>{_words(line.stack)}</td>"
        start = '<tr class="bad">' if bad else "<tr>"
        yield f"{start}{cells}<td>{text}</td></tr>"
    yield "</tbody></table></div>"


# ---------------------------------------------------------------- sizes, files, tensors


def _sizes(report: Report) -> Iterator[str]:
    states = _states(report)
    sizes = [file.size or 0 for file in report.files]
    # What is refused is drawn before what is large: it must not vanish among smaller files.
    order = sorted((n for n in range(len(sizes)) if sizes[n]), key=lambda n: (states[n] == "accepted", -sizes[n]))
    rest = order[MAX_TILES:]
    drawn: list[tuple[int, int | None]] = [(sizes[n], n) for n in order[:MAX_TILES]]
    drawn += [(sum(sizes[n] for n in rest), None)] if rest else []
    drawn.sort(key=lambda each: each[0], reverse=True)
    if not drawn:
        return
    yield '<section id="sizes"><h2>Sizes</h2>'
    label = "The files, each as large as its share of the bytes"
    yield f'<svg viewBox="0 0 {_MAP_WIDTH} {_MAP_HEIGHT}" role="img" aria-label="{label}">'
    yield '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    yield '<rect width="8" height="8" class="bad"/><rect width="3" height="8" class="line"/></pattern></defs>'
    for (size, number), tile in zip(drawn, tiles([size for size, _ in drawn], _MAP_WIDTH, _MAP_HEIGHT), strict=True):
        if number is None:
            state = "rejected" if any(states[n] != "accepted" for n in rest) else "accepted"
            name = f"{len(rest):,} more files"
            yield f"<g><title>{name}: {human_size(size)}, {state}</title>"
            yield from _tile(tile, state, name)
            yield "</g>"
        else:
            path = report.files[number].path
            yield f'<a href="#f{number}"><title>{_name(path)}: {human_size(size)}, {states[number]}</title>'
            yield from _tile(tile, states[number], path.rpartition("/")[2])
            yield "</a>"
    yield "</svg>"
    yield '<p class="facts">Each file is as large as its share of the bytes; refused ones are hatched.</p></section>'


def _tile(tile: Tile, state: str, name: str) -> Iterator[str]:
    place = f'x="{tile.x:.1f}" y="{tile.y:.1f}" width="{tile.width:.1f}" height="{tile.height:.1f}"'
    yield f'<rect {place} class="{state}"/>'
    room = int((tile.width - 8) / _PIXELS_A_CHARACTER)
    if room >= 6 and tile.height >= 18:
        label = shown(name)
        label = label if len(label) <= room else f"{label[: room - 1]}…"
        yield f'<text x="{tile.x + 5:.1f}" y="{tile.y + 14:.1f}">{escape_markup(label)}</text>'


def _states(report: Report) -> list[str]:
    """Return for each file whether it is accepted, rejected, or rejected for known reasons only."""
    reasons = known_reasons(report)
    loose = {finding.file for finding in report.findings}
    states = []
    for file in report.files:
        is_old = bool(file.findings) and all((file.path, finding.code) in reasons for finding in file.findings)
        refused = bool(file.findings) or file.path in loose
        states.append("known" if is_old and file.path not in loose else "rejected" if refused else "accepted")
    return states


def _files(report: Report) -> Iterator[str]:
    states = _states(report)
    yield '<section id="files"><h2>Files</h2>'
    yield '<form id="filter" hidden><label>Find <input id="words" type="search" autocomplete="off" spellcheck="false" '
    yield 'placeholder="path, format, code or digest"></label><label>Show <select id="state">'
    yield '<option value="">all</option>'
    yield "<option>accepted</option><option>rejected</option><option>known</option></select></label>"
    yield f'<output id="shown" aria-live="polite">{count(len(report.files), "file")}</output></form>'
    yield '<div class="scroll"><table id="table"><thead><tr>'
    titles = ("verdict", "path", "format", "tensors", "bytes", "SHA-256", "findings")
    yield from (f'<th scope="col">{title}</th>' for title in titles)
    yield "</tr></thead><tbody>"
    for number, (file, state) in enumerate(zip(report.files, states, strict=True)):
        yield _file_row(number, file, state)
    yield "</tbody></table></div></section>"


def _file_row(number: int, file: FileReport, state: str) -> str:
    codes = ", ".join(dict.fromkeys(finding.code for finding in file.findings))
    cells = (
        f'<td class="state">{state}</td>',
        f'<td class="path">{_name(file.path)}</td>',
        f"<td>{_words(file.format)}</td>",
        f'<td class="number">{len(file.tensors) or ""}</td>',
        f'<td class="number">{"" if file.size is None else f"{file.size:,}"}</td>',
        f'<td><code class="digest">{_words(file.sha256 or "")}</code></td>',
        f"<td>{_words(codes)}</td>",
    )
    return f'<tr id="f{number}" class="{state}">{"".join(cells)}</tr>'


def _tensors(report: Report) -> Iterator[str]:
    total = sum(len(file.tensors) for file in report.files)
    if not total:
        return
    yield f'<section id="tensors"><h2>Tensors</h2><p class="facts">{count(total, "tensor")}</p>'
    left = MAX_TENSORS
    for file in report.files:
        if not file.tensors or left <= 0:
            continue
        yield f"<details><summary>{_name(file.path)} <span>{count(len(file.tensors), 'tensor')}</span></summary>"
        yield '<div class="scroll"><table><thead><tr>'
        yield from (f'<th scope="col">{title}</th>' for title in ("name", "type", "shape", "order", "offset", "bytes"))
        yield "</tr></thead><tbody>"
        for tensor in file.tensors[:left]:
            extent = tensor.extent
            offset = "decoded" if extent.inline is not None else f"{extent.offset:,}"
            yield (
                f'<tr><td class="path">{_name(tensor.name) or "(the whole file)"}</td><td>{_words(tensor.dtype)}</td>'
                f"<td>{shape_text(tensor.shape)}</td><td>{tensor.order}</td>"
                f'<td class="number">{offset}</td><td class="number">{extent.nbytes:,}</td></tr>'
            )
        yield "</tbody></table></div></details>"
        left -= len(file.tensors)
    if total > MAX_TENSORS:
        yield f"<p>{total - MAX_TENSORS:,} more are not shown; the JSON report has all of them.</p>"
    yield "</section>"


_STYLE: Final = """
:root{--back:#fff;--text:#1c2430;--soft:#5b6676;--rule:#dfe3ea;--card:#f6f7f9;--good:#14713d;--goodback:#e4f3ea;
--bad:#a8161f;--badback:#fbe9ea;--known:#8a5a00;--knownback:#fbf1dd;--goodtile:#bfe0cc;--badtile:#f0a9ad;
--knowntile:#f0d9a8}
@media (prefers-color-scheme:dark){:root{--back:#12161c;--text:#e5e9ef;--soft:#9aa5b4;--rule:#2b333e;--card:#1a2029;
--good:#6fd39b;--goodback:#12301f;--bad:#ff8d93;--badback:#3a1519;--known:#f0bf63;--knownback:#352711;--goodtile:#1f5136;
--badtile:#7a2a30;--knowntile:#6b4d18}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,
-apple-system,"Segoe UI",Roboto,sans-serif}
main,header{padding:1.2rem max(1.2rem,calc((100vw - 76rem)/2))}
header{border-bottom:4px solid}
header.accepted{background:var(--goodback);border-color:var(--good)}
header.rejected{background:var(--badback);border-color:var(--bad)}
header.known{background:var(--knownback);border-color:var(--known)}
h1{margin:0;font-size:2.6rem;line-height:1.1;letter-spacing:-.02em}
header.accepted h1{color:var(--good)}header.rejected h1{color:var(--bad)}header.known h1{color:var(--known)}
header p{margin:.4rem 0 0}
h2{font-size:1.25rem;margin:1.8rem 0 .7rem}
h3{font-size:1rem;margin:0 0 .4rem;overflow-wrap:anywhere}
.facts,.why,.hint,summary span,label{color:var(--soft)}
.facts,.why{font-size:.87rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:.8rem}
.card{background:var(--card);border-left:4px solid var(--rule);border-radius:4px;padding:.8rem 1rem;
overflow-wrap:anywhere}
.card.signed{border-color:var(--good)}.card.unsigned{border-color:var(--known)}
.card.rejected{border-color:var(--bad);margin-bottom:.6rem}
.card ul{margin:.2rem 0;padding-left:1.1rem}.card p{margin:.3rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .8rem;margin:.5rem 0 0;font-size:.9rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
pre{margin:.2rem 0 .6rem;padding:.4rem .7rem;border:1px solid var(--rule);border-radius:4px;white-space:pre-wrap;
font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
code{font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
details{border:1px solid var(--rule);border-radius:4px;margin:0 0 .5rem;padding:.4rem .9rem;content-visibility:auto;
contain-intrinsic-size:auto 2.4rem}
#refused details{border-left:4px solid var(--bad)}
summary{cursor:pointer;overflow-wrap:anywhere;font-weight:600}
summary span{font-weight:400;font-size:.87rem;margin-left:.5rem}
.finding{margin:.6rem 0 .2rem}.finding code{color:var(--bad);font-weight:600;margin-right:.4rem}
.finding span{color:var(--soft);white-space:nowrap}
.hint,.why{margin:.2rem 0}
.hint{overflow-wrap:anywhere}
.scroll{overflow:auto;max-height:34rem;border:1px solid var(--rule);border-radius:4px;margin:.5rem 0}
table{border-collapse:collapse;width:100%;font-size:.87rem}
caption{text-align:left;padding:.4rem .6rem;color:var(--soft)}
th,td{padding:.28rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{position:sticky;top:0;background:var(--card);font-weight:600;white-space:nowrap}
.number,.opcodes td:first-child{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.path{overflow-wrap:anywhere;min-width:14rem}
.digest{display:block;max-width:10rem;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;user-select:all}
tr.accepted .state{color:var(--good)}tr.rejected .state{color:var(--bad);font-weight:600}
tr.known .state{color:var(--known)}
tr.rejected{background:var(--badback)}tr.known{background:var(--knownback)}tr.bad{background:var(--badback)}
tr:target{outline:2px solid var(--text);outline-offset:-2px}
form{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:center;margin:0 0 .5rem}form[hidden]{display:none}
input,select{font:inherit;color:inherit;background:var(--back);border:1px solid var(--rule);border-radius:4px;
padding:.25rem .5rem}
input{width:min(24rem,70vw)}output{margin-left:auto;color:var(--soft)}
svg{display:block;width:100%;height:auto;border:1px solid var(--rule)}
svg rect{stroke:var(--back);stroke-width:1}
svg rect.accepted{fill:var(--goodtile)}svg rect.rejected{fill:url(#hatch)}svg rect.known{fill:var(--knowntile)}
svg .bad{fill:var(--badtile);stroke:none}svg .line{fill:var(--bad);opacity:.35;stroke:none}
svg text{font-size:11px;fill:var(--text);stroke:var(--back);stroke-width:3px;stroke-opacity:.75;paint-order:stroke;
pointer-events:none}
svg a:hover rect,svg a:focus rect{stroke:var(--text);stroke-width:2}
@media print{.scroll{max-height:none;overflow:visible}form{display:none}}
"""

_SCRIPT: Final = """
"use strict";
(function () {
  var rows = Array.prototype.slice.call(document.querySelectorAll("#table tbody tr"));
  var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });
  var form = document.getElementById("filter");
  var words = document.getElementById("words");
  var state = document.getElementById("state");
  var shown = document.getElementById("shown");
  function filter() {
    var wanted = words.value.toLowerCase().split(/\\s+/).filter(Boolean);
    var n = 0;
    rows.forEach(function (row, i) {
      var fits = (!state.value || row.className === state.value)
        && wanted.every(function (word) { return texts[i].indexOf(word) >= 0; });
      row.hidden = !fits;
      n += fits ? 1 : 0;
    });
    shown.textContent = n + " of " + rows.length + " files";
  }
  function follow() {
    var row = document.getElementById(location.hash.slice(1));
    if (row && row.hidden) { words.value = ""; state.value = ""; filter(); }
    if (row) { row.scrollIntoView({ block: "center" }); }
  }
  form.hidden = false;
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  words.addEventListener("input", filter);
  state.addEventListener("change", filter);
  window.addEventListener("hashchange", follow);
  filter();
})();
"""
