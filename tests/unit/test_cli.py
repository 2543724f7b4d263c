import base64
import hashlib
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from safeload import __version__, cli
from safeload.cli import options
from safeload.cli.output import Output
from safeload.formats.pickles.writing import write_shard
from safeload.grok1 import shard_table
from safeload.policy import DEFAULT_POLICY, policy_text
from safeload.trust.keys import PublicKey
from tests.grok_sample import TINY, write_checkpoint

SYSTEM = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
"""A pickle that would run `true` in a shell."""


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


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for index, name in enumerate(("one", "two")):
        (folder / name).write_bytes(pickle.dumps({"w": np.arange(6, dtype=np.int8).reshape(2, 3) + index}))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def key(tmp_path: Path, run: Run) -> Path:
    assert run("keygen", "-o", tmp_path / "key", "--no-passphrase").code == 0
    return tmp_path / "key"


@pytest.fixture
def signed(tmp_path: Path, run: Run, checkpoint: Path, key: Path) -> tuple[str | Path, ...]:
    """The arguments of `verify` and `load` for a signed checkpoint."""
    manifest = tmp_path / "manifest.json"
    assert run("sign", checkpoint, "--key", key, "-o", manifest).code == 0
    return checkpoint, "-m", manifest, "--trust", f"{key}.pub"


# --- keygen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa-p256"])
def test_keygen_writes_a_secret_for_its_owner_alone_and_a_public_key(tmp_path: Path, run: Run, kind: str) -> None:
    done = run("keygen", "-o", tmp_path / "k", "--kind", kind, "--no-passphrase")
    public = PublicKey.from_pem((tmp_path / "k.pub").read_bytes())
    assert done.code == 0
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert public.kind == kind
    assert done.last.split()[-1] == public.keyid


@pytest.mark.parametrize("name", ["/", "", "."])
def test_keygen_needs_the_name_of_a_file(run: Run, name: str) -> None:
    done = run("keygen", "-o", name, "--no-passphrase", "--json")
    assert done.code == 2
    (finding,) = done.json["findings"]
    assert finding["code"] == "config-error"
    assert "expected the name of a file" in finding["message"]
    assert "-o publisher.key" in finding["hint"]


def test_keygen_json_names_the_key(tmp_path: Path, run: Run) -> None:
    shown = run("keygen", "-o", tmp_path / "k", "--no-passphrase", "--json").json
    assert shown["keyid"] == PublicKey.from_pem((tmp_path / "k.pub").read_bytes()).keyid
    assert (shown["schema"], shown["kind"], shown["public_key"]) == (1, "ed25519", str(tmp_path / "k.pub"))


@pytest.mark.parametrize("taken", ["k", "k.pub"])
@pytest.mark.parametrize("as_link", [True, False])
def test_keygen_overwrites_nothing(tmp_path: Path, run: Run, taken: str, *, as_link: bool) -> None:
    if as_link:
        (tmp_path / taken).symlink_to("nowhere")
    else:
        (tmp_path / taken).write_text("mine")
    done = run("keygen", "-o", tmp_path / "k", "--no-passphrase")
    assert done.code == 2
    assert "exists already" in done.stderr
    assert _names(tmp_path) == [taken]
    assert as_link or (tmp_path / taken).read_text() == "mine"


def test_a_key_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k.pub").write_text("mine")
    monkeypatch.setattr("safeload.cli.keys.require_absent", lambda _: None)
    assert run("keygen", "-o", tmp_path / "k", "--no-passphrase").code == 2
    assert (tmp_path / "k.pub").read_text() == "mine"
    assert not (tmp_path / "k").exists()


def test_keygen_that_is_interrupted_leaves_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, data: bytes, **_: int) -> None:
        if path.suffix == ".pub":
            raise KeyboardInterrupt
        path.write_bytes(data)

    monkeypatch.setattr("safeload.files.publish", interrupted)
    assert run("keygen", "-o", tmp_path / "k", "--no-passphrase").code == 2
    assert _names(tmp_path) == []


def test_keygen_without_a_terminal_wants_to_be_told_about_the_passphrase(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    done = run("keygen", "-o", tmp_path / "k")
    assert done.code == 2
    assert "--passphrase-file FILE or --no-passphrase" in done.stderr
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        (["long enough", "long enouhg"], "differ"),
        ([""], "empty"),
        (["seven c"], "fewer than 8"),
        (["äöüßäöü"], "fewer than 8"),
        (["eight ch", "eight ch"], None),
    ],
)
def test_a_passphrase_is_typed_twice(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, typed: list[str], complaint: str | None
) -> None:
    answers = iter(typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda _: next(answers))
    done = run("keygen", "-o", tmp_path / "k")
    assert done.code == (0 if complaint is None else 2)
    assert complaint is None or complaint in done.stderr
    assert (tmp_path / "k").exists() == (complaint is None)
    assert complaint is not None or b"ENCRYPTED" in (tmp_path / "k").read_bytes()


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb\n", b"x" * 5000])
def test_a_passphrase_file_holds_one_line(tmp_path: Path, run: Run, content: bytes) -> None:
    (tmp_path / "pw").write_bytes(content)
    assert run("keygen", "-o", tmp_path / "k", "--passphrase-file", tmp_path / "pw").code == 2
    assert not (tmp_path / "k").exists()


def test_a_passphrase_that_can_be_guessed_is_refused_with_the_reason(tmp_path: Path, run: Run) -> None:
    (tmp_path / "pw").write_text("seven c\n")
    done = run("keygen", "-o", tmp_path / "k", "--passphrase-file", tmp_path / "pw")
    assert done.code == 2
    assert "PKCS #8" in done.stderr
    assert "hint: use a long one" in done.stderr
    assert _names(tmp_path) == ["pw"]
    assert "long passphrase" in run("keygen", "--help").stdout


def test_keygen_cannot_be_told_two_things_about_the_passphrase(tmp_path: Path, run: Run) -> None:
    (tmp_path / "pw").write_text("long enough")
    done = run("keygen", "-o", tmp_path / "k", "--passphrase-file", tmp_path / "pw", "--no-passphrase")
    assert done.code == 2
    assert not (tmp_path / "k").exists()


# --- sign ---------------------------------------------------------------------------------------------------------


def test_what_was_signed_verifies(run: Run, signed: tuple[str | Path, ...]) -> None:
    done = run("verify", *signed)
    assert (done.code, done.last, done.stderr) == (0, "accepted", "")
    assert "3 files" in done.stdout
    assert f"policy    {DEFAULT_POLICY}" in done.stdout


def test_sign_shows_what_it_signed(tmp_path: Path, run: Run, checkpoint: Path, key: Path) -> None:
    manifest = tmp_path / "m"
    done = run("sign", checkpoint, "--key", key, "-o", manifest, "--revision", "r7", "--version", "3", "--json")
    shown = done.json
    assert done.code == 0
    assert shown["verdict"] == "accepted"
    assert [file["path"] for file in shown["files"]] == ["config.json", "one", "two"]
    assert shown["files"][1]["tensors"][0]["shape"] == [2, 3]
    assert (shown["manifest"]["model"], shown["manifest"]["revision"], shown["manifest"]["version"]) == (
        "ckpt",
        "r7",
        3,
    )
    assert shown["output"] == str(manifest)


def test_an_encrypted_key_signs_with_its_passphrase_beside_one_that_is_not(
    tmp_path: Path, run: Run, checkpoint: Path, key: Path
) -> None:
    for name, content in (("pw", "long enough\n"), ("wrong", "other")):
        (tmp_path / name).write_text(content)
    run("keygen", "-o", tmp_path / "k2", "--passphrase-file", tmp_path / "pw")
    sign = ("sign", checkpoint, "--key", key, "--key", tmp_path / "k2")
    wrong = run(*sign, "-o", tmp_path / "no", "--passphrase-file", tmp_path / "wrong")
    assert wrong.code == 2
    assert f"{tmp_path / 'k2'}: the private key cannot be read: the passphrase is wrong" in wrong.stderr
    assert run(*sign, "-o", tmp_path / "m", "--passphrase-file", tmp_path / "pw").code == 0
    assert not (tmp_path / "no").exists()
    for name in ("key.pub", "k2.pub"):
        assert run("verify", checkpoint, "-m", tmp_path / "m", "--trust", tmp_path / name).code == 0


def test_an_encrypted_key_without_a_terminal_asks_for_a_file(
    tmp_path: Path, run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pw").write_text("long enough")
    run("keygen", "-o", tmp_path / "k2", "--passphrase-file", tmp_path / "pw")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    done = run("sign", checkpoint, "--key", tmp_path / "k2", "-o", tmp_path / "m")
    assert done.code == 2
    assert "--passphrase-file" in done.stderr


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_what_the_scan_rejects_is_not_signed(
    tmp_path: Path, run: Run, checkpoint: Path, key: Path, json_flag: list[str]
) -> None:
    (checkpoint / "bad").write_bytes(SYSTEM)
    done = run("sign", checkpoint, "--key", key, "-o", tmp_path / "m", *json_flag)
    assert done.code == 1
    if json_flag:
        assert (done.json["verdict"], done.json["findings"][0]["code"]) == ("rejected", "global-not-allowed")
    else:
        assert done.last.startswith("rejected: global-not-allowed in ")
        assert "nothing was signed" in done.stdout
    assert not (tmp_path / "m").exists()


def test_a_stricter_policy_decides_what_is_signed(tmp_path: Path, run: Run, checkpoint: Path, key: Path) -> None:
    done = run("sign", checkpoint, "--key", key, "-o", tmp_path / "m", "-p", "grok-1")
    assert done.code == 1
    assert not (tmp_path / "m").exists()


def test_sign_overwrites_nothing(tmp_path: Path, run: Run, checkpoint: Path, key: Path) -> None:
    (tmp_path / "m").write_text("mine")
    done = run("sign", checkpoint, "--key", key, "-o", tmp_path / "m")
    assert done.code == 2
    assert "-o" in done.stderr
    assert (tmp_path / "m").read_text() == "mine"


def test_a_public_key_does_not_sign(tmp_path: Path, run: Run, checkpoint: Path, key: Path) -> None:
    done = run("sign", checkpoint, "--key", f"{key}.pub", "-o", tmp_path / "m")
    assert done.code == 2
    assert done.stderr.startswith(f"safeload: error: {key}.pub: expected a private key, found a public key\n")


@pytest.mark.parametrize(
    "named", [("--model", ""), ("--model", "my model"), ("--revision", ""), ("--revision", "x" * 256)]
)
def test_a_name_that_cannot_stand_in_a_manifest_is_refused_by_its_option(
    tmp_path: Path, run: Run, checkpoint: Path, key: Path, named: tuple[str, str]
) -> None:
    done = run("sign", checkpoint, "--key", key, "-o", tmp_path / "m", *named)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"safeload: error: {named[0]}: expected a letter or digit, then ")
    assert f"hint: choose a name such as {named[0]} " in done.stderr
    assert not (tmp_path / "m").exists()


def test_a_folder_whose_name_cannot_name_a_model_asks_for_one(
    tmp_path: Path, run: Run, checkpoint: Path, key: Path
) -> None:
    folder = checkpoint.rename(tmp_path / "my model")
    done = run("sign", folder, "--key", key, "-o", tmp_path / "m")
    assert done.code == 2
    assert "--model: expected " in done.stderr
    assert run("sign", folder, "--key", key, "-o", tmp_path / "m", "--model", "a/b:c@1").code == 0


def test_a_manifest_that_is_written_into_the_checkpoint_comes_with_a_note(
    tmp_path: Path, run: Run, checkpoint: Path, key: Path
) -> None:
    inside = checkpoint / "m.json"
    done = run("sign", checkpoint, "--key", key, "-o", inside, "--json")
    assert (done.code, done.json["verdict"]) == (0, "accepted")
    assert done.stderr.startswith(f"safeload: note: {inside} lies in the checkpoint")
    assert run("verify", checkpoint, "-m", inside, "--trust", f"{key}.pub").code == 0
    (tmp_path / "copy").write_bytes(inside.read_bytes())
    assert run("verify", checkpoint, "-m", tmp_path / "copy", "--trust", f"{key}.pub").code == 1
    inside.unlink()
    assert run("sign", checkpoint, "--key", key, "-o", tmp_path / "m").stderr == ""


def test_the_layout_binds_files_to_parameters(tmp_path: Path, run: Run, key: Path) -> None:
    folder = tmp_path / "grok"
    write_checkpoint(folder)
    assert run("sign", folder, "--key", key, "-o", tmp_path / "m", "--layout", "grok-1", "-p", "grok-1").code == 0
    envelope = json.loads((tmp_path / "m").read_text())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    names = [file["parameter"] for file in payload["predicate"]["files"]]
    assert names == [shard.parameter for shard in shard_table(TINY)]


def test_the_layout_is_refused_where_the_files_do_not_have_it(
    tmp_path: Path, run: Run, checkpoint: Path, key: Path
) -> None:
    done = run("sign", checkpoint, "--key", key, "-o", tmp_path / "m", "--layout", "grok-1")
    assert done.code == 2
    assert not (tmp_path / "m").exists()


# --- verify -------------------------------------------------------------------------------------------------------


def _flip(folder: Path) -> None:
    content = bytearray((folder / "one").read_bytes())
    content[content.index(bytes(range(6)))] ^= 1
    (folder / "one").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_flip, "digest-mismatch"),
        (lambda folder: (folder / "one").unlink(), "missing-file"),
        (lambda folder: (folder / "three").write_bytes(b""), "unlisted-file"),
    ],
)
@pytest.mark.parametrize("verb", ["verify", "load"])
def test_a_changed_checkpoint_is_rejected_with_the_reason_last(
    run: Run, signed: tuple[str | Path, ...], damage: Callable[[Path], None], code: str, verb: str
) -> None:
    damage(Path(signed[0]))
    done = run(verb, *signed)
    assert done.code == 1
    assert done.last.startswith(f"rejected: {code} in ")
    assert f"[{code}]" in done.stderr
    as_json = run(verb, *signed, "--json")
    assert (as_json.code, as_json.json["verdict"]) == (1, "rejected")
    findings = as_json.json["findings"] + [f for file in as_json.json["files"] for f in file["findings"]]
    assert [finding["code"] for finding in findings] == [code]


@pytest.mark.parametrize("verb", ["verify", "load"])
def test_another_key_is_not_enough(tmp_path: Path, run: Run, signed: tuple[str | Path, ...], verb: str) -> None:
    run("keygen", "-o", tmp_path / "other", "--no-passphrase")
    done = run(verb, *signed[:-1], tmp_path / "other.pub")
    assert done.code == 1
    assert done.last.startswith("rejected: untrusted-key")
    assert run(verb, *signed[:-1], tmp_path / "other.pub", "--json").json["verdict"] == "rejected"


def test_any_trusted_key_is_enough(tmp_path: Path, run: Run, signed: tuple[str | Path, ...]) -> None:
    run("keygen", "-o", tmp_path / "other", "--no-passphrase")
    assert run("verify", *signed, "--trust", tmp_path / "other.pub").code == 0


@pytest.mark.parametrize("verb", ["verify", "load"])
@pytest.mark.parametrize(
    "wrong",
    [
        ("-m", "nowhere.json"),
        ("--trust", "nowhere.pub"),
        ("-p", "nowhere"),
        ("-p", "./nowhere.toml"),
    ],
)
def test_an_argument_that_cannot_be_read_gives_no_verdict(
    run: Run, signed: tuple[str | Path, ...], verb: str, wrong: tuple[str, str]
) -> None:
    done = run(verb, *signed, *wrong)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("safeload: error: ")
    as_json = run(verb, *signed, *wrong, "--json")
    assert (as_json.code, as_json.json["verdict"], as_json.json["files"]) == (2, "none", [])
    assert as_json.json["findings"][0]["code"] == "config-error"


@pytest.mark.parametrize("verb", ["sign", "verify", "load"])
def test_a_file_is_no_checkpoint(
    tmp_path: Path, run: Run, signed: tuple[str | Path, ...], key: Path, verb: str
) -> None:
    file = Path(signed[0]) / "config.json"
    rest = ("--key", key, "-o", tmp_path / "m") if verb == "sign" else signed[1:]
    done = run(verb, file, *rest)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"safeload: error: {file} is a file\nsafeload: hint: name the directory\n"
    assert not (tmp_path / "m").exists()


def test_the_summary_counts_a_file_that_is_not_there(run: Run, signed: tuple[str | Path, ...]) -> None:
    (Path(signed[0]) / "one").unlink()
    assert ": 2 accepted, 1 rejected (1 not read)\n" in run("verify", *signed).stdout


# --- scan and inspect ---------------------------------------------------------------------------------------------


def test_a_scan_says_that_it_verified_nothing(run: Run, checkpoint: Path) -> None:
    done = run("scan", checkpoint)
    assert (done.code, done.last) == (0, "accepted")
    assert done.stdout.splitlines()[-2].startswith("scanned, not verified (no manifest)")


@pytest.mark.parametrize("verb", ["scan", "inspect"])
def test_a_hostile_pickle_is_rejected_with_its_place(run: Run, checkpoint: Path, verb: str) -> None:
    (checkpoint / "bad").write_bytes(SYSTEM)
    done = run(verb, checkpoint)
    assert (done.code, done.last) == (1, f"rejected: global-not-allowed in {checkpoint / 'bad'}")
    assert f"safeload: error: {checkpoint / 'bad'}: " in done.stderr
    assert "safeload:   at byte 2\n" in done.stderr
    assert "4 files" in done.stdout


def test_scan_json_is_the_report(run: Run, checkpoint: Path) -> None:
    shown = run("scan", checkpoint, "--json").json
    assert (shown["schema"], shown["verdict"]) == (1, "accepted")
    assert [Path(file["path"]).name for file in shown["files"]] == ["config.json", "one", "two"]
    assert all(file["sha256"] is None for file in shown["files"])
    assert all(file["sha256"] for file in run("scan", checkpoint, "--json", "--digest").json["files"])


def test_the_policy_can_be_a_file(tmp_path: Path, run: Run, checkpoint: Path) -> None:
    text = policy_text("grok-1")[0].replace(b'name = "grok-1"', b'name = "mine"')
    (tmp_path / "mine.toml").write_bytes(text)
    done = run("scan", checkpoint / "config.json", "-p", tmp_path / "mine.toml")
    assert done.code == 0
    assert "policy    mine" in done.stdout


def test_inspect_shows_a_row_for_each_tensor(run: Run, checkpoint: Path) -> None:
    done = run("inspect", checkpoint / "one")
    heading, row = done.stdout.splitlines()[:2]
    assert heading.split() == ["file", "tensor", "dtype", "shape", "order", "offset", "bytes"]
    assert row.split()[:5] == [str(checkpoint / "one"), "w", "int8", "2x3", "C"]
    assert (done.code, done.last) == (0, "accepted")


def test_inspect_says_that_there_are_no_tensors(run: Run, checkpoint: Path) -> None:
    assert run("inspect", checkpoint / "config.json").stdout.startswith("no tensors\n\naccepted  ")
    (checkpoint / "bad").write_bytes(SYSTEM)
    assert "no tensors" not in run("inspect", checkpoint / "bad").stdout


def test_inspect_shows_no_offset_for_a_payload_that_had_to_be_decoded(tmp_path: Path, run: Run) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(np.arange(6, dtype=np.int8), protocol=0))
    assert run("inspect", tmp_path / "x").stdout.splitlines()[1].split()[-3:] == ["-", "6", "(decoded)"]


def test_inspect_digest_is_that_of_the_value(run: Run, checkpoint: Path) -> None:
    digest = hashlib.sha256(bytes(range(6))).hexdigest()
    assert digest in run("inspect", checkpoint / "one", "--digest").stdout
    shown = run("inspect", checkpoint / "one", "--digest", "--json").json
    assert shown["files"][0]["tensors"][0]["sha256"] == digest


@pytest.mark.parametrize("verb", ["scan", "inspect"])
def test_hostile_names_are_shown_escaped(tmp_path: Path, run: Run, verb: str) -> None:
    names = [b"\x1b[2J\x1b]0;t\x07", b"x\naccepted\n", "safe\u202egnp.lkp".encode(), b"caf\xff"]
    folder = tmp_path / "d"
    folder.mkdir()
    for name in names:
        with (folder / os.fsdecode(name)).open("wb") as file:
            write_shard(file, np.zeros(3, np.float32))
    (folder / "refused\x1b[1m").write_bytes(SYSTEM)
    done = run(verb, folder, "--verbose")
    assert done.code == 1
    for text in (done.stdout, done.stderr):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "\u202e" not in text
    for shown in (r"\x1b[2J\x1b]0;t\x07", r"x\naccepted\n", r"safe\u202egnp.lkp", r"caf\udcff", r"refused\x1b[1m"):
        assert shown in done.stdout + done.stderr
    paths = {os.fsencode(Path(file["path"]).name) for file in run(verb, folder, "--json").json["files"]}
    assert paths == {*names, b"refused\x1b[1m"}


def test_markup_in_a_name_is_only_text(tmp_path: Path, run: Run) -> None:
    (tmp_path / "[bold]x[").write_bytes(SYSTEM)
    assert run("scan", tmp_path).last.endswith("[bold]x[")


def test_an_empty_directory_is_rejected(tmp_path: Path, run: Run) -> None:
    done = run("scan", tmp_path)
    assert (done.code, done.last) == (1, f"rejected: nothing-to-scan in {tmp_path}")


# --- load ---------------------------------------------------------------------------------------------------------


def test_load_shows_what_it_loaded(run: Run, signed: tuple[str | Path, ...]) -> None:
    done = run("load", *signed)
    assert (done.code, done.last) == (0, "accepted")
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["one", "w", "int8", "2x3", "6"]
    assert lines[0].split() == ["file", "tensor", "dtype", "shape", "bytes"]
    assert re.fullmatch("2 files, 2 tensors, 12 B verified and loaded as numpy arrays in [0-9.]+ s", lines[-2])


def test_load_states_a_rate_where_there_is_something_to_measure(
    run: Run, signed: tuple[str | Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safeload.cli.checkpoints._MIN_RATED_BYTES", 12)
    assert re.search(r" in [0-9.]+ s \([0-9.]+ GB/s\)$", run("load", *signed).stdout, re.MULTILINE)


def test_load_json_has_the_verdict_and_the_table(run: Run, signed: tuple[str | Path, ...]) -> None:
    shown = run("load", *signed, "--json").json
    assert (shown["schema"], shown["verdict"], shown["findings"], shown["bytes"]) == (1, "accepted", [], 12)
    assert shown["files"][0] == {
        "path": "one",
        "verdict": "accepted",
        "findings": [],
        "tensors": [{"name": "w", "dtype": "int8", "shape": [2, 3], "nbytes": 6}],
    }


def test_load_into_jax(run: Run, signed: tuple[str | Path, ...]) -> None:
    done = run("load", *signed, "--jax")
    assert (done.code, done.last) == (0, "accepted")
    assert "loaded into JAX" in done.stdout
    heading, row = done.stdout.splitlines()[:2]
    assert (heading.split()[-1], row.split()[-1]) == ("devices", "cpu:0")
    assert run("load", *signed, "--jax", "--json").json["files"][0]["tensors"][0]["devices"] == ["cpu:0"]


def test_without_jax_there_is_a_hint(run: Run, signed: tuple[str | Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    done = run("load", *signed, "--jax")
    assert done.code == 2
    assert "extra `jax`: pip install '.[jax]' in its repository" in done.stderr


@pytest.mark.parametrize(("budget", "code"), [("1GiB", 0), ("10B", 2), ("8G", 2), ("0", 2)])
def test_load_stages_within_the_memory_budget(run: Run, signed: tuple[str | Path, ...], budget: str, code: int) -> None:
    assert run("load", *signed, "--memory-budget", budget).code == code


def test_what_is_nested_is_listed_by_its_path(tmp_path: Path, run: Run, key: Path) -> None:
    folder = tmp_path / "nested"
    folder.mkdir()
    (folder / "x").write_bytes(pickle.dumps({"a": [np.zeros(2, np.int8), (np.zeros(3, np.int8),)], "n": 1}))
    run("sign", folder, "--key", key, "-o", tmp_path / "m")
    shown = run("load", folder, "-m", tmp_path / "m", "--trust", f"{key}.pub", "--json").json
    assert [tensor["name"] for tensor in shown["files"][0]["tensors"]] == ["a/0", "a/1/0"]


# --- policy -------------------------------------------------------------------------------------------------------


def test_policy_list_names_the_shipped_ones(run: Run) -> None:
    done = run("policy", "list")
    assert done.code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["grok-1", "numpy-quantized", "orbax"]
    assert [policy["name"] for policy in run("policy", "list", "--json").json["policies"]] == [
        "grok-1",
        "numpy-quantized",
        "orbax",
    ]


def test_policy_show_prints_the_file_as_it_is(run: Run) -> None:
    done = run("policy", "show", "grok-1")
    content, _ = policy_text("grok-1")
    shown = run("policy", "show", "grok-1", "--json").json
    assert (done.code, done.stdout) == (0, content.decode())
    assert shown["sha256"] in done.stderr
    assert (shown["schema"], shown["name"], shown["source"]) == (1, "grok-1", "grok-1")
    assert shown["policy"]["formats"] == {"allow": ["pickle"]}


def test_policy_show_shows_no_file_that_is_no_policy(tmp_path: Path, run: Run) -> None:
    (tmp_path / "x.toml").write_text("version = 1\nnmae = 'x'\n")
    done = run("policy", "show", tmp_path / "x.toml")
    assert (done.code, done.stdout) == (2, "")


# --- usage, crashes, interrupts, pipes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["policy"],
        ["scan"],
        ["scam", "x"],
        ["scan", "--no-such-option", "x"],
        ["scan", "nowhere"],
        ["verify", "."],
        ["verify", ".", "-m", "m"],
        ["sign", ".", "--key", "k"],
        ["sign", ".", "--key", "k", "-o", "m", "--version", "0"],
        ["sign", ".", "--key", "k", "-o", "m", "--layout", "grok-2"],
        ["keygen"],
        ["keygen", "-o", "k", "--kind", "rsa"],
        ["keygen", "-o", "nowhere/k", "--no-passphrase"],
        ["policy", "show"],
        ["policy", "show", "nowhere"],
        ["demo", "--directory", "/"],
    ],
)
def test_wrong_usage_is_no_verdict(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.code == 2
    assert done.stderr or "Usage" in done.stdout
    assert "Traceback" not in done.stderr
    if arguments not in ([], ["policy"]):
        assert done.stdout == ""
        assert all(line.startswith("safeload: ") for line in done.stderr.splitlines())
        assert run(*arguments, "--json").json["verdict"] == "none"
    assert _names(tmp_path) == []


def test_an_argument_is_shown_escaped(run: Run) -> None:
    assert "\x1b" not in run("scan", "--no-such\x1b[2J", "x").stderr
    assert "\x1b" not in run("\x1b[2J").stderr
    assert "\x1b" not in run("scan", "nowhere\x1b[2J").stderr


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(run: Run, option: str) -> None:
    assert run(option) == Done(0, f"safeload {__version__}\n", "")


@pytest.mark.parametrize("command", ["keygen", "sign", "verify", "scan", "inspect", "load", "policy", "demo"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(run: Run, command: str, option: str) -> None:
    done = run(command, option)
    assert done.code == 0
    assert "Usage:" in done.stdout
    assert f" {command} " in run(option).stdout


@pytest.mark.parametrize(
    "command", ["", "keygen", "sign", "verify", "scan", "inspect", "explain", "load", "policy show"]
)
def test_help_shows_arguments_as_they_are_typed_and_flags_without_a_type(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    for of_typer in ("<bool>", "<list", "<path>", "<str>", "{"):
        assert of_typer not in shown
    assert command not in {"scan", "inspect"} or f"Usage: safeload {command} [OPTIONS] PATH... " in shown


def test_help_names_what_ends_without_a_verdict_and_gives_an_example_of_verify(run: Run) -> None:
    assert "an interruption)" in " ".join(run("--help").stdout.split())
    example = "safeload verify checkpoint -m manifest.json --trust publisher.key.pub"
    assert f"Examples: {example}" in " ".join(run("verify", "--help").stdout.split())


def test_the_policy_that_help_names_is_the_default() -> None:
    assert options.DEFAULT_POLICY_NAME == DEFAULT_POLICY


def _raise(error: BaseException) -> Callable[..., Any]:
    def raising(*_: object, **__: object) -> Any:
        raise error

    return raising


def test_a_crash_is_no_verdict_and_takes_one_line(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.scanning.scan", _raise(ZeroDivisionError("by\x1b[2J zero")))
    done = run("scan", checkpoint)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        r"safeload: error: unexpected ZeroDivisionError: by\x1b[2J zero; please report",
        "safeload: hint: `safeload --verbose` before the command shows where",
    ]
    assert run("scan", checkpoint, "--json").json["findings"][0]["code"] == "unexpected"
    assert "Traceback" in run("scan", checkpoint, "--verbose").stderr


def test_no_memory_is_no_verdict(run: Run, signed: tuple[str | Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.loading.load_and_report", _raise(MemoryError()))
    done = run("load", *signed)
    assert done.code == 2
    assert "--memory-budget" in done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_is_no_verdict(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr("safeload.scanning.scan", _raise(error))
    assert run("scan", checkpoint).code == 2


def test_an_interrupt_says_so(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.scanning.scan", _raise(KeyboardInterrupt()))
    assert run("scan", checkpoint).stderr == "safeload: interrupted\n"
    assert run("scan", checkpoint, "--json").json["findings"][0]["code"] == "interrupted"


def _start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "safeload", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("arguments", [("scan",), ("scan", "--json"), ("inspect",)])
def test_a_reader_that_goes_away_changes_no_verdict(checkpoint: Path, arguments: tuple[str, ...]) -> None:
    process = _start(*arguments, checkpoint, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")


def test_a_verdict_that_nobody_can_read_is_none(checkpoint: Path) -> None:
    with Path("/dev/full").open("w", encoding="ascii") as full:
        process = _start("scan", checkpoint, stdout=full)
        _, stderr = process.communicate()
    assert process.returncode == 2
    assert stderr == "safeload: error: the output cannot be written: No space left on device\n"


def test_a_name_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "日本").write_bytes(SYSTEM)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = _start("scan", tmp_path, stdout=subprocess.PIPE, env=environment)
    stdout, stderr = process.communicate()
    assert process.returncode == 1
    assert r"\u65e5\u672c" in stderr
    assert stdout.splitlines()[-1].endswith(r"\u65e5\u672c")


def _is_open(fds: Path, file: Path) -> bool:
    try:
        return any(fd.readlink() == file for fd in fds.iterdir())
    except FileNotFoundError:  # one was closed between the listing and the look
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["scan", "sign"])
def test_ctrl_c_and_sigterm_end_a_long_run_without_a_verdict_and_leave_nothing(
    tmp_path: Path, key: Path, verb: str, number: int
) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    with (folder / "weights").open("wb") as file:  # sparse: half a minute of hashing, no room on disk
        file.truncate(2**36)
    before = _names(tmp_path)
    arguments = ["scan", "--digest"] if verb == "scan" else ["sign", "--key", key, "-o", tmp_path / "m"]
    process = _start(*arguments, folder, stdout=subprocess.PIPE)
    fds = Path(f"/proc/{process.pid}/fd")
    while not _is_open(fds, folder / "weights"):
        assert process.poll() is None
        time.sleep(0.01)
    try:
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (2, "", "safeload: interrupted\n")
    assert _names(tmp_path) == before


def test_a_program_that_calls_the_command_keeps_its_own_signals(run: Run, checkpoint: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run("scan", checkpoint).code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, "scan", checkpoint).result().code == 0


def test_scan_starts_without_numpy_jax_and_cryptography(checkpoint: Path) -> None:
    code = (
        "import sys; from safeload import cli; assert cli.main(sys.argv[1:]) == 0; "
        "print(sorted({'numpy', 'jax', 'cryptography', 'ml_dtypes', 'rich.progress'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, "scan", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- terminals ----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.cli.output._is_terminal", lambda _: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 20)))
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_colored_verdict(run: Run, checkpoint: Path) -> None:
    assert run("scan", checkpoint).last == "\x1b[32maccepted\x1b[0m"
    (checkpoint / "bad").write_bytes(SYSTEM)
    done = run("scan", checkpoint)
    assert done.last.startswith("\x1b[31mrejected: ")
    assert done.stderr.startswith("\x1b[31msafeload: error:\x1b[0m ")


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", ""), ("TERM", "dumb")])
def test_color_can_be_had_without(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert run("scan", checkpoint).last == "accepted"


@pytest.mark.usefixtures("terminal")
def test_a_table_folds_in_a_narrow_terminal(run: Run, checkpoint: Path) -> None:
    lines = run("inspect", checkpoint / "one").stdout.splitlines()
    assert lines[:3] == ["file", str(checkpoint / "one"), "  tensor w"]


@pytest.mark.usefixtures("terminal")
def test_a_policy_file_cannot_control_the_terminal_that_shows_it(tmp_path: Path, run: Run) -> None:
    content = policy_text("grok-1")[0].decode() + "#\ttab, \u202eoverride, caf\u00e9\n"
    (tmp_path / "x.toml").write_text(content, encoding="utf-8")
    assert run("policy", "show", tmp_path / "x.toml").stdout == content.replace("\u202e", r"\u202e")


@pytest.mark.usefixtures("terminal")
def test_progress_is_drawn_on_stderr_once_there_is_something_to_wait_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich looks by itself whether it writes to a terminal
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Output().progress() as progress:
        assert progress is not None
        progress("hash[bold]ing", 1, 100)
        assert capsys.readouterr() == ("", "")
        now = 10.0
        progress("hash[bold]ing", 50, 100)
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "hash[bold]ing" in stderr


@pytest.mark.usefixtures("terminal")
def test_a_ci_job_gets_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with Output().progress() as progress:
        assert progress is None


def test_a_pipe_gets_no_progress() -> None:
    with Output().progress() as progress:
        assert progress is None


def test_a_reader_that_has_seen_enough_of_the_help_is_no_fault() -> None:
    command = f"{sys.executable} -m safeload load --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode != 1  # which is a verdict


def test_a_signal_behind_the_verdict_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """While the interpreter ends, which a slow `atexit` stands for here."""
    script = (
        "import atexit, os, signal, sys\n"
        "from safeload.__main__ import main\n"
        "atexit.register(lambda: [os.kill(os.getpid(), s) for s in (signal.SIGTERM, signal.SIGINT)])\n"
        "sys.argv = ['safeload', 'policy', 'list']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
