"""The README is run: every command line that it shows does what it shows."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from safeload.policy import Policy, load_policy

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block and the output that the README shows for it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def shape(text: str) -> str:
    """Return output with what differs from run to run made equal: digests, times, the order of the two streams."""
    text = re.sub(r"\b[0-9a-f]{16}([0-9a-f]{48})?\b", "<digest>", text)
    text = re.sub(r"in [0-9.]+ s( \([0-9.]+ GB/s\))?", "in <time>", text)
    return "\n".join(sorted(line.rstrip() for line in text.splitlines() if line.strip()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, as the page tells a reader to begin with."""
    return tmp_path_factory.mktemp("readme")


def run(command: str, folder: Path) -> tuple[str, int]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={"PATH": f"{BIN}:/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr, done.returncode


def test_every_command_of_the_readme_prints_what_it_shows(folder: Path) -> None:
    console, python = blocks("console"), blocks("python")
    signing, key, refusal, policies, trust = console
    (making, loading) = python
    order = [key, making, signing, loading, refusal, policies, trust]
    for block in order:
        if block in python:
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
