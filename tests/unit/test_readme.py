"""The README is run: every command line that it shows does what it shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from safeload.policy import Policy, load_policy
from tests.readme_blocks import ROOT, commands, run, shape
from tests.readme_blocks import blocks as blocks_of

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return blocks_of(README, language)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, as the page tells a reader to begin with."""
    return tmp_path_factory.mktemp("readme")


def test_every_command_of_the_readme_prints_what_it_shows(folder: Path) -> None:
    signing, key, making, *rest = re.findall(r"```(console|python)\n(.*?)```", README, re.DOTALL)
    # The first screen shows what the page is about, with the key and the checkpoint that are made below it.
    for language, block in [key, making, signing, *rest]:
        if language == "python":
            subprocess.run([sys.executable, "-c", block], cwd=folder, check=True, timeout=120)
            continue
        for command, shown in commands(block):
            printed, code = run(command, folder)
            assert shape(printed) == shape(shown), command
            assert code == (1 if "rejected:" in shown else 0), command
    assert not (folder / "pwned").exists()


def test_the_first_screen_is_three_commands_and_what_they_prove() -> None:
    before, _, after = README.partition("What a green run proves")
    assert [command.split()[1] for command, _ in commands(blocks("console")[0])] == ["sign", "verify", "load"]
    assert before.count("```") == 2
    assert "What it does not prove" in after


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_test_that_the_security_page_names_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    claims = re.findall(r"^\| (S[0-9]+) \|.*\|(.*)\|$", page, re.MULTILINE)
    assert [name for name, _ in claims] == [f"S{n}" for n in range(1, len(claims) + 1)]
    for name, tests in claims:
        named = re.findall(r"`([^`]+)`", tests)
        assert named, name
        assert [t for t in named if not t.startswith("make ") and not (ROOT / t).is_file()] == [], name


def test_the_policy_of_the_readme_is_one() -> None:
    (text,) = blocks("toml")
    policy = Policy.parse(text.encode(), source="README.md")
    base = load_policy("numpy-quantized")
    assert len(policy.additions_to(base)) == 2
    assert len(base.additions_to(policy)) == 2


def test_the_digest_of_the_default_policy_is_the_one_that_is_shown() -> None:
    shown = set(re.findall(r"^policy    numpy-quantized  sha256:([0-9a-f]{64})$", README, re.MULTILINE))
    assert shown == {load_policy("numpy-quantized").sha256}
