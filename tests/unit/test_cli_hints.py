"""What the command says to somebody who is new to it: each hint can be typed, and help shows what a first run needs."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer.main

from safeload import cli
from safeload.trust.keys import PublicKey
from tests.unit.test_cli_examples import COMMANDS


class Done(NamedTuple):
    """What one run of the command gave."""

    code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in a folder with a key `k`, a checkpoint `ck` and its manifest `m.json`."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> Done:
        capsys.readouterr()
        return Done(cli.main(line.split()), *capsys.readouterr())

    Path("ck").mkdir()
    np.save("ck/w.npy", np.ones(3, np.float32))
    assert run("keygen -o k --no-passphrase").code == 0
    assert run("sign ck --key k -o m.json").code == 0
    return run


SIGNED = "-m m.json --trust k.pub"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("verify ck -m", "verify"),
        ("trust revoke t.json --key", "trust revoke"),
        ("--verbose verify ck -m", "verify"),
        ("quarantine purge --no-such", "quarantine purge"),
        ("--no-such", ""),
    ],
)
def test_wrong_usage_names_the_help_of_the_command_that_was_typed(run: Run, line: str, command: str) -> None:
    done = run(line)
    assert done.code == 2
    assert done.stderr.endswith(f"safeload: hint: try `{f'safeload {command}'.strip()} --help`\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            f"convert ck new --to gguf {SIGNED} --key k",
            "invalid value for '--to': 'gguf' is not one of 'safetensors', 'npy', 'grok-1'",
        ),
        ("completion tcsh", "invalid value for 'SHELL': 'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        ("sign ck --key k -o x --version 0", "invalid value for '--version': expected greater than or equal to 1"),
        ("sign ck --key k -o x --version one", "invalid value for '--version': expected a valid integer"),
    ],
)
def test_a_value_is_refused_in_our_words(run: Run, line: str, says: str) -> None:
    done = run(line)
    assert done.code == 2
    assert done.stderr.splitlines()[0] == f"safeload: error: {says}"


def test_a_value_that_quotes_pydantic_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "x: Value error, y"]) == 2
    assert "'x: Value error, y' is not one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says", "hint"),
    [
        ("sign ck --key nokey -o x", "cannot read nokey", "`safeload keygen -o KEY` makes a key pair"),
        ("sign ck --key k -o no/x", "there is no folder no", "make it, or choose another name with -o"),
        (f"verify nope {SIGNED}", "there is no directory nope", "check the path"),
        (f"load nope {SIGNED}", "there is no directory nope", "check the path"),
        ("sign ck --key k -o x --expires 2020-01-01", "--expires: expected a time to come", "name the last day"),
        ("sign ck --key ek --passphrase-file wrong -o x", "the passphrase is wrong", "try the passphrase again"),
        ("sign ck --key ek --passphrase-file none -o x", "cannot read none", "the path that --passphrase-file names"),
        ("sign ck --key ek --passphrase-file two -o x", "expected one line", "put the passphrase into its first line"),
        (f"convert ck full --to npy {SIGNED} --key k", "is there, and is not empty", "name another, or move it away"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(run: Run, line: str, says: str, hint: str) -> None:
    Path("full").mkdir()
    Path("full", "mine").touch()
    Path("right").write_text("six random words\n")
    Path("wrong").write_text("seven random words\n")
    Path("two").write_text("six\nrandom words\n")
    assert run("keygen -o ek --passphrase-file right").code == 0
    done = run(line)
    error, told = done.stderr.splitlines()
    assert done.code == 2
    assert says in error
    assert told.startswith("safeload: hint: ")
    assert hint in told
    assert "replace=True" not in told
    assert not Path("x").exists()


def test_today_is_a_day_on_which_a_manifest_may_still_be_current(run: Run) -> None:
    today = (datetime.now(UTC) + timedelta(minutes=5)).date()  # should midnight be near
    assert run(f"sign ck --key k -o x --expires {today.isoformat()}").code == 0
    assert run("verify ck -m x --trust k.pub").code == 0


@pytest.mark.parametrize("page", ["<!DOCTYPE html><p>404 12345678901234567890", "\n <HTML>Not found, sorry</HTML>"])
def test_a_web_page_in_place_of_a_manifest_is_called_one(run: Run, page: str) -> None:
    Path("m.html").write_text(page)
    done = run("verify ck -m m.html --trust k.pub --json")
    (finding,) = json.loads(done.stdout)["findings"]
    assert (done.code, finding["code"]) == (1, "bad-envelope")
    assert finding["message"].endswith("expected JSON, found an HTML page")
    assert "get the manifest again" in finding["hint"]


def test_what_is_no_manifest_is_told_with_a_command_that_can_be_typed(run: Run) -> None:
    Path("bad.json").write_text("{}")
    done = run("verify ck -m bad.json --trust k.pub")
    assert "`safeload sign DIR --key KEY -o MANIFEST`" in done.stderr
    assert run("sign ck --key k.pub -o x").code == 2
    Path("junk").write_text("junk")
    assert "`safeload keygen -o KEY`" in run("sign ck --key junk -o x").stderr


# ---------------------------------------------------------------- trust revoke


@pytest.fixture
def store(run: Run) -> str:
    assert run("keygen -o p --no-passphrase").code == 0
    done = run("trust init -o t.json --root k.pub --publisher us --stream * --publisher-key p.pub --sign k")
    assert done.code == 0, done.stderr
    return "t.json"


def test_a_key_is_revoked_by_its_file_or_its_keyid(run: Run, store: str) -> None:
    keyid = PublicKey.from_pem(Path("p.pub").read_bytes()).keyid
    for name, output in (("p.pub", "by-file"), (keyid, "by-keyid"), (f"sha256:{keyid}", "by-digest")):
        assert run(f"trust revoke {store} -o {output} --reason lost --key {name} --sign k").code == 0
        revoked = json.loads(run(f"trust show {output} --json").stdout)["store"]["revoked_keys"]
        assert [each["keyid"] for each in revoked] == [keyid]


def test_a_keyid_is_never_taken_for_a_file(run: Run, store: str) -> None:
    named = "0" * 64
    Path(named).write_bytes(Path("p.pub").read_bytes())
    run(f"trust revoke {store} -o n --reason lost --key {named} --sign k")
    revoked = json.loads(run("trust show n --json").stdout)["store"]["revoked_keys"]
    assert [each["keyid"] for each in revoked] == [named]


def test_what_is_neither_a_keyid_nor_a_file_is_told_what_would_do(run: Run, store: str) -> None:
    done = run(f"trust revoke {store} -o n --reason lost --key nope.pub --sign k")
    assert done.code == 2
    assert "--key: expected 64 lower-case hexadecimal digits, found nope.pub" in done.stderr
    assert "`safeload trust show STORE` lists keyids" in done.stderr
    secret = run(f"trust revoke {store} -o n --reason lost --key p --sign k")
    assert "p: expected a public key, found a private key" in secret.stderr


# ---------------------------------------------------------------- help


def options_of(path: str) -> dict[str, Any]:
    return {name: param for param in COMMANDS[path].params for name in param.opts}


@pytest.mark.parametrize(
    "path",
    [
        *("keygen", "attach-signature", "explain", "demo", "completion"),
        *("policy list", "policy show", "policy diff"),
        *("trust init", "trust show", "trust add", "trust revoke", "trust sign", "trust update"),
    ],
)
def test_a_command_that_lists_no_files_has_no_verbose(path: str) -> None:
    assert "--verbose" not in options_of(path)


@pytest.mark.parametrize("verbose", ["-v", "--verbose"])
def test_every_command_shows_the_traceback_of_a_crash_if_that_is_asked_for_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, verbose: str
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("safeload.trust.keys.SecretKey.generate", crash)
    assert "Traceback" not in run("keygen -o n --no-passphrase").stderr
    done = run(f"{verbose} keygen -o n --no-passphrase")
    assert done.code == 2
    assert "Traceback" in done.stderr


EXPECTATIONS = {"--pin", "--trust-pin", "--model", "--revision", "--history", "--for"}


@pytest.mark.parametrize("path", ["verify", "load", "convert", "fetch"])
def test_what_a_manifest_has_to_be_stands_apart_in_help(path: str) -> None:
    options = options_of(path)
    panels = {name: options[name].rich_help_panel for name in options.keys() & EXPECTATIONS}
    assert set(panels) == EXPECTATIONS
    assert set(panels.values()) == {"What the manifest has to be"}
    assert options["--manifest"].rich_help_panel is None
    assert options["--trust"].rich_help_panel is None


def test_a_summary_explains_no_option() -> None:
    for path, command in COMMANDS.items():
        assert "TIME" not in (command.help or "").split("\n\n", 1)[0], path
    for path in ("trust init", "trust add"):
        assert "2027-06-30T00:00:00Z" in options_of(path)["--not-before"].help
    assert "2027-06-30T00:00:00Z" in options_of("trust revoke")["--since"].help


def test_help_of_the_whole_names_verbose() -> None:
    whole = typer.main.get_command(cli.app)
    assert any("--verbose" in param.opts for param in whole.params)


@pytest.mark.parametrize("command", ["verify ck", "load ck", "fetch ck new"])
def test_a_manifest_by_its_url_is_told_to_be_downloaded(run: Run, command: str) -> None:
    done = run(f"{command} -m https://mirror.example/m.json --trust k.pub")
    assert done.code == 2
    assert "expected a manifest that lies here, found the URL https://mirror.example/m.json" in done.stderr
    assert "hint: download it first" in done.stderr


@pytest.mark.parametrize("place", ["mirror.example/model", "nope"])
@pytest.mark.parametrize("given", ["{} new", "ck new --mirror {}", "{} new --unsigned"])
def test_a_source_that_is_not_there_may_lack_its_scheme(run: Run, given: str, place: str) -> None:
    signed = "" if "--unsigned" in given else SIGNED
    done = run(f"fetch {given.format(place)} {signed}")
    assert done.code == 2
    assert done.stderr.splitlines()[0] == f"safeload: error: there is no directory {place}"
    assert "begins with https://" in done.stderr


def test_a_file_that_may_not_be_read_is_told_by_whoever_opens_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # For the parser of the command line nothing is readable; root, who runs tests in containers, may read anything.
    monkeypatch.setattr("os.access", lambda *_args, **_more: False)
    assert run(f"verify ck {SIGNED}").code == 0


def test_an_audit_has_no_report_on_stdout(run: Run) -> None:
    done = run("audit ck --json")
    assert done.code == 2
    assert done.stderr.endswith("safeload: hint: the audit writes its report to a file: --json audit.json\n")
    for option in ("--json", "--sarif", "--write-baseline"):
        done = run(f"audit ck {option} -")
        assert (done.code, Path("-").exists()) == (2, False)
        assert "a report goes to a file, and - is none" in done.stderr


@pytest.mark.parametrize("command", ["trust show k.pub", "trust update k.pub k.pub", "trust sign k.pub --key k"])
def test_a_key_in_the_place_of_a_trust_store_is_called_one(run: Run, command: str) -> None:
    done = run(command)
    assert done.code == 2
    assert done.stderr.splitlines()[0] == "safeload: error: k.pub: expected a trust store, found a key (PEM)"
    assert "`safeload trust init` makes a store" in done.stderr


def test_a_side_of_a_comparison_that_is_not_there_is_told(run: Run) -> None:
    done = run("diff ck nope --trust k.pub")
    assert (done.code, done.stderr.splitlines()[0]) == (
        2,
        "safeload: error: there is no directory and no manifest nope",
    )


def test_numbers_that_jax_would_narrow_come_with_what_can_be_typed(run: Run) -> None:
    Path("wide").mkdir()
    np.save("wide/w.npy", np.ones(3, np.int64))
    assert run("sign wide --key k -o wide.json").code == 0
    done = run("load wide -m wide.json --trust k.pub --jax")
    assert done.code == 2
    assert done.stderr.endswith("safeload: hint: let JAX keep 64 bits: JAX_ENABLE_X64=1 safeload load ...\n")


@pytest.mark.parametrize("columns", [24, 40, 69, 70, 80])
def test_help_shows_whole_names_of_options_in_any_width(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for path in COMMANDS:
        shown = run(f"{path} --help").stdout
        for name in options_of(path):
            assert not name.startswith("--") or name in shown, path
