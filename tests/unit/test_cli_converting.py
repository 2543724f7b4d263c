"""The commands `convert` and `diff`: what they print, and the exit code that a script goes by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from safeload import cli
from safeload.formats.safetensors_writing import write_safetensors


class Session:
    """A signed checkpoint and its keys, and the command run beside them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        (folder / "st").mkdir()
        with (folder / "st" / "model.safetensors").open("wb") as file:
            write_safetensors(file, {"a": np.arange(3.0), "b": np.ones(2, np.int32)})
        assert self.run("keygen", "-o", "key", "--no-passphrase")[0] == 0
        assert self.run("sign", "st", "-o", "st.json", "--key", "key", "--model", "m")[0] == 0

    def run(self, *arguments: str) -> tuple[int, str, str]:
        here = {
            "key",
            "new",
            "new.json",
            "st.json",
            *(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*")),
        }
        code = cli.main([str(self.folder / argument) if argument in here else argument for argument in arguments])
        out, err = self.capsys.readouterr()
        return code, out, err

    def convert(self, *more: str) -> tuple[int, str, str]:
        return self.run("convert", "st", "new", "-m", "st.json", "--trust", "key.pub", "--key", "key", *more)


@pytest.fixture
def session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Session:
    return Session(tmp_path, capsys)


def test_convert_writes_a_checkpoint_that_verifies(session: Session) -> None:
    code, out, _ = session.convert("--to", "npy")
    assert code == 0
    assert "2 tensors, 32 B" in out
    assert out.splitlines()[-1] == "accepted"
    assert sorted(p.name for p in (session.folder / "new").iterdir()) == ["a.npy", "b.npy", "manifest.json"]
    code, out, _ = session.run("verify", "new", "-m", "new/manifest.json", "--trust", "key.pub", "--model", "m+npy")
    assert (code, out.splitlines()[-1]) == (0, "accepted")


def test_convert_prints_one_object(session: Session) -> None:
    code, out, _ = session.convert(
        "--to", "npy", "-o", "new.json", "--as-model", "other", "--as-revision", "r2", "--json"
    )
    told = json.loads(out)
    assert code == 0
    assert (told["verdict"], told["tensors"], told["bytes"], told["left_out"]) == ("accepted", 2, 32, [])
    assert told["files"] == ["a.npy", "b.npy"]
    assert told["output"] == str(session.folder / "new.json")
    wanted = ("--trust", "key.pub", "--model", "other", "--revision", "r2")
    assert session.run("verify", "new", "-m", "new.json", *wanted)[0] == 0


def test_convert_of_changed_files_is_a_rejection_and_leaves_nothing(session: Session) -> None:
    path = session.folder / "st" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    code, out, err = session.convert("--to", "npy")
    assert (code, out.splitlines()[-1]) == (1, "rejected: digest-mismatch in model.safetensors")
    assert "[digest-mismatch]" in err
    assert not (session.folder / "new").exists()


def test_convert_does_not_overwrite(session: Session) -> None:
    (session.folder / "new").mkdir()
    (session.folder / "new" / "mine").write_bytes(b"")
    code, _, err = session.convert("--to", "npy")
    assert code == 2
    assert "new" in err
    (session.folder / "new.json").write_bytes(b"mine")
    code, _, err = session.convert("--to", "npy", "-o", "new.json")
    assert code == 2
    assert "exists already" in err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_diff_exits_0_exactly_if_the_values_are_equal(session: Session, flags: tuple[str, ...]) -> None:
    session.convert("--to", "npy")
    assert session.run("diff", "st", "new", *flags)[0] == 0
    assert session.run("diff", "st.json", "new/manifest.json", "--trust", "key.pub", *flags)[0] == 0
    np.save(session.folder / "new" / "a.npy", np.zeros(3))
    code, out, _ = session.run("diff", "st", "new", *flags)
    assert code == 1
    if flags:
        assert list(json.loads(out)["difference"]["changed"]) == ["a"]
    else:
        assert "changed   a  float64[3] sha256:" in out
        assert "1 tensor same, 1 changed, 0 renamed, 0 missing, 0 added" in out
        assert out.splitlines()[-1].startswith("rejected")


def test_diff_shows_the_first_of_many_unless_told_otherwise(session: Session) -> None:
    (session.folder / "many").mkdir()
    for index in range(25):
        np.save(session.folder / "many" / f"t{index:02d}.npy", np.full(1, index))
    _, out, _ = session.run("diff", "st", "many")
    assert out.count("added     t") == 20
    assert "and 5 more" in out
    _, out, _ = session.run("diff", "st", "many", "-v")
    assert out.count("added     t") == 25


def test_diff_of_a_manifest_without_a_key_is_no_verdict(session: Session) -> None:
    code, out, err = session.run("diff", "st.json", "st")
    assert (code, out) == (2, "")
    assert "--trust" in err


def test_names_are_printed_escaped(session: Session) -> None:
    (session.folder / "evil").mkdir()
    with (session.folder / "evil" / "model.safetensors").open("wb") as file:
        write_safetensors(file, {"\x1b[2J": np.ones(1)})
    _, out, _ = session.run("diff", "st", "evil")
    assert "\\x1b[2J" in out
    assert "\x1b[2J" not in out
