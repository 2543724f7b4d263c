import pickle
import pickletools
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from safeload.cli import main
from safeload.errors import ConfigError
from safeload.explaining import MAX_DECOMPILED_BYTES, MAX_STEPS, explain
from safeload.scanning import scan
from tests import torch_sample
from tests.streams import honest_streams

HOSTILE = b"cos\nsystem\n(S'touch pwned'\ntR."


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_every_opcode_of_an_accepted_file_is_one_step_at_its_offset(tmp_path: Path, protocol: int) -> None:
    data = honest_streams()[protocol]
    explanation = explain(write(tmp_path / "a", data))
    expected = [(position, opcode.name) for opcode, _, position in pickletools.genops(data)]
    assert [(step.offset, step.opcode) for step in explanation.steps] == expected
    assert sum(step.nbytes for step in explanation.steps) == len(data)
    assert all(step.refusal is None for step in explanation.steps)
    assert explanation.report.verdict == "accepted"


def test_the_stack_effect_is_that_of_the_run(tmp_path: Path) -> None:
    steps = explain(write(tmp_path / "a", b"\x80\x02(K\x01K\x02t.")).steps
    assert [(s.opcode, s.marks, s.before, s.after) for s in steps] == [
        ("PROTO", 0, 0, 0),
        ("MARK", 0, 0, 0),
        ("BININT1", 1, 0, 1),
        ("BININT1", 1, 1, 2),
        ("TUPLE", 1, 2, 1),
        ("STOP", 0, 1, 1),
    ]


def test_a_refused_global_is_marked_where_it_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    explanation = explain(write(tmp_path / "a", HOSTILE))
    assert [(s.offset, s.opcode) for s in explanation.steps if s.refusal is not None] == [(0, "GLOBAL")]
    assert explanation.steps[-1].opcode == "STOP"
    assert explanation.report.globals == ("os.system",)
    assert explanation.report.verdict == "rejected"


def test_an_allowed_global_comes_with_the_policy_s_reason(tmp_path: Path) -> None:
    explanation = explain(write(tmp_path / "a", pickle.dumps(np.ones(2), 4)))
    named = [step.result for step in explanation.steps if step.opcode == "STACK_GLOBAL"]
    assert any("numpy.ndarray: Only as the first argument of _reconstruct" in result for result in named)


def test_a_broken_file_shows_how_far_it_got_and_never_fails(tmp_path: Path) -> None:
    data = honest_streams()[4]
    for length in range(len(data)):
        explanation = explain(write(tmp_path / "a", data[:length]))
        assert explanation.report.verdict == "rejected"
        whole = [step for step in explanation.steps if step.refusal is None]
        assert sum(step.nbytes for step in whole) <= length


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"PK\x03\x04....", b"\x80\x09.", b"(" * 5000, bytes(range(256))])
def test_what_is_no_pickle_is_explained_too(tmp_path: Path, data: bytes) -> None:
    assert explain(write(tmp_path / "a", data)).report.verdict == "rejected"


def test_the_report_is_that_of_a_scan(tmp_path: Path) -> None:
    for data in (*honest_streams().values(), HOSTILE, b"junk"):
        path = write(tmp_path / "a", data)
        (scanned,) = scan(path).files
        explained = explain(path).report
        # The hint to explain the file is the one thing that it leaves out.
        kept = tuple(replace(f, hint=None) if "explain" in (f.hint or "") else f for f in scanned.findings)
        assert explained == replace(scanned, findings=kept)


def test_the_program_is_what_would_have_run(tmp_path: Path) -> None:
    explanation = explain(write(tmp_path / "a", HOSTILE))
    assert explanation.has_program
    assert "from os import system" in explanation.program
    assert "system('touch pwned')" in explanation.program
    assert not (tmp_path / "pwned").exists()


def test_without_fickling_the_hint_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fickling", "fickling.fickle"):
        monkeypatch.setitem(sys.modules, name, None)
    explanation = explain(write(tmp_path / "a", HOSTILE))
    assert not explanation.has_program
    assert "pip install '.[explain]'" in explanation.program
    assert explanation.report.verdict == "rejected"


def test_a_failure_of_fickling_costs_only_its_own_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fickling.fickle import Pickled

    def fail(_data: bytes) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(Pickled, "load", fail)
    explanation = explain(write(tmp_path / "a", pickle.dumps(np.ones(2), 4)))
    assert explanation.report.verdict == "accepted"
    assert not explanation.has_program
    assert "too deep" in explanation.program


def test_a_large_file_is_not_given_to_fickling(tmp_path: Path) -> None:
    array = np.zeros(MAX_DECOMPILED_BYTES, np.int8)
    explanation = explain(write(tmp_path / "a", pickle.dumps(array, 4)))
    assert explanation.report.verdict == "accepted"
    assert not explanation.has_program


def test_a_long_run_is_cut_and_counted(tmp_path: Path) -> None:
    explanation = explain(write(tmp_path / "a", pickle.dumps(list(range(MAX_STEPS)), 4)))
    assert len(explanation.steps) == MAX_STEPS
    assert explanation.n_steps > MAX_STEPS


def test_a_path_that_is_no_file_is_a_config_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", "a\0"):
        with pytest.raises(ConfigError):
            explain(path)


def test_the_command_ends_with_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(write(tmp_path / "a", HOSTILE))]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("rejected: global-not-allowed")
    assert any("REFUSED: policy numpy-quantized does not allow the global os.system" in line for line in out)
    assert main(["explain", str(write(tmp_path / "b", pickle.dumps(np.ones(2), 4)))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "accepted"


def test_what_a_file_says_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\u202e"
    data = b"\x80\x02X" + len(evil.encode()).to_bytes(4, "little") + evil.encode()
    data += b"c" + evil.encode() + b"\nsystem\n0."
    assert main(["explain", str(write(tmp_path / "a", data))]) == 1
    shown = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in shown.out + shown.err)


def test_a_small_file_of_an_endless_program_is_not_written_out(tmp_path: Path) -> None:
    for n in (18, 40):
        explanation = explain(write(tmp_path / "a", b"\x80\x02N" + b"2\x86" * n + b"."))
        assert not explanation.has_program


def test_the_pickle_of_a_pytorch_file_is_explained_with_its_offsets_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(torch_sample.torch_zip(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."))
    explained = explain(path)
    assert [finding.code for finding in explained.report.findings] == ["global-not-allowed"]
    refused = next(step for step in explained.steps if step.refusal is not None)
    assert refused.offset == explained.report.findings[0].offset
    assert path.read_bytes()[refused.offset :].startswith(b"cposix\nsystem\n")
    assert "posix.system" in explained.report.globals


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["m/data.pkl", "m/constants.pkl", "m/code/a.py"], "a TorchScript archive"),
        (["m/data.pkl", "other/x.pkl"], "not one that torch.save writes"),
        (["notes.txt"], "no pickle was found in it"),
    ],
)
def test_an_archive_that_is_not_shown_says_which_pickles_it_holds(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        for name in names:
            archive.writestr(name, b"\x80\x02N.")
    explained = explain(tmp_path / "script.pt")
    assert not explained.has_program
    assert reason in explained.program
    assert all(name in explained.program for name in names if name.endswith(".pkl"))


def test_a_string_of_python_2_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "evil"
    path.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    (step,) = [step for step in explain(path).steps if step.opcode == "STRING"]
    assert step.result == "str of 11 bytes: 'touch pwned'"
