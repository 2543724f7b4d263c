"""A wheel, an sdist and an editable install are the same package, and each finds the shipped policies.

Everything is offline: the fresh environments see this one's packages through a .pth file, so that only safeload
itself is installed into them.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.build, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
POLICIES = {f.stem: hashlib.sha256(f.read_bytes()).hexdigest() for f in (REPOSITORY / "policies").glob("*.toml")}
MAPPINGS = sorted(f.stem for f in (REPOSITORY / "safeload" / "mappings").glob("*.toml"))

REPORT = """
import hashlib, importlib.metadata, json, safeload
from safeload.mapping_rules import shipped_mappings
from safeload.policy import load_policy, policy_text, shipped_policies
digests = {load_policy(name).name: hashlib.sha256(policy_text(name)[0]).hexdigest() for name, _ in shipped_policies()}
print(json.dumps({
    "file": safeload.__file__,
    "version": importlib.metadata.version("safeload"),
    "policies": digests,
    "paths": [str(path) for _, path in shipped_policies()],
    "mappings": [name for name, _ in shipped_mappings()],
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    # pip and the interpreter must see this environment and nothing that the caller's shell adds to it.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "COVERAGE"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, as an index would get them."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def installed(tmp_path: Path, *what: str | Path) -> tuple[Path, dict[str, Any]]:
    """Install into a fresh environment and return its folder and what `REPORT` printed there."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    # --ignore-installed: the borrowed packages may hold a safeload, which is not this one and not pip's to remove.
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(*pip, *offline, *what, cwd=tmp_path)
    shown: dict[str, Any] = json.loads(run(python, "-I", "-c", REPORT, cwd=tmp_path))
    assert "usage" in run(home / "bin" / "safeload", "--help", cwd=tmp_path).lower()
    return home, shown


def test_the_repository_ships_three_policies() -> None:
    assert set(POLICIES) == {"grok-1", "numpy-quantized", "orbax"}


def test_a_wheel_has_the_policies(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    home, shown = installed(tmp_path, distributions[1])
    assert Path(shown["file"]).is_relative_to(home)
    assert shown["policies"] == POLICIES
    assert shown["mappings"] == MAPPINGS
    assert all(Path(path).is_relative_to(home) for path in shown["paths"])


def test_an_sdist_has_the_policies(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    home, shown = installed(tmp_path, distributions[0])
    assert Path(shown["file"]).is_relative_to(home)
    assert shown["policies"] == POLICIES
    assert shown["mappings"] == MAPPINGS
    assert all(Path(path).is_relative_to(home) for path in shown["paths"])


def test_an_editable_install_has_the_policies(tmp_path: Path) -> None:
    home, shown = installed(tmp_path, "--editable", REPOSITORY)
    assert Path(shown["file"]).is_relative_to(REPOSITORY)
    assert shown["policies"] == POLICIES
    # The files that a developer edits, and not a copy of them from the day of the installation.
    assert all(Path(path).is_relative_to(REPOSITORY / "policies") for path in shown["paths"])
    assert not list(home.rglob("*.toml"))


def test_the_version_has_one_source(tmp_path: Path) -> None:
    _, shown = installed(tmp_path, "--editable", REPOSITORY)
    assert f'__version__ = "{shown["version"]}"' in (REPOSITORY / "safeload" / "__init__.py").read_text()


def test_a_wheel_holds_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"safeload"}
    assert "safeload/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(f.relative_to(REPOSITORY)) for f in (REPOSITORY / "safeload").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_an_sdist_holds_the_tests(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    # This file too: a careless `build/` in .gitignore would leave its folder out.
    this = str(Path(__file__).relative_to(REPOSITORY))
    assert {"pyproject.toml", "Makefile", "LICENSE", "policies/grok-1.toml", this} <= names
