"""What a caller expects of a manifest holds on the whole way, from the arguments to the verdict and its record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from safeload import __version__, cli, loading
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    ExpiredError,
    FileSetError,
    Finding,
    ManifestError,
    PolicyError,
    RejectedError,
    RollbackError,
    StagingError,
)
from safeload.trust.history import History, format_instant
from safeload.trust.store import GIVEN_KEYS, TrustStore
from tests.simulator import CONFIG, MODEL, NESTED, PLAIN, QUANTIZED, README, CheckpointSimulator

VERBS = ["verify", "load"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointSimulator:
    return CheckpointSimulator(tmp_path)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "history.json"


def pin(checkpoint: CheckpointSimulator) -> str:
    return f"sha256:{checkpoint.trusted().sha256}"


def refused(checkpoint: CheckpointSimulator, kind: type[RejectedError], **options: Any) -> tuple[Finding, ...]:
    """Return the findings, after both verbs and the report agreed on them."""
    found = []
    for verb in VERBS:
        with pytest.raises(RejectedError) as caught:
            getattr(checkpoint, verb)(**options)
        assert type(caught.value) is kind
        found.append([(finding.code, finding.message) for finding in caught.value.findings])
    report = checkpoint.check(**options)
    assert report.verdict == "rejected"
    assert found[0] == found[1] == [(finding.code, finding.message) for finding in report.all_findings]
    return report.all_findings


def no_verdict(checkpoint: CheckpointSimulator, kind: type[Exception], **options: Any) -> str:
    messages = set()
    for verb in [*VERBS, "check"]:
        with pytest.raises(kind) as caught:
            getattr(checkpoint, verb)(**options)
        assert type(caught.value) is kind
        messages.add(str(caught.value))
    (message,) = messages
    return message


def untouched(history: Path) -> bytes | None:
    return history.read_bytes() if history.exists() else None


# ---------------------------------------------------------------- pin, model, revision, expiry


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_as_expected_is_accepted(checkpoint: CheckpointSimulator, history: Path, verb: str) -> None:
    getattr(checkpoint, verb)(pin=pin(checkpoint), model=MODEL, revision="r1", history=history, purpose="inference")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"pin": "sha256:" + "0" * 64}, "pin-mismatch"),
        ({"model": "test/other"}, "model-mismatch"),
        ({"revision": "r2"}, "revision-mismatch"),
    ],
)
def test_another_manifest_is_refused_before_any_file_is_looked_at(
    checkpoint: CheckpointSimulator, options: dict[str, str], code: str
) -> None:
    checkpoint.remove(CONFIG)
    (finding,) = refused(checkpoint, ManifestError, **options)
    assert (finding.code, finding.file) == (code, str(checkpoint.manifest))
    assert finding.hint is not None


def test_a_manifest_of_another_revision_does_not_pass_for_the_one_that_is_asked_for(
    checkpoint: CheckpointSimulator,
) -> None:
    checkpoint.sign(revision="r2", version=2)
    (finding,) = refused(checkpoint, ManifestError, revision="r1")
    assert "expected a manifest of revision r1, found one of r2" in finding.message


def test_an_expired_manifest_is_refused_unless_it_is_pinned(checkpoint: CheckpointSimulator) -> None:
    past = {"issued": "2020-01-01T00:00:00Z", "expires": "2020-02-01T00:00:00Z"}
    checkpoint.resign(lambda predicate: predicate.update(past))
    (finding,) = refused(checkpoint, ExpiredError)
    assert finding.code == "expired"
    # The hint can be typed.
    typed = re.search(r"--pin (\S+)", finding.hint or "")
    assert typed is not None
    report = checkpoint.verify(pin=typed[1])
    assert (report.facts["manifest"]["expires"], report.facts["manifest"]["expired"]) == (past["expires"], True)
    assert checkpoint.load(pin=typed[1])


# ---------------------------------------------------------------- history


@pytest.mark.parametrize("verb", VERBS)
def test_an_accepted_manifest_is_remembered_and_an_older_one_refused(
    checkpoint: CheckpointSimulator, history: Path, verb: str
) -> None:
    old = checkpoint.manifest.read_bytes()
    checkpoint.sign(version=2)
    getattr(checkpoint, verb)(history=history)
    seen = History.parse(history.read_bytes()).streams[MODEL]
    assert (seen.epoch, seen.version, seen.manifest) == (1, 2, checkpoint.trusted().sha256)
    getattr(checkpoint, verb)(history=history)
    checkpoint.manifest.write_bytes(old)
    before = untouched(history)
    assert [finding.code for finding in refused(checkpoint, RollbackError, history=history)] == ["rollback"]
    assert untouched(history) == before
    assert checkpoint.load()
    assert checkpoint.load(pin=pin(checkpoint))


def test_a_second_manifest_with_one_number_is_refused(checkpoint: CheckpointSimulator, history: Path) -> None:
    checkpoint.verify(history=history)
    checkpoint.sign(revision="r2")
    assert [finding.code for finding in refused(checkpoint, RollbackError, history=history)] == ["equivocation"]


def test_a_version_that_no_later_one_could_follow_is_refused(checkpoint: CheckpointSimulator, history: Path) -> None:
    checkpoint.verify(history=history)
    checkpoint.sign(version=2**53)
    assert [finding.code for finding in refused(checkpoint, RollbackError, history=history)] == ["fast-forward"]


DAMAGE: dict[str, Callable[[CheckpointSimulator], object]] = {
    "a changed file": lambda c: c.flip_bit(PLAIN),
    "a missing file": lambda c: c.remove(CONFIG),
    "an unlisted file": lambda c: c.add(),
    "what the policy refuses": lambda c: c.bless(README, b"\x80\x02cos\nsystem\n."),
    "another key": lambda c: c.manifest.write_bytes(CheckpointSimulator(c.outside).manifest.read_bytes()),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("verb", [*VERBS, "check"])
def test_only_what_is_accepted_as_a_whole_is_remembered(
    checkpoint: CheckpointSimulator, history: Path, name: str, verb: str
) -> None:
    checkpoint.verify(history=history)
    before = untouched(history)
    checkpoint.sign(version=2)
    DAMAGE[name](checkpoint)
    try:
        report = getattr(checkpoint, verb)(history=history)
    except RejectedError:
        assert verb != "check"
    else:
        assert verb == "check"
        assert report.verdict == "rejected"
    assert untouched(history) == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_newer_manifest_that_was_accepted_meanwhile_wins(
    checkpoint: CheckpointSimulator, history: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    old = checkpoint.manifest.read_bytes()
    newer = checkpoint.sign(version=2)

    step = "admit" if verb == "load" else "verify_files"
    original = getattr(loading, step)

    def meanwhile(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        checkpoint.verify(manifest=newer, history=history)
        return original(*args, **options)

    monkeypatch.setattr(loading, step, meanwhile)
    with pytest.raises(RollbackError) as caught:
        getattr(checkpoint, verb)(manifest=old, history=history)
    assert caught.value.findings[0].code == "rollback"
    assert History.parse(history.read_bytes()).streams[MODEL].version == 2


def test_a_history_that_cannot_be_written_in_the_end_gives_no_verdict(
    checkpoint: CheckpointSimulator, history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*_: Any) -> None:
        raise StagingError("no room")

    monkeypatch.setattr("safeload.verifying.publish", publish)
    assert no_verdict(checkpoint, StagingError, history=history) == "no room"


def test_a_damaged_history_gives_no_verdict(checkpoint: CheckpointSimulator, history: Path) -> None:
    history.write_bytes(b"{")
    assert "history.json" in no_verdict(checkpoint, ConfigError, history=history)


def test_a_path_that_cannot_be_one_gives_no_verdict(checkpoint: CheckpointSimulator, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in ("nul\0", tmp_path / "loop" / "h.json"):
        no_verdict(checkpoint, ConfigError, history=path)


def test_a_history_in_the_checkpoint_is_nobodys_word(checkpoint: CheckpointSimulator, tmp_path: Path) -> None:
    for inside in (checkpoint.path("h.json"), checkpoint.path("optimizer/../h.json")):
        assert "lies in the checkpoint" in no_verdict(checkpoint, ConfigError, history=inside)
    (tmp_path / "link").symlink_to(checkpoint.directory)
    assert "lies in the checkpoint" in no_verdict(checkpoint, ConfigError, history=tmp_path / "link" / "h.json")
    assert not any(path.name.startswith("h.json") for path in checkpoint.directory.rglob("*"))


# ---------------------------------------------------------------- two revisions in one directory


def test_shards_of_two_revisions_are_refused_and_the_reason_is_named(checkpoint: CheckpointSimulator) -> None:
    checkpoint.flip_bit(PLAIN)
    checkpoint.flip_bit(QUANTIZED)
    for finding in refused(checkpoint, DigestMismatchError):
        assert finding.code == "digest-mismatch"
        assert "2 of 6 files are not those of revision r1: they may be of another revision" in (finding.hint or "")
    for verb in VERBS:
        with pytest.raises(DigestMismatchError, match="another revision"):
            getattr(checkpoint, verb)()


def test_it_is_named_also_where_sizes_differ(checkpoint: CheckpointSimulator) -> None:
    checkpoint.append(PLAIN)
    checkpoint.truncate(QUANTIZED)
    checkpoint.flip_bit(README)
    assert {finding.hint for finding in checkpoint.check().all_findings} == {
        "3 of 6 files are not those of revision r1: they may be of another revision; fetch all of them from one"
    }
    with pytest.raises(FileSetError, match="2 of 6 files"):  # which is found before any byte is read
        checkpoint.load()


def test_one_changed_file_is_no_sign_of_another_revision(checkpoint: CheckpointSimulator) -> None:
    checkpoint.flip_bit(PLAIN)
    (finding,) = refused(checkpoint, DigestMismatchError)
    assert "revision" not in (finding.hint or "")


# ---------------------------------------------------------------- purpose


def test_a_checkpoint_that_lacks_what_training_needs_is_refused(checkpoint: CheckpointSimulator, history: Path) -> None:
    findings = refused(checkpoint, PolicyError, purpose="training", history=history)
    assert {finding.code for finding in findings} == {"role-missing"}
    named = {finding.message.split("role ")[1].split(",")[0] for finding in findings}
    assert {"optimizer", "step", "rng"} >= named >= {"step", "rng"}
    assert not history.exists()


def test_a_checkpoint_that_has_what_training_needs_is_accepted(checkpoint: CheckpointSimulator) -> None:
    roles = {NESTED: "optimizer", README: "step", CONFIG: "rng"}
    checkpoint.resign(lambda predicate: predicate.pop("requires", None))
    for path, role in roles.items():
        checkpoint.edit_entry(path, lambda entry, role=role: entry.update(role=role))  # type: ignore[misc] # bound now
    assert checkpoint.verify(purpose="training").facts["expected"]["purpose"] == "training"
    assert checkpoint.load(purpose="training")


def test_what_is_missing_is_reported_beside_what_is_wrong(checkpoint: CheckpointSimulator) -> None:
    checkpoint.flip_bit(PLAIN)
    codes = {finding.code for finding in checkpoint.check(purpose="training").all_findings}
    assert codes == {"role-missing", "digest-mismatch"}
    with pytest.raises(DigestMismatchError):
        checkpoint.verify(purpose="training")
    checkpoint.remove(CONFIG)
    with pytest.raises(FileSetError):
        checkpoint.verify(purpose="training")


def test_a_purpose_that_does_not_exist_gives_no_verdict(checkpoint: CheckpointSimulator) -> None:
    assert "expected inference or training" in no_verdict(checkpoint, ConfigError, purpose="fun")


# ---------------------------------------------------------------- evidence


def test_a_report_is_evidence(checkpoint: CheckpointSimulator, history: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    value = checkpoint.verify(pin=pin(checkpoint), model=MODEL, history=history).to_json()
    value = json.loads(json.dumps(value))
    assert value["manifest"] == {
        "sha256": checkpoint.trusted().sha256,
        "model": MODEL,
        "revision": "r1",
        "epoch": 1,
        "version": 1,
        "issued": checkpoint.trusted().manifest.issued,
        "expires": None,
        "expired": False,
        "kind": "inference",
        "publisher": GIVEN_KEYS,
        "threshold": 1,
        "signers": [{"name": "", "keyid": checkpoint.key.public.keyid}],
        "ignored": [],
    }
    assert value["trust"] == {"version": 0, "sha256": "", "keys": 1}
    assert value["policy"]["name"] == "numpy-quantized"
    assert re.fullmatch("[0-9a-f]{64}", value["policy"]["sha256"])
    assert value["expected"] == {
        "pin": pin(checkpoint),
        "model": MODEL,
        "revision": None,
        "purpose": None,
        "history": {
            "path": str(history),
            "first_use": True,
            "remembered": None,
            "clock_moved_back_seconds": 0,
        },
        "trust_pin": None,
    }
    assert value["tool"] == {"name": "safeload", "version": __version__}
    assert before <= datetime.fromisoformat(value["time"]) <= datetime.now(UTC)
    assert {file["path"]: file["sha256"] for file in value["files"]} == {
        entry.path: entry.sha256 for entry in checkpoint.trusted().manifest.files
    }
    assert checkpoint.verify(history=history).facts["expected"]["history"]["first_use"] is False
    assert checkpoint.verify().facts["expected"]["history"] is None


def test_a_refused_manifest_leaves_evidence_too(checkpoint: CheckpointSimulator) -> None:
    report = checkpoint.check(model="other")
    assert report.files == ()
    assert report.facts["expected"]["model"] == "other"
    assert set(report.facts) == {"policy", "expected", "trust", "time", "tool"}


def test_a_clock_that_was_turned_back_is_reported(checkpoint: CheckpointSimulator, history: Path) -> None:
    checkpoint.verify(history=history)
    value = json.loads(history.read_bytes())
    value["clock"] = format_instant(datetime.now(UTC) + timedelta(days=1))
    history.write_text(json.dumps(value))
    behind = checkpoint.verify(history=history).facts["expected"]["history"]["clock_moved_back_seconds"]
    assert 86_000 < behind <= 86_400
    assert json.loads(history.read_bytes())["clock"] == value["clock"]


# ---------------------------------------------------------------- the command


class Command:
    """The command on one checkpoint."""

    def __init__(self, checkpoint: CheckpointSimulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "key.pub").write_bytes(checkpoint.key.public.to_pem())
        self.arguments = [
            str(checkpoint.directory),
            "-m",
            str(checkpoint.manifest),
            "--trust",
            str(tmp_path / "key.pub"),
        ]
        self.capsys = capsys

    def __call__(self, verb: str, *options: str | Path) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = cli.main([verb, *self.arguments, *map(str, options)])
        return code, *self.capsys.readouterr()


@pytest.fixture
def command(checkpoint: CheckpointSimulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(checkpoint, tmp_path, capsys)


@pytest.mark.parametrize("verb", VERBS)
def test_the_command_passes_on_what_is_expected(
    checkpoint: CheckpointSimulator, command: Command, history: Path, verb: str
) -> None:
    good = ("--pin", pin(checkpoint), "--model", MODEL, "--revision", "r1", "--history", history, "--for", "inference")
    assert command(verb, *good)[0] == 0
    assert history.exists()
    for wrong, code in (
        (("--pin", "sha256:" + "0" * 64), "pin-mismatch"),
        (("--model", "x"), "model-mismatch"),
        (("--revision", "x"), "revision-mismatch"),
    ):
        exit_code, out, err = command(verb, *wrong)
        assert (exit_code, out.splitlines()[-1].split(" in ")[0]) == (1, f"rejected: {code}")
        assert "safeload: hint: " in err
    exit_code, out, err = command(verb, "--for", "training")
    assert (exit_code, "role-missing" in out) == (1, True)
    assert "role rng" in err
    for usage in (("--pin", "x"), ("--for", "fun"), ("--history", checkpoint.path("h"))):
        assert command(verb, *usage)[0] == 2


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_pin_and_a_history_the_command_says_what_it_cannot_know(command: Command, verb: str) -> None:
    code, out, _ = command(verb)
    assert code == 0
    assert "an older manifest would be accepted too" in out


def test_with_a_pin_or_a_history_it_knows(checkpoint: CheckpointSimulator, command: Command, history: Path) -> None:
    assert "older manifest" not in command("verify", "--pin", pin(checkpoint))[1]
    assert "first use of" in command("verify", "--history", history)[1]
    out = command("verify", "--history", history)[1]
    assert "first use" not in out
    assert "older manifest" not in out
    value = json.loads(history.read_bytes())
    value["clock"] = format_instant(datetime.now(UTC) + timedelta(days=1))
    history.write_text(json.dumps(value))
    assert re.search(r"the clock is 86\d\d\d seconds behind", command("verify", "--history", history)[1])


def test_a_refused_manifest_has_no_such_line(command: Command) -> None:
    assert "older manifest" not in command("verify", "--model", "x")[1]


def test_verify_json_is_the_evidence(checkpoint: CheckpointSimulator, command: Command) -> None:
    accepted = json.loads(command("verify", "--json")[1])
    rejected = json.loads(command("verify", "--json", "--model", "x")[1])
    assert [accepted["verdict"], rejected["verdict"]] == ["accepted", "rejected"]
    assert [accepted["expected"]["model"], rejected["expected"]["model"]] == [None, "x"]
    assert accepted["tool"] == rejected["tool"] == {"name": "safeload", "version": __version__}
    assert rejected["findings"][0]["path"] == str(checkpoint.manifest)


def test_the_first_use_is_that_of_a_model_and_not_of_a_file(checkpoint: CheckpointSimulator, history: Path) -> None:
    checkpoint.verify(history=history)
    checkpoint.sign(model="another")
    memory = checkpoint.verify(history=history).facts["expected"]["history"]
    assert (memory["first_use"], memory["remembered"]) == (True, None)
    memory = checkpoint.verify(history=history).facts["expected"]["history"]
    assert memory["first_use"] is False
    assert memory["remembered"]["version"] == 1


@pytest.mark.parametrize("verb", ["load", "verify", "check"])
def test_trust_and_policy_in_the_checkpoint_are_nobodys_word(checkpoint: CheckpointSimulator, verb: str) -> None:
    checkpoint.add("config2.json", b"{}")
    checkpoint.sign()
    for options in ({"trust": checkpoint.path("config2.json")}, {"policy": checkpoint.path("README.md")}):
        with pytest.raises(ConfigError, match="lies in the checkpoint"):
            getattr(checkpoint, verb)(**options)


def test_a_pin_does_not_let_a_history_learn_an_epoch_that_was_not_granted(
    checkpoint: CheckpointSimulator, history: Path
) -> None:
    store = replace(TrustStore.of_keys([checkpoint.key.public]), version=1)
    checkpoint.sign(epoch=9)
    findings = refused(checkpoint, RollbackError, trust=store, pin=pin(checkpoint), history=history)
    assert [finding.code for finding in findings] == ["fast-forward"]
    assert not history.exists()
