"""The examples run, from any directory, and say what they are there to show."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    # The package is found where this test finds it, and nothing else of the repository is.
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_each_example_is_run_by_a_test() -> None:
    this = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if f'run("{path.name}"' not in this] == []


def test_a_checkpoint_of_grok_1_s_layout_is_restored_over_eight_devices(tmp_path: Path) -> None:
    assert run("grok1_restore.py", tmp_path) == (
        0,
        ["26 files, 40 arrays equal to what was saved", "each of 8 devices holds (8, 64, 43) of (8, 64, 344)"],
    )


def test_a_resumed_run_takes_the_same_step(tmp_path: Path) -> None:
    if find_spec("optax") is None:
        pytest.skip("optax is not installed: it is part of the extra dev")
    assert run("resume.py", tmp_path) == (
        0,
        [
            "resumed at step 3, batch 3",
            "step 4 is bit-identical: True",
            "without the optimizer's state it is: False",
        ],
    )


def test_an_audit_in_ci_accepts_what_was_signed_and_refuses_the_rest(tmp_path: Path) -> None:
    code, lines = run("ci_audit.py", tmp_path)
    assert code == 0
    assert lines[-1] == "exit codes [0, 1, 1]"
    told = "\n".join(lines)
    assert "digest-mismatch" in told
    assert "does not allow the global builtins.print" in told
    assert "arbitrary code ran" not in told


def test_an_audit_in_ci_exits_as_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    np.save(tmp_path / "mirror" / "a.npy", np.arange(3))
    assert run("ci_audit.py", tmp_path, "mirror") == (0, ["1 files, 0 findings: accepted"])
    (tmp_path / "mirror" / "b\x1b[2Jc.npy").write_bytes(b"no array")
    code, lines = run("ci_audit.py", tmp_path, "mirror")
    assert code == 1
    assert "\x1b" not in "".join(lines)
    assert run("ci_audit.py", tmp_path, "nowhere")[0] == 2
    assert run("ci_audit.py", tmp_path, "mirror", "manifest.json")[0] == 2


def test_gpt_2_from_three_sources_is_one_tree(tmp_path: Path) -> None:
    code, lines = run("gpt2.py", tmp_path)
    assert code == 0
    assert len({line.rpartition(" ")[2] for line in lines[:3]}) == 1
    assert lines[-1] == "all three are equal, and so is what they compute"


@pytest.mark.parametrize("page", ["choosing.md", "low-memory.md"])
def test_the_python_on_a_page_of_the_docs_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
