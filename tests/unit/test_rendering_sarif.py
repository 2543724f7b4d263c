"""The SARIF log against OASIS's schema, and what the schema does not say: places, identities, and no links in names."""

import hashlib
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped] # its types are a package of their own
import pytest

from safeload.errors import Finding
from safeload.rendering import sarif
from safeload.rendering.rules import RULES
from safeload.rendering.sarif import sarif_json, uri
from safeload.report import FileReport, Report
from tests.reports_sample import RUN, accepted, audited, hostile, large, refused

SCHEMA = json.loads((Path(__file__).parent.parent / "sarif" / "sarif-2.1.0.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def run_of(report: Report) -> Any:
    log = json.loads(sarif_json(report))
    assert [error.message for error in VALIDATOR.iter_errors(log)] == []
    (run,) = log["runs"]
    return run


def every_code() -> Report:
    findings = (Finding(code, "expected a, found b", offset=n or None) for n, code in enumerate(RULES))
    return Report((FileReport("x", "pickle", 1, "0" * 64, tuple(findings)),), (), RUN)


@pytest.mark.parametrize(
    "report",
    [audited(accepted("m/a")), audited(), hostile(), large(2000), every_code(), Report((refused("x"),))],
    ids=["accepted", "empty", "hostile", "large", "every-code", "no-facts"],
)
def test_a_log_is_what_the_schema_says(report: Report) -> None:
    assert len(run_of(report)["results"]) == len(report.all_findings)


def test_the_schema_would_notice() -> None:
    log = json.loads(sarif_json(audited(refused("m/a"))))
    log["runs"][0]["results"][0]["message"]["txt"] = "misspelled"
    assert not VALIDATOR.is_valid(log)


def test_a_result_says_where_to_the_byte() -> None:
    (result,) = run_of(audited(refused("m/a b")))["results"]
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "m/a%20b"},
        "region": {"byteOffset": 17, "byteLength": 1},
    }
    assert "m/a b: policy grok-1 does not allow os.system (at byte 17). Hint: safeload explain it." in str(result)


def test_a_finding_of_no_file_is_shown_at_the_directory() -> None:
    (result,) = run_of(audited(findings=(Finding("untrusted-key", "nobody signed", offset=3),)))["results"]
    assert result["locations"] == [{"physicalLocation": {"artifactLocation": {"uri": "m"}}}]


def test_what_lies_in_the_repository_is_named_from_there() -> None:
    report = audited(refused("/repo/m/a"), refused("/repository/b"), refused("c"))
    run = json.loads(sarif_json(report, root="/repo"))["runs"][0]
    places = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]]
    assert places == ["m/a", "file:///repository/b", "c"]
    assert [artifact["location"]["uri"] for artifact in run["artifacts"]] == places
    # The same file is the same alert, however it was named.
    relative = audited(replace(report.files[0], path="m/a"))
    (there,) = json.loads(sarif_json(relative, root="/repo"))["runs"][0]["results"]
    assert there["partialFingerprints"] == run["results"][0]["partialFingerprints"]


def test_the_fingerprint_that_github_looks_at_tells_findings_apart() -> None:
    twice = (Finding("index-disagrees", "one"), Finding("index-disagrees", "other"))
    report = audited(FileReport("m/i", "index", 1, "0" * 64, (*twice, Finding("bad-index", "x", offset=7))))
    prints = [result["partialFingerprints"]["primaryLocationLineHash"] for result in run_of(report)["results"]]
    assert len(set(prints)) == 3
    assert prints[0].removesuffix(":1") == prints[1].removesuffix(":2")


def test_logs_of_different_checkpoints_have_the_same_rules() -> None:
    one, other = run_of(audited(accepted("m/a"))), run_of(audited(refused("m/b"), refused("m/c", "truncated")))
    assert one["tool"] == other["tool"]


def test_a_code_without_a_title_is_a_rule_all_the_same() -> None:
    run = run_of(audited(refused("m/b", "no-such-code")))
    assert run["tool"]["driver"]["rules"][run["results"][0]["ruleIndex"]]["id"] == "no-such-code"


def test_texts_are_no_longer_than_github_takes() -> None:
    for rule in run_of(every_code())["tool"]["driver"]["rules"]:
        assert len(rule["name"]) <= 255
        assert len(rule["shortDescription"]["text"]) <= 1024
        assert len(rule["fullDescription"]["text"]) <= 1024
        assert len(rule["properties"]["tags"]) <= 10


def test_no_more_results_than_are_taken_and_the_worst_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif, "MAX_RESULTS", 3)
    old = refused("m/old")
    files = [refused(f"m/{n}", "truncated") for n in range(4)]
    run = run_of(audited(old, *files, refused("m/worst"), known=(old,)))
    shown = [result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]]
    assert shown == ["m/worst", "m/0", "m/1"]
    assert [artifact["location"]["uri"] for artifact in run["artifacts"]] == shown
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("3 more findings are not in this log")


def test_a_log_is_no_longer_than_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif, "MAX_COMPRESSED_BYTES", 60_000)
    names = [hashlib.sha512(str(n).encode()).hexdigest() * 20 for n in range(400)]
    log = sarif_json(audited(*(refused(f"m/{name}") for name in names)))
    assert len(zlib.compress(log.encode())) <= 60_000
    (run,) = json.loads(log)["runs"]
    assert 0 < len(run["results"]) < 400
    assert "more findings" in str(run["invocations"])


def test_a_log_that_fits_leaves_nothing_out() -> None:
    assert "toolExecutionNotifications" not in run_of(large(2000))["invocations"][0]


def test_rules_are_those_that_results_refer_to() -> None:
    run = run_of(every_code())
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(RULES)
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules)


def test_code_that_would_run_is_the_most_severe() -> None:
    rules = {
        rule["id"]: rule["properties"]["security-severity"] for rule in run_of(every_code())["tool"]["driver"]["rules"]
    }
    assert float(rules["global-not-allowed"]) > float(rules["digest-mismatch"]) > float(rules["truncated"])


def test_the_fingerprint_stays_with_code_file_digest_and_place() -> None:
    def print_of(file: FileReport) -> str:
        (result,) = run_of(audited(file))["results"]
        return str(result["partialFingerprints"])

    base = refused("m/a")
    assert print_of(base) == print_of(refused("m/a"))
    others = [refused("m/b"), refused("m/a", "bad-call")]
    others.append(FileReport("m/a", "pickle", 1, "0" * 64, base.findings))
    others.append(FileReport("m/a", "pickle", 1, base.sha256, (Finding("global-not-allowed", "m", offset=18),)))
    assert len({print_of(base), *map(print_of, others)}) == 5


def test_what_is_known_is_suppressed_with_its_reason_and_what_is_new_is_not() -> None:
    old, new = refused("m/old"), refused("m/new")
    first, second = run_of(audited(old, new, known=(old,)))["results"]
    assert (first["baselineState"], second["baselineState"]) == ("unchanged", "new")
    assert first["suppressions"] == [{"kind": "external", "status": "accepted", "justification": "looked at by hand"}]
    assert "suppressions" not in second


def test_without_a_baseline_nothing_is_called_new() -> None:
    assert "baselineState" not in run_of(audited(refused("m/a")))["results"][0]


def test_a_name_is_no_link_and_no_placeholder() -> None:
    (result,) = run_of(audited(refused("m/[click](https://example.org){0}")))["results"]
    assert r"m/\[click\](https://example.org){{0}}: policy" in result["message"]["text"]


def test_artifacts_are_the_refused_files_with_their_digests() -> None:
    bad = refused("m/a")
    (artifact,) = run_of(audited(bad, accepted("m/b")))["artifacts"]
    assert artifact["hashes"] == {"sha-256": bad.sha256}
    assert artifact["length"] == bad.size


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b-c_d.e~f", "a/b-c_d.e~f"),
        ("./a", "a"),
        ("/tmp/ü", "file:///tmp/%C3%BC"),  # noqa: S108 - nothing is there, nor looked for
        ("a:b", "a%3Ab"),
        ("caf\udcff", "caf%FF"),
        ("\ud800", "%ED%A0%80"),
        ("a?b#c%d", "a%3Fb%23c%25d"),
        ("a\\b\n", "a%5Cb%0A"),
    ],
)
def test_a_path_is_a_uri_reference(path: str, expected: str) -> None:
    assert uri(path) == expected


def test_a_file_that_was_met_twice_is_one_artifact() -> None:
    report = Report((refused("m/sub/a"), refused("m/sub/a")), (), RUN)
    run = run_of(report)
    assert [len(run[key]) for key in ("artifacts", "results")] == [1, 2]
