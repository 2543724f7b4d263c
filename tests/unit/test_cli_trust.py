"""`safeload trust`: a store is made by several hands, never overwritten, and replaced only by its proven successor."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from safeload import cli
from safeload.cli import trust
from safeload.trust.dsse import Envelope
from safeload.trust.keys import KeyKind, PublicKey, SecretKey
from safeload.trust.store import MAX_TRUST_FILE_BYTES, SignedStore, TrustStore


class Done(NamedTuple):
    """What one run of the command gave."""

    code: int
    stdout: str
    stderr: str

    @property
    def last(self) -> str:
        return self.stdout.splitlines()[-1]

    @property
    def json(self) -> Any:
        assert self.stdout.count("\n") == 1
        return json.loads(self.stdout)


Run = Callable[..., Done]
KINDS: dict[str, KeyKind] = {
    "r1": "ed25519",
    "r2": "ecdsa-p256",
    "r3": "ecdsa-p384",
    "p1": "ed25519",
    "p2": "ecdsa-p521",
    "p3": "ed25519",
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = cli.main([word for argument in arguments for word in str(argument).split()])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with keys, to work in."""
    for name, kind in KINDS.items():
        key = SecretKey.generate(kind)
        (tmp_path / name).write_bytes(key.to_pem(None))
        (tmp_path / f"{name}.pub").write_bytes(key.public.to_pem())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keyid(name: str) -> str:
    return PublicKey.from_pem(Path(f"{name}.pub").read_bytes()).keyid


INIT = (
    "trust init -o t.json --root r1.pub --root r2.pub --root r3.pub --threshold 2 --publisher xai "
    "--stream hf:xai-org/* --publisher-key p1.pub --publisher-key p2.pub --publisher-threshold 2"
)


@pytest.fixture
def store(run: Run) -> Path:
    assert run(INIT, "--sign r1 --sign r2").code == 0
    return Path("t.json")


def test_a_store_is_made_whole_and_says_its_digest(run: Run) -> None:
    done = run(INIT, "--sign r1 --sign r2 --json")
    assert done.code == 0
    made = TrustStore.parse(Path("t.json").read_bytes())
    assert done.json == {
        "schema": 1,
        "path": "t.json",
        "version": 1,
        "sha256": made.sha256,
        "signers": [keyid("r1"), keyid("r2")],
        "missing_signatures": 0,
    }
    assert made.root is not None
    assert (made.root.threshold, made.root.keyids) == (2, (keyid("r1"), keyid("r2"), keyid("r3")))
    (publisher,) = made.publishers
    assert (publisher.name, publisher.streams, publisher.threshold) == ("xai", ("hf:xai-org/*",), 2)
    assert publisher.keyids == (keyid("p1"), keyid("p2"))
    assert {key.name for key in made.keys.values()} == {"r1", "r2", "r3", "p1", "p2"}
    assert stat.S_IMODE(Path("t.json").stat().st_mode) & 0o700 == 0o600


def test_nobody_need_hold_two_keys_to_make_a_store(run: Run) -> None:
    done = run(INIT, "--sign r1")
    assert done.code == 0
    assert done.last == "needs 1 more: safeload trust sign t.json --key KEY"
    shown = run("trust show t.json")
    assert shown.code == 1
    assert shown.last == "rejected: root-threshold-not-met in t.json"
    as_json = run("trust show t.json --json")
    assert as_json.json["verdict"] == "rejected"
    assert as_json.json["findings"][0]["code"] == "root-threshold-not-met"
    assert run("trust add t.json -o n --root p3.pub --sign r1").code == 2
    assert run("trust sign t.json --key r3").code == 0
    assert run("trust show t.json").code == 0
    assert SignedStore.parse(Path("t.json").read_bytes()).signers == (keyid("r1"), keyid("r3"))


def test_show_names_keys_publishers_root_and_digest(run: Run, store: Path) -> None:
    run(
        "trust revoke",
        store,
        "-o n --key",
        keyid("p1"),
        "--manifest",
        "ab" * 32,
        "--reason stolen --since 2026-01-02T03:04:05Z --sign r1 --sign r2",
    )
    run(
        "trust add n -o m --publisher xai --publisher-key p3.pub --epoch hf:a=2",
        "--not-before 2020-01-01T00:00:00Z --not-after 2021-01-01T00:00:00Z --sign r1 --sign r2",
    )
    made = TrustStore.parse(Path("m").read_bytes())
    text = run("trust show m")
    assert text.code == 0
    for part in (
        "version  3, of 20",
        f"digest   sha256:{made.sha256}",
        "root     2 of 3 keys must sign; signed by r1 (",
        "2 of 3, 1 counts  hf:xai-org/*",
        "revoked since 2026-01-02T03:04:05Z: stolen",
        "not valid after 2021-01-01T00:00:00Z",
        "ecdsa-p521",
        f"manifest  {'ab' * 32}  stolen",
        "hf:a        2",
        *made.keys,
    ):
        assert part in text.stdout
    shown = run("trust show m --json").json
    assert shown["verdict"] == "accepted"
    found = shown["store"]
    assert (found["version"], found["sha256"], found["epochs"]) == (3, made.sha256, {"hf:a": 2})
    assert found["root"]["signers"] == [keyid("r1"), keyid("r2")]
    assert found["revoked_keys"] == [{"keyid": keyid("p1"), "reason": "stolen", "since": "2026-01-02T03:04:05Z"}]
    assert found["revoked_manifests"] == [{"sha256": "ab" * 32, "reason": "stolen"}]
    counts = {key["name"]: key["does_not_count"] for key in found["keys"]}
    assert counts["p1"] == "revoked since 2026-01-02T03:04:05Z: stolen"
    assert counts["p3"] == "not valid after 2021-01-01T00:00:00Z"
    assert counts["p2"] is counts["r1"] is None


def test_show_reads_a_plain_store_and_shows_names_escaped(run: Run, store: Path) -> None:
    plain = json.loads(Envelope.parse(store.read_bytes()).payload)
    del plain["root"], plain["issued"]
    plain["keys"][keyid("p1")]["name"] = "\x1b[2J"
    Path("plain").write_text(json.dumps(plain))
    shown = run("trust show plain")
    assert shown.code == 0
    assert "root     none: it is not signed, and cannot be updated" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "\\x1b[2J" in shown.stdout
    assert run("trust show plain --json").json["store"]["root"] is None
    assert run("trust update plain", store).code == 2
    assert run("trust add plain -o n --root p3.pub --sign r1").code == 2


def test_add_makes_the_next_version_and_leaves_the_old_one(run: Run, store: Path) -> None:
    before = store.read_bytes()
    done = run("trust add", store, "-o n --publisher acme --stream acme/* --publisher-key p3.pub --sign r2 --sign r3")
    assert done.code == 0
    assert store.read_bytes() == before
    made = TrustStore.parse(Path("n").read_bytes())
    assert made.version == 2
    assert [publisher.name for publisher in made.publishers] == ["xai", "acme"]
    assert (made.publishers[1].threshold, made.publishers[1].keyids) == (1, (keyid("p3"),))


def test_add_extends_a_publisher_that_is_there(run: Run, store: Path) -> None:
    Path("copy.pub").write_bytes(Path("p1.pub").read_bytes())
    done = run(
        "trust add",
        store,
        "-o n --publisher xai --stream hf:grok/* --publisher-key p3.pub --publisher-key copy.pub",
        "--publisher-threshold 3 --sign r2 --sign r3",
    )
    assert done.code == 0
    made = TrustStore.parse(Path("n").read_bytes())
    (publisher,) = made.publishers
    assert publisher.streams == ("hf:xai-org/*", "hf:grok/*")
    # A key that is there under another name is there once, and keeps the name.
    assert (publisher.threshold, publisher.keyids) == (3, (keyid("p1"), keyid("p2"), keyid("p3")))
    assert made.keys[keyid("p1")].name == "p1"


def test_a_root_changes_hands_in_two_steps(run: Run, store: Path) -> None:
    assert run("trust add", store, "-o n --root p3.pub --threshold 3 --sign r1 --sign r2 --sign p3").code == 0
    done = run("trust revoke n -o m --key", keyid("r1"), "--reason left --sign r2 --sign r3")
    assert done.last == "needs 1 more: safeload trust sign m --key KEY"
    assert run("trust sign m --key p3").code == 0
    assert run("trust update", store, "n m").code == 0
    root = TrustStore.parse(store.read_bytes()).root
    assert root is not None
    assert (root.threshold, len(root.keyids)) == (3, 4)


def test_a_lowered_threshold_still_needs_what_the_old_root_asks_for(run: Run, store: Path) -> None:
    done = run("trust add", store, "-o n --threshold 1 --sign r1 --json")
    assert done.json["missing_signatures"] == 1
    assert run("trust update", store, "n").last == "rejected: root-threshold-not-met in n"
    run("trust sign n --key r2")
    assert run("trust update", store, "n").code == 0


def test_revoke_takes_keys_and_manifests_back_for_good(run: Run, store: Path) -> None:
    done = run(
        "trust revoke",
        store,
        "-o n --key",
        keyid("p1"),
        "--key sha256:" + "cd" * 32,
        "--manifest sha256:" + "ab" * 32,
        "--reason stolen --sign r1 --sign r2",
    )
    assert done.code == 0
    assert "publisher xai has 1 key(s) left that count, and needs 2 to sign" in done.stderr
    made = TrustStore.parse(Path("n").read_bytes())
    assert {keyid: each.reason for keyid, each in made.revoked_keys.items()} == {
        keyid("p1"): "stolen",
        "cd" * 32: "stolen",
    }
    assert made.revoked_manifests == {"ab" * 32: "stolen"}
    again = run("trust add n -o m --publisher xai --publisher-key p1.pub --sign r1")
    assert again.code == 2
    assert "was revoked: stolen" in again.stderr


def test_update_replaces_a_store_by_its_successors(run: Run, store: Path) -> None:
    for old, new, number in (("t.json", "n", 2), ("n", "m", 3)):
        run("trust add", old, "-o", new, "--epoch", f"hf:a={number}", "--sign r1 --sign r3")
    digest = TrustStore.parse(Path("m").read_bytes()).sha256
    done = run("trust update", store, "n m --json")
    assert done.code == 0
    assert done.json == {
        "schema": 1,
        "verdict": "accepted",
        "files": [],
        "findings": [],
        "path": "t.json",
        "from_version": 1,
        "version": 3,
        "sha256": digest,
    }
    assert store.read_bytes() == Path("m").read_bytes()
    assert sorted(path.name for path in Path().iterdir() if path.suffix not in {".pub", ""}) == ["t.json"]


def test_update_does_not_copy_what_stands_beside_the_signatures(run: Run, store: Path) -> None:
    run("trust add", store, "-o n --epoch hf:a=2 --sign r1 --sign r3")
    clean = Path("n").read_bytes()
    # Escaped, the type could not be told from other JSON by looking for it.
    crafted = clean.replace(b"+json", b"\\u002bjson").replace(b"{", b'{"note": "trust me", ', 1)
    Path("n").write_bytes(crafted)
    assert run("trust update", store, "n").last == "accepted"
    assert store.read_bytes() == clean


@pytest.mark.parametrize(
    ("make", "code"),
    [
        ("skip", "version-not-next"),
        ("older", "version-not-next"),
        ("fork", "version-not-next"),
        ("old-root", "root-threshold-not-met"),
        ("revoked", "root-threshold-not-met"),
        ("manifest", "bad-trust-store"),
        ("plain", "bad-trust-store"),
    ],
)
def test_a_refused_update_leaves_the_store_as_it_was(run: Run, store: Path, make: str, code: str) -> None:
    run("trust revoke", store, "-o n --key", keyid("r1"), "--reason stolen --sign r1 --sign r2 --sign r3")
    if make == "skip":
        run("trust add n -o new --epoch a=2 --sign r2 --sign r3")
    elif make == "older":
        Path("new").write_bytes(store.read_bytes())
        run("trust add", store, "-o o --epoch a=2 --sign r1 --sign r2")
        run("trust update", store, "o")
    elif make == "fork":
        run(INIT.replace("t.json", "new").replace("xai", "evil"), "--sign r1 --sign r2")
    elif make == "old-root":
        run(INIT.replace("t.json", "f").replace("root r1.pub", "root p1.pub"), "--sign p1 --sign r2")
        run("trust add f -o new --epoch a=2 --sign p1 --sign r2")
    elif make == "revoked":
        run("trust update", store, "n")
        run("trust add n -o new --epoch a=2 --sign r2 --sign r1")
    elif make == "manifest":
        Path("new").write_text(
            '{"payload": "", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": ""}]}'
        )
    else:
        Path("new").write_bytes(Envelope.parse(Path("n").read_bytes()).payload)
    before = store.read_bytes()
    done = run("trust update", store, "new")
    assert (done.code, done.last) == (1, f"rejected: {code} in new")
    assert run("trust update", store, "new --json").json["verdict"] == "rejected"
    assert store.read_bytes() == before
    assert make != "revoked" or "that of r1 (" in done.stderr
    assert make != "older" or "hint: there is nothing to do: yours is newer, version 2" in done.stderr
    assert make != "fork" or "hint: this is another version 1 than yours" in done.stderr


def test_a_fork_before_the_own_version_is_not_passed_over(run: Run, store: Path) -> None:
    run(INIT.replace("t.json", "fork").replace("xai", "evil"), "--sign r1 --sign r2")
    done = run("trust update", store, "fork", store)
    assert (done.code, done.last) == (1, "rejected: version-not-next in fork")


def test_the_same_update_can_be_run_again_and_changes_nothing(run: Run, store: Path) -> None:
    run("trust add", store, "-o n --epoch a=2 --sign r1 --sign r2")
    run("trust add n -o m --epoch a=3 --sign r1 --sign r2")
    assert run("trust update", store, "n").code == 0
    before = store.stat().st_ino
    again = run("trust update", store, "n")
    assert (again.code, again.last) == (0, "accepted")
    assert "(version 2 already, nothing to do)" in again.stdout
    said = run("trust update", store, "n --json").json
    assert (said["verdict"], said["from_version"], said["version"]) == ("accepted", 2, 2)
    assert store.stat().st_ino == before
    done = run("trust update", store, "n m")
    assert "(version 2, now 3)" in done.stdout
    assert run("trust update", store, "n m").code == 0
    assert TrustStore.parse(store.read_bytes()).version == 3


def test_an_update_in_the_wrong_order_is_not_called_done(run: Run, store: Path) -> None:
    run("trust add", store, "-o n --epoch a=2 --sign r1 --sign r2")
    run("trust add n -o m --epoch a=3 --sign r1 --sign r2")
    run("trust update", store, "n")
    assert run("trust update", store, "m n").last == "rejected: version-not-next in n"
    Path("junk").write_text("{}")
    assert run("trust update", store, "junk n").last == "rejected: bad-trust-store in junk"
    assert TrustStore.parse(store.read_bytes()).version == 2


@pytest.mark.usefixtures("store")
def test_a_trust_store_is_no_manifest_to_sign_and_is_named(run: Run) -> None:
    done = run("attach-signature t.json --signature p1.pub --public-key p1.pub -o x")
    assert (done.code, done.last) == (1, "rejected: payload-type in t.json")
    assert "hint: name what `safeload sign --payload-only` wrote" in done.stderr
    done = run("attach-signature t.json --signature p1.pub --public-key p1 -o x")
    assert "error: p1: expected a public key, found a private key" in done.stderr


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "arguments",
    [
        INIT.replace("t.json", "x").replace("threshold 2", "threshold 4", 1) + " --sign r1",
        INIT.replace("t.json", "x").replace("xai ", "x" * 300 + " ", 1) + " --sign r1",
        INIT.replace("t.json", "x") + " --sign r1 --not-before 2027-01-01T00:00:00Z --not-after 2026-01-01T00:00:00Z",
        "trust add t.json -o x --threshold 9 --sign r1",
        "trust add t.json -o x --publisher xai --publisher-threshold 9 --sign r1",
        "trust show /dev/zero",
        "trust show t.json.missing",
        "trust sign t.json --key r1",
        "trust sign t.json --key p1",
        "trust update t.json p1.pub",
        "attach-signature t.json --signature p1.pub --public-key p1.pub -o x",
        "attach-signature p1.pub --signature p1.pub --public-key p1.pub -o x",
        "attach-signature p1.pub --signature p1.pub --public-key p1 -o x",
        "attach-signature p1.pub --signature p1.pub --public-key t.json -o x",
        "attach-signature p1.pub --signature none --public-key p1.pub -o x",
        "attach-signature p1.pub --signature p1.pub --public-key p1.pub -o no/x",
        "attach-signature /dev/zero --signature p1.pub --public-key p1.pub -o x",
    ],
)
def test_whoever_is_refused_hears_what_to_do(run: Run, arguments: str) -> None:
    done = run(arguments)
    assert done.code in {1, 2}
    assert "safeload: hint: " in done.stderr
    assert not Path("x").exists()


def test_a_chain_with_one_bad_link_changes_nothing(run: Run, store: Path) -> None:
    run("trust add", store, "-o n --epoch a=2 --sign r1 --sign r2")
    run("trust add n -o m --epoch a=3 --sign r1")
    before = store.read_bytes()
    assert run("trust update", store, "n m").last == "rejected: root-threshold-not-met in m"
    assert store.read_bytes() == before


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("trust add t.json -o n --sign r1", "says already"),
        ("trust add t.json -o t.json --epoch a=2 --sign r1", "exists already"),
        ("trust add t.json -o no/n --epoch a=2 --sign r1", "there is no folder"),
        ("trust add t.json -o n --epoch a=1 --sign r1", "expected more than 1 for a, found 1"),
        ("trust add t.json -o n --epoch a --sign r1", "expected STREAM=N"),
        ("trust add t.json -o n --epoch =2 --sign r1", "expected STREAM=N"),
        ("trust add t.json -o n --epoch a=-2 --sign r1", "expected STREAM=N"),
        ("trust add t.json -o n --epoch a*=2 --sign r1", "epochs"),
        ("trust add t.json -o n --stream a --sign r1", "say whose with --publisher NAME"),
        ("trust add t.json -o n --publisher-key p3.pub --sign r1", "say whose with --publisher NAME"),
        ("trust add t.json -o n --publisher b --publisher-key p3.pub --sign r1", "say what with --stream GLOB"),
        ("trust add t.json -o n --publisher b --stream a --sign r1", "expected a threshold within 1 and 0"),
        ("trust add t.json -o n --publisher b --stream [a] --publisher-key p3.pub --sign r1", "streams"),
        ("trust add t.json -o n --publisher xai --publisher-threshold 3 --sign r1", "a threshold within 1 and 2"),
        ("trust add t.json -o n --threshold 4 --sign r1", "root: expected a threshold within 1 and 3"),
        ("trust add t.json -o n --threshold 0 --sign r1", "root: expected a threshold within 1 and 3"),
        ("trust add t.json -o n --not-after 2030-01-01T00:00:00Z --epoch a=2 --sign r1", "and none is"),
        ("trust add t.json -o n --root p3.pub --not-after 2030 --sign r1", "--not-after: expected a time like"),
        ("trust add t.json -o n --root p3 --sign r1", "p3: expected a public key, found a private key"),
        ("trust add t.json -o n --root none --sign r1", "cannot read none"),
        ("trust add t.json -o n --root p3.pub --sign p1", "is not in the root"),
        ("trust add t.json -o n --root p3.pub --sign r1 --sign r1", "has signed this trust store already"),
        ("trust add t.json -o n --root p3.pub --sign r1.pub", "expected a private key, found a public key"),
        ("trust add none -o n --root p3.pub --sign r1", "cannot read none"),
        ("trust add r1.pub -o n --root p3.pub --sign r1", "r1.pub: "),
        ("trust revoke t.json -o n --reason x --sign r1", "nothing to revoke"),
        ("trust revoke t.json -o n --reason x --key abc --sign r1", "--key: expected 64"),
        ("trust revoke t.json -o n --reason x --manifest abc --sign r1", "--manifest: expected 64"),
        ("trust revoke t.json -o n --reason x --key KEYID --since now --sign r1", "--since: expected a time like"),
        ("trust revoke t.json -o n --reason= --key KEYID --sign r1", "reason"),
        ("trust revoke t.json -o t.json --reason x --key KEYID --sign r1", "exists already"),
        ("trust sign t.json --key p1", "is not in the root"),
        ("trust sign t.json --key r1", "has signed this trust store already"),
        ("trust sign t.json --key r3 --key r3", "has signed this trust store already"),
        ("trust sign r1.pub --key r3", "r1.pub: expected a trust store, found a key"),
        ("trust sign none --key r3", "cannot read none"),
        ("trust show none", "cannot read none"),
        ("trust show r1", "r1: expected a trust store, found a key"),
        ("trust update t.json none", "cannot read none"),
        ("trust update none t.json", "cannot read none"),
        ("trust update t.json long", "expected at most 2097152 bytes, found more"),
    ],
)
def test_a_mistake_gives_no_verdict_and_writes_nothing(run: Run, arguments: str, says: str) -> None:
    Path("long").write_bytes(b" " * (MAX_TRUST_FILE_BYTES + 1))
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    done = run(arguments.replace("KEYID", keyid("p1")))
    assert done.code == 2
    assert says in done.stderr
    assert "unexpected" not in done.stderr
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_init_refuses_what_no_store_can_say_and_overwrites_nothing(run: Run, store: Path) -> None:
    before = store.read_bytes()
    assert "exists already" in run(INIT, "--sign r1").stderr
    assert store.read_bytes() == before
    Path("twin.pub").write_bytes(Path("r1.pub").read_bytes())
    twins = (
        "trust init -o n --root r1.pub --root twin.pub --threshold 2 --publisher a --stream a --publisher-key p1.pub"
    )
    for arguments, says in (
        (twins, "root: expected a threshold within 1 and 1, found 2"),
        (twins.replace("--threshold 2", "--threshold 0"), "within 1 and 1, found 0"),
        (twins.replace("--threshold 2", "--publisher-threshold 2"), "publisher 'a': expected a threshold"),
        (
            twins.replace("--threshold 2", "--not-before 2026-01-02T00:00:00Z --not-after 2026-01-01T00:00:00Z"),
            "before",
        ),
        (twins.replace("--threshold 2", "").replace("--publisher a", "--publisher="), "name"),
    ):
        done = run(arguments, "--sign r1")
        assert done.code == 2
        assert says in done.stderr
        assert not Path("n").exists()


def test_a_root_that_could_not_sign_any_more_is_not_left_behind(run: Run, store: Path) -> None:
    done = run(
        "trust revoke",
        store,
        "-o n --key",
        keyid("r1"),
        "--key",
        keyid("r2"),
        "--reason x --sign r1 --sign r2 --sign r3",
    )
    assert done.code == 2
    assert "the root would keep 1 key(s) that count, of the 2 that must sign" in done.stderr
    assert not Path("n").exists()


def test_what_appears_meanwhile_is_not_overwritten(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.read_bytes()
    monkeypatch.setattr(trust, "require_absent", lambda _: None)
    for command in (f"{INIT} --sign r1", "trust add t.json -o t.json --epoch a=2 --sign r1"):
        done = run(command)
        assert done.code == 2
        assert "t.json exists already" in done.stderr
    assert store.read_bytes() == before


def test_a_link_is_not_written_through(run: Run, store: Path) -> None:
    Path("link").symlink_to(store)
    before = store.read_bytes()
    assert run("trust sign link --key r3").code == 2
    assert store.read_bytes() == before


def test_of_two_who_sign_at_once_none_is_lost(run: Run) -> None:
    assert run(INIT, "--sign r1").code == 0
    threads = [
        threading.Thread(target=cli.main, args=(["trust", "sign", "t.json", "--key", key],)) for key in ("r2", "r3")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(SignedStore.parse(Path("t.json").read_bytes()).signers) == {keyid("r1"), keyid("r2"), keyid("r3")}


def test_a_passphrase_opens_a_root_key(run: Run, store: Path) -> None:
    Path("words").write_text("correct horse battery\n")
    Path("r3").write_bytes(SecretKey.from_pem(Path("r3").read_bytes(), None).to_pem(b"correct horse battery"))
    assert run("trust sign", store, "--key r3 --passphrase-file words").code == 0


def test_no_option_of_trust_weakens_a_check(run: Run) -> None:
    for command in ("init", "show", "add", "revoke", "sign", "update"):
        text = run("trust", command, "--help").stdout
        for word in ("force", "skip", "ignore", "insecure", "no-"):
            assert f"--{word}" not in text
