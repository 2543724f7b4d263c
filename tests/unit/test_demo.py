import importlib.util
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safeload import cli, demo, loading
from safeload.decoding import HostTensor
from safeload.errors import ConfigError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo sets these two for JAX; they are put back. Its folder is where nothing of it may stay."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


Capture = pytest.CaptureFixture[str]


def test_the_demo_tells_the_whole_story_and_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["demo"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert stdout.splitlines()[-1] == "accepted"
    for number in range(1, 7):
        assert f"\n{number}. " in stdout
    for said in (
        "digest-mismatch",
        "global-not-allowed",
        "missing-file",
        "unlisted-file",
        "symlink",
        "os.system",
        "did not run",
        "It does not prove",
        "(-, data+model)",
    ):
        assert said in stdout
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_demo_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((50, 20)))
    monkeypatch.setattr("safeload.cli.output._is_terminal", lambda _: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # What is quoted is not broken: commands, to be copied, and messages, each on its line where the table does not fit.
    quoted = ("   $", "   >>>", "     in words ")
    assert [line for line in lines if len(line) > 50 and " " in line.strip() and not line.startswith(quoted)] == []


def test_the_demo_in_json_is_one_object(capsys: Capture) -> None:
    assert cli.main(["demo", "--json"]) == 0
    stdout = capsys.readouterr().out
    shown = json.loads(stdout)
    assert stdout.count("\n") == 1
    assert shown["verdict"] == "accepted"
    assert shown["demo"]["hostile_pickle_ran"] is False
    assert sorted(refusal["code"] for refusal in shown["demo"]["refused"]) == [
        "digest-mismatch",
        "digest-mismatch",
        "global-not-allowed",
        "missing-file",
        "symlink",
        "unlisted-file",
    ]
    tensors = shown["demo"]["tensors"]
    split = [tensor for tensor in tensors if "model" in tensor["sharding"]]
    assert len(split) == 15
    assert all(tensor["nbytes"] == demo.N_DEVICES * tensor["device_nbytes"] for tensor in split)


def test_a_kept_folder_holds_what_the_story_named(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "kept"
    assert cli.main(["demo", "--directory", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "elsewhere",
        "good",
        "manifest.json",
        "poisoned",
        "publisher.key.pub",
    ]
    arguments = ["-m", str(folder / "manifest.json"), "--trust", str(folder / "publisher.key.pub"), "-p", "grok-1"]
    assert cli.main(["verify", str(folder / "good"), *arguments]) == 0
    assert cli.main(["verify", str(folder / "poisoned"), *arguments]) == 1
    capsys.readouterr()
    assert cli.main(["demo", "--directory", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"safeload: error: cannot make the folder {folder}: File exists\n"
        "safeload: hint: name one that does not exist yet\n"
    )


def test_without_jax_the_demo_gives_no_verdict_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jax" else find(name))
    assert cli.main(["demo"]) == 2
    stdout, stderr = capsys.readouterr()
    assert "extra `jax`: pip install '.[jax]' in its repository" in stderr
    assert "symlink" in stdout


def _not_done(poison: Callable[..., tuple[demo.Attack, ...]], index: int) -> Callable[..., tuple[demo.Attack, ...]]:
    def lazy(good: Path, poisoned: Path, *rest: Any) -> tuple[demo.Attack, ...]:
        attacks = poison(good, poisoned, *rest)
        file = attacks[index].file
        (poisoned / file).unlink(missing_ok=True)
        if (good / file).exists():
            (poisoned / file).write_bytes((good / file).read_bytes())
        return attacks

    return lazy


@pytest.mark.parametrize("index", range(5))
def test_the_demo_fails_if_one_promised_refusal_does_not_come(
    index: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("safeload.demo.poison", _not_done(demo.poison, index))
    assert cli.main(["demo"]) == 1
    stdout, stderr = capsys.readouterr()
    assert stdout.splitlines()[-1] == "rejected: demo-failed"
    assert "expected" in stderr


def test_the_demo_fails_if_there_is_a_refusal_that_nobody_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    poison = demo.poison
    monkeypatch.setattr("safeload.demo.poison", lambda *arguments: poison(*arguments)[1:])
    assert cli.main(["demo"]) == 1
    assert "expected nothing, found ['digest-mismatch', 'global-not-allowed']" in capsys.readouterr().err


def test_the_demo_fails_if_the_hostile_pickle_ran(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    poison = demo.poison

    def poison_and_run(good: Path, poisoned: Path, shards: Any, sentinel: Path) -> tuple[demo.Attack, ...]:
        attacks = poison(good, poisoned, shards, sentinel)
        with (poisoned / attacks[0].file).open("rb") as file:
            pickle.load(file)
        assert sentinel.read_text() == "this could have been any program\n"
        return attacks

    monkeypatch.setattr("safeload.demo.poison", poison_and_run)
    assert cli.main(["demo"]) == 1
    assert "the hostile pickle ran" in capsys.readouterr().err


def test_the_hostile_pickle_has_the_size_of_the_file_that_it_replaces() -> None:
    assert len(demo.hostile_pickle("true", 1000)) == 1000


def test_the_checkpoint_is_an_honest_one(tmp_path: Path) -> None:
    shards = demo.write_checkpoint(tmp_path / "good")
    demo.sign_checkpoint(tmp_path / "good", tmp_path / "m", tmp_path / "k.pub")
    trusted, tree = loading.load_host(
        tmp_path / "good", manifest=tmp_path / "m", trust=[tmp_path / "k.pub"], policy="grok-1"
    )
    assert [trusted.manifest.by_path[shard.file].parameter for shard in shards] == [shard.parameter for shard in shards]
    dtypes = set()
    for value in tree.values():
        fields = {"": value} if isinstance(value, HostTensor) else dict(value.items())
        dtypes |= {(name, tensor.array.dtype.name) for name, tensor in fields.items()}
        assert all(np.isfinite(tensor.array.astype(np.float32)).all() for tensor in fields.values())
    assert dtypes == {("", "float32"), ("weight", "int8"), ("scales", "bfloat16")}
    assert 8e6 < sum(path.stat().st_size for path in (tmp_path / "good").iterdir()) < 20e6


def test_too_few_devices_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.demo.N_DEVICES", 9)
    with pytest.raises(ConfigError, match="a process of its own"):
        demo.load_over_devices(tmp_path, tmp_path, tmp_path, ())
