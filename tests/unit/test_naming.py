"""Each tensor of a checkpoint has one name, which does not depend on how the files are cut."""

from __future__ import annotations

import pytest

from safeload.errors import ConfigError
from safeload.naming import NamedFile, name_tensors


def names(*files: NamedFile) -> list[str]:
    return list(name_tensors(files).values())


def test_a_parameter_goes_before_the_names_in_its_file() -> None:
    files = NamedFile("t0", "params/w", ("weight", "scales")), NamedFile("t1", "params/norm", ("",))
    assert names(*files) == ["params/w/weight", "params/w/scales", "params/norm"]


def test_names_in_files_stand_alone_if_they_are_all_different() -> None:
    files = NamedFile("a.safetensors", None, ("x", "y")), NamedFile("b.safetensors", None, ("z",))
    assert names(*files) == ["x", "y", "z"]


def test_a_bare_array_is_called_as_its_file_is_without_the_ending_that_says_what_it_is() -> None:
    files = NamedFile("d/w.npy", None, ("",)), NamedFile("b.pkl", None, ("",)), NamedFile("t0.1", None, ("",))
    assert names(*files) == ["d/w", "b", "t0.1"]


def test_equal_names_in_files_stand_behind_the_files_paths() -> None:
    files = NamedFile("a.npz", None, ("x", "y")), NamedFile("b.pkl", None, ("x",)), NamedFile("c", "p", ("",))
    assert names(*files) == ["a.npz/x", "a.npz/y", "b/x", "p"]


@pytest.mark.parametrize(
    "files",
    [
        (NamedFile("t_000", "p", ("",)), NamedFile("t_001", "p", ("",))),
        (NamedFile("a", None, ("x", "x")),),
        (NamedFile("a.npy", None, ("",)), NamedFile("a.pkl", None, ("",))),
    ],
)
def test_names_that_stay_equal_are_refused(files: tuple[NamedFile, ...]) -> None:
    with pytest.raises(ConfigError, match="a name for each tensor"):
        name_tensors(files)
