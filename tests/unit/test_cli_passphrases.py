"""What a person at a terminal can do wrong while a passphrase is asked for."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from safeload import cli
from safeload.trust.keys import SecretKey


def typing(monkeypatch: pytest.MonkeyPatch, answers: Sequence[str]) -> None:
    """Sit at a terminal, give these answers, and then press Ctrl-D."""
    left = list(answers)

    def ask(_: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", ask)


@pytest.mark.parametrize("answers", [[], ["long enough"]])
def test_the_end_of_input_is_no_crash_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: list[str]
) -> None:
    typing(monkeypatch, answers)
    assert cli.main(["keygen", "-o", str(tmp_path / "k")]) == 2
    said = capsys.readouterr().err
    assert "found the end of the input" in said
    assert "hint: run it again, or pass --passphrase-file FILE" in said
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_input_at_an_encrypted_key_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k").write_bytes(SecretKey.generate().to_pem(b"long enough"))
    (tmp_path / "ck").mkdir()
    typing(monkeypatch, [])
    assert cli.main(["sign", str(tmp_path / "ck"), "--key", str(tmp_path / "k"), "-o", str(tmp_path / "m")]) == 2
    assert "found the end of the input" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_a_passphrase_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, ["long enough\udcff", "long enough\udcff"])
    assert cli.main(["keygen", "-o", str(tmp_path / "k")]) == 0
    SecretKey.from_pem((tmp_path / "k").read_bytes(), b"long enough\xff")
