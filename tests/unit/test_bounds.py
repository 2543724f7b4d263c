"""The lower bounds of pyproject.toml are the releases that `make lowest` installs and tests."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_TESTED = {
    "sigstore": "what it verifies only its service can sign, so that its tests have a stand-in",
    "atheris": "`make fuzz` has an environment for it",
}
LINES = (ROOT / "tests" / "lowest.txt").read_text(encoding="utf-8").splitlines()
PINNED = dict(line.split("==") for line in LINES if "==" in line)
BOUNDS = [
    re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)(?:;.*)?", requirement)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in group
    if not requirement.startswith("safeload[")
]


def test_every_lower_bound_is_what_is_tested() -> None:
    # One that has an upper end as well is none that is known here.
    assert None not in BOUNDS
    bounds = {match[1].lower(): match[2] for match in BOUNDS if match}
    assert len(bounds) >= 25
    for name in NOT_TESTED:
        del bounds[name]
    assert bounds.keys() == PINNED.keys() - {"jaxlib"}
    for name, bound in bounds.items():
        # A bound of 2.8 is the release 2.8.0.
        assert f"{PINNED[name]}.".startswith(f"{bound}."), name
