"""What CI systems, Docker and Kubernetes are given: each is read as they read it, and run as far as it can be here.

There is no Docker daemon, no cluster and no runner in a test. So no image is built: its file is read, and the command
is run as that user, on a file system that cannot be written to.
"""

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped] # it comes without types

from tests.readme_blocks import BIN, ROOT

SYSTEM = b"cos\nsystem\n(S'touch pwned'\ntR."
"""A pickle that would run a command in a shell."""


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def run(command: list[str | Path], folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin:/sbin", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `checkpoint`, `manifest.json` and `publisher.key.pub`; copy it before changing it."""
    folder = tmp_path_factory.mktemp("signed")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "weights.pkl").write_bytes(pickle.dumps({"w": np.ones((4, 4), np.float32)}))
    for arguments in (
        "keygen -o publisher.key --no-passphrase",
        "sign checkpoint --key publisher.key -o manifest.json --model my-model --revision r1",
    ):
        assert run(["safeload", *arguments.split()], folder).returncode == 0
    return folder


@pytest.fixture
def work(signed: Path, tmp_path: Path) -> Path:
    shutil.copytree(signed, tmp_path / "work")
    return tmp_path / "work"


# ---------------------------------------------------------------- the GitHub Action

ACTION = read_yaml("action.yml")
STEPS = ACTION["runs"]["steps"]


def test_the_action_is_composite_and_uses_no_other_action() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert [step for step in STEPS if "uses" in step] == []
    assert {"name", "description", "inputs", "outputs", "runs"} <= set(ACTION)


def test_no_input_is_pasted_into_a_script() -> None:
    # `${{ inputs.x }}` in a script is replaced before the shell reads it: whoever writes the input writes the script.
    assert [step["run"] for step in STEPS if "${{" in step["run"]] == []


def test_every_input_reaches_a_step_and_is_described() -> None:
    passed = {value for step in STEPS for value in step["env"].values()}
    assert passed == {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]}
    for name, declared in ACTION["inputs"].items():
        assert declared["description"], name
        assert declared["required"] is ("default" not in declared), name


def test_every_script_of_the_action_is_there_can_be_run_and_reads_only_what_it_is_given() -> None:
    for step in STEPS:
        script = ROOT / step["run"].strip('"').removeprefix("$GITHUB_ACTION_PATH/")
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
        text = script.read_text(encoding="utf-8")
        assert "set -euo pipefail" in text
        assert set(re.findall(r"\$\{?(INPUT_\w+)", text)) == {name for name in step["env"] if name in text}
        assert [name for name in step["env"] if name not in text] == []


def test_every_output_is_written_by_the_audit() -> None:
    text = (ROOT / "deploy/github/audit.sh").read_text(encoding="utf-8")
    for name, output in ACTION["outputs"].items():
        assert output["value"] == f"${{{{ steps.audit.outputs.{name} }}}}"
        assert re.search(rf"\b{name}\b", text), name


class Runner:
    """A runner of GitHub with this environment's safeload in the place of what the first step installs."""

    def __init__(self, folder: Path, work: Path) -> None:
        (folder / "temp" / "safeload" / "bin").mkdir(parents=True)
        (folder / "temp" / "safeload" / "bin" / "safeload").symlink_to(BIN / "safeload")
        self.folder = folder
        self.work = work

    def audit(self, **inputs: str) -> tuple[int, str, dict[str, str]]:
        """Run the second step; return its exit code, what it printed, and the outputs."""
        (self.folder / "output").write_text("")
        (step,) = [step for step in STEPS if step.get("id") == "audit"]
        given = {name: str(declared.get("default", "")) for name, declared in ACTION["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        env = {name: given[re.sub(r"\W*inputs\.|\W*$", "", value)] for name, value in step["env"].items()}
        env |= {"GITHUB_ACTION_PATH": str(ROOT), "GITHUB_OUTPUT": str(self.folder / "output")}
        done = run(["bash", "-c", step["run"]], self.work, {**env, "RUNNER_TEMP": str(self.folder / "temp")})
        lines = (self.folder / "output").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, dict(line.split("=", 1) for line in lines)


@pytest.fixture
def runner(tmp_path: Path, work: Path) -> Runner:
    return Runner(tmp_path, work)


SIGNED = {"checkpoints": "checkpoint", "manifests": "manifest.json", "trust": "publisher.key.pub"}


def test_the_action_accepts_what_was_signed_and_names_its_reports(runner: Runner) -> None:
    code, _, outputs = runner.audit(**SIGNED)
    assert code == 0
    assert outputs.pop("verdict") == "accepted"
    assert set(outputs) == {"sarif", "junit", "html", "json"}
    assert all(Path(path).is_file() for path in outputs.values())
    assert json.loads(Path(outputs["sarif"]).read_text())["version"] == "2.1.0"


def test_the_action_fails_for_what_was_changed(runner: Runner) -> None:
    (runner.work / "checkpoint" / "weights.pkl").write_bytes(SYSTEM)
    code, printed, outputs = runner.audit(**SIGNED)
    assert code == 1
    assert outputs["verdict"].startswith("rejected")
    assert "::error" in printed
    assert Path(outputs["html"]).is_file()
    assert not (runner.work / "pwned").exists()


def test_the_action_audits_several_directories(runner: Runner) -> None:
    (runner.work / "other").mkdir()
    (runner.work / "other" / "w.pkl").write_bytes(pickle.dumps(np.zeros(3)))
    both = {**SIGNED, "checkpoints": "checkpoint\nother\n", "manifests": "manifest.json\n-\n"}
    assert runner.audit(**both)[0] == 0
    code, _, outputs = runner.audit(**both, fail_on="unverified")
    assert (code, outputs["verdict"].split(":")[0]) == (1, "rejected")


@pytest.mark.parametrize("name", ["$(touch pwned) * '\"", "`touch pwned`; touch pwned", "--policy=mine.toml"])
def test_an_input_is_data_whatever_is_in_it(runner: Runner, name: str) -> None:
    (runner.work / "checkpoint").rename(runner.work / name)
    code, _, _ = runner.audit(**{**SIGNED, "checkpoints": name})
    assert code == 0
    assert not (runner.work / "pwned").exists()


def test_wrong_inputs_are_no_acceptance(runner: Runner) -> None:
    assert runner.audit(checkpoints="nowhere")[0] == 2
    assert runner.audit(**{**SIGNED, "policy": "no-such-policy"})[0] == 2
    assert runner.audit(checkpoints="")[0] == 2


def test_the_install_refuses_extras_that_are_no_names(tmp_path: Path) -> None:
    env = {"INPUT_EXTRAS": "x] evil @ https://x", "RUNNER_TEMP": str(tmp_path), "GITHUB_ACTION_PATH": str(ROOT)}
    done = run([ROOT / "deploy/github/install.sh"], tmp_path, env)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the pre-commit hook

(HOOK,) = read_yaml(".pre-commit-hooks.yaml")


def hook(folder: Path, *names: str) -> int:
    """Run the hook as pre-commit does: its entry, its arguments, then the names that its pattern chose."""
    chosen = [name for name in names if re.search(HOOK["files"], name)]
    assert chosen, names
    return run([*shlex.split(HOOK["entry"]), *HOOK["args"], *chosen], folder).returncode


def test_the_hook_has_what_pre_commit_asks_for() -> None:
    known = {"id", "name", "description", "entry", "language", "files", "args", "require_serial"}
    assert set(HOOK) == known | {"minimum_pre_commit_version"}
    assert HOOK["language"] == "python"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert HOOK["entry"].split()[0] in scripts


def test_the_hook_accepts_tensors_and_refuses_code(tmp_path: Path) -> None:
    (tmp_path / "good.pkl").write_bytes(pickle.dumps(np.zeros(3)))
    (tmp_path / "bad.PT").write_bytes(SYSTEM)
    assert hook(tmp_path, "good.pkl") == 0
    assert hook(tmp_path, "good.pkl", "bad.PT") == 1
    assert not (tmp_path / "pwned").exists()


def test_a_file_cannot_be_an_option_of_the_hook(tmp_path: Path) -> None:
    name = "--policy=orbax.pkl"
    (tmp_path / name).write_bytes(SYSTEM)
    assert hook(tmp_path, name) == 1


def test_the_hook_looks_at_each_kind_of_checkpoint_and_at_nothing_else() -> None:
    names = ["a.pkl", "b/c.safetensors", "d.gguf", "e.npz", "F.BIN", "g.h5", "h.onnx"]
    assert [name for name in names if not re.search(HOOK["files"], name)] == []
    assert [name for name in ("a.py", "pkl", "pkl.md", "a.json") if re.search(HOOK["files"], name)] == []


# ---------------------------------------------------------------- the image


def dockerfile() -> list[tuple[str, str]]:
    """Return each instruction and its argument."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def last_stage() -> dict[str, str]:
    instructions = dockerfile()
    start = max(index for index, (word, _) in enumerate(instructions) if word == "FROM")
    return dict(instructions[start:])


def test_the_image_runs_as_a_number_that_is_not_root() -> None:
    user, group = last_stage()["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_the_image_builds_elsewhere_and_copies_only_the_environment() -> None:
    assert "RUN" not in last_stage()
    assert last_stage()["COPY"] == "--from=build /safeload /safeload"
    assert json.loads(last_stage()["ENTRYPOINT"]) == ["safeload"]
    assert [argument for word, argument in dockerfile() if word == "ADD" or "--privileged" in argument] == []


def test_the_image_is_built_from_all_that_the_package_needs_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[1] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert sent == needed | set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"])
    assert not any(fnmatch(name, pattern) for name in (".git", "tests", ".venv") for pattern in sent)


def read_only(folder: Path, writable: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as the image does: as its user, with every file system but one folder read-only."""
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if os.geteuid() or unshare is None or setpriv is None:
        pytest.skip("needs root, unshare and setpriv, to give up all rights")
    script = (
        'set -e\nmount --make-rprivate /\nmount --bind "$1" "$1"\n'
        # Every mount of this namespace becomes read-only, and then the one folder is not.
        'while read -r _ _ _ _ point _; do mount -o remount,bind,ro "$(printf \'%b\' "$point")" 2>/dev/null || true; '
        "done </proc/self/mountinfo\n"
        'mount -o remount,bind,rw "$1"\nif touch /read-only-probe 2>/dev/null; then exit 77; fi\n'
        'shift\nexec setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs "$@"\n'
    )
    done = run([unshare, "--mount", "--net", "bash", "-c", script, "-", str(writable), *command], folder)
    if done.returncode == 77 or "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"this system cannot make file systems read-only for one process: {done.stderr}")
    return done


@pytest.fixture
def opened(work: Path) -> Path:
    """The signed folder, where another user can read it."""
    for path in (work, *work.rglob("*"), *work.parents):
        if path.is_relative_to(Path("/tmp")) and path != Path("/tmp"):  # noqa: S108 - pytest's own folders
            path.chmod(path.stat().st_mode | 0o055)
    probe = run(["setpriv", "--reuid", "65532", "--clear-groups", "--regid", "65532", BIN / "safeload", "-V"], work)
    if probe.returncode:
        pytest.skip(f"another user cannot run this environment: {probe.stderr}")
    return work


def test_verify_scan_and_load_write_nothing_and_need_no_rights(opened: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    check = ["checkpoint", "-m", "manifest.json", "--trust", "publisher.key.pub"]
    for command in (["verify", *check], ["scan", "checkpoint"], ["load", *check]):
        done = read_only(opened, nothing, [str(BIN / "safeload"), *command])
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "accepted"), done.stderr
    assert list(nothing.iterdir()) == []


# ---------------------------------------------------------------- the Kubernetes example

POD = read_yaml("deploy/kubernetes/inference-pod.yaml")
CONTAINERS = [*POD["spec"]["initContainers"], *POD["spec"]["containers"]]


def test_no_container_of_the_pod_has_rights_or_writes_to_its_own_file_system() -> None:
    assert POD["spec"]["automountServiceAccountToken"] is False
    whole = POD["spec"]["securityContext"]
    assert whole["runAsNonRoot"] is True
    assert whole["runAsUser"] == int(last_stage()["USER"].split(":")[0])
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in CONTAINERS:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"])


def test_only_the_init_container_can_write_the_checkpoint() -> None:
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert "emptyDir" in volumes["model"]
    mounts = {(c["name"], m["name"]): m.get("readOnly", False) for c in CONTAINERS for m in c["volumeMounts"]}
    assert mounts == {
        ("safeload", "model"): False,
        ("safeload", "trust"): True,
        ("server", "model"): True,
        ("server", "trust"): True,
    }


def test_every_path_of_the_pod_lies_in_a_volume() -> None:
    for container in CONTAINERS:
        mounted = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"])
        paths = [a.partition("=")[2] or a for a in container["args"] if a.startswith("/") or "=/" in a]
        assert paths
        assert [path for path in paths if not path.startswith(mounted)] == []


def test_the_init_container_fetches_what_was_signed_and_refuses_what_was_not(work: Path, tmp_path: Path) -> None:
    (fetching,) = POD["spec"]["initContainers"]
    (tmp_path / "model").mkdir()
    stands_for = {"https://mirror.example/models/my-model": str(work / "checkpoint")}

    def run_it() -> subprocess.CompletedProcess[str]:
        arguments = [stands_for.get(argument, argument) for argument in fetching["args"]]
        arguments = [re.sub("(^|=)/model/", rf"\g<1>{tmp_path}/model/", argument) for argument in arguments]
        arguments = [argument.replace("=/trust/", f"={work}/") for argument in arguments]
        return run(["safeload", *arguments], tmp_path)

    assert run_it().returncode == 0
    assert [path.name for path in (tmp_path / "model" / "checkpoint").iterdir()] == ["weights.pkl"]
    assert run_it().returncode == 0, "a pod that is restarted runs its init containers again"
    shutil.rmtree(tmp_path / "model" / "checkpoint")
    weights = bytearray((work / "checkpoint" / "weights.pkl").read_bytes())
    weights[-3] ^= 1
    (work / "checkpoint" / "weights.pkl").write_bytes(weights)
    assert run_it().returncode == 1
    assert not (tmp_path / "model" / "checkpoint").exists()
