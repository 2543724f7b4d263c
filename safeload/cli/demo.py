"""`safeload demo`: the whole story on a small checkpoint, told to somebody who has never heard of it, and checked.

What is shown is what was found: the demo ends as rejected if a refusal that it promises does not come, or comes for
another reason.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safeload.cli import options
from safeload.cli.checkpoints import INSTALL_JAX
from safeload.cli.output import Output
from safeload.errors import ConfigError, Finding, reason
from safeload.rendering.text import shape_text, shown
from safeload.report import Report
from safeload.sizes import human_size

if TYPE_CHECKING:
    from safeload.demo import Attack, LoadedTensor

_WRAP_COLUMNS = 100
"""Longer lines are hard to read, whatever the terminal's width."""

_INDENT = "   "

_NO_JAX = "JAX is not installed, so the demo ends before its last step"

_DANGER = (
    "A checkpoint is a folder of files that holds the weights of a model. Grok-1's has 770 files, and each is a Python "
    "pickle. A pickle is more than data: it is a list of instructions, and Python's pickle.load follows them, also "
    "where they say to run a program. Whoever can change one file runs code on every machine that loads it."
)
_ANSWER = (
    "safeload does not follow them. It reads where in the file the numbers lie, refuses everything that is not needed "
    "to say so, and makes the arrays itself, from bytes that a key you trust has signed."
)

_PROVED = (
    "Every byte that was loaded is one that the holder of the key signed, and no file is missing or added.",
    "No file had code run: nothing was imported, called or built because a file asked for it.",
    "What was hashed is what was loaded: no file was opened a second time.",
)

_NOT_PROVED = (
    "That the signer is honest, or that the public key is theirs: where you get the key is up to you.",
    "That the model is good, or that its answers do no harm: weights can be poisoned by whoever trains them.",
    "That no newer version exists.",
)


class _Teller:
    """Prints the story in numbered steps, wrapped to the terminal."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._width = max(24, min(shutil.get_terminal_size().columns, _WRAP_COLUMNS))
        self._steps = 0

    def step(self, title: str) -> None:
        self._steps += 1
        self._out.line(f"\n{self._steps}. {title}")

    def say(self, sentence: str, *, indent: str = _INDENT) -> None:
        for line in textwrap.wrap(
            sentence,
            self._width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_on_hyphens=False,
            break_long_words=False,
        ):
            self._out.line(line)

    def list(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.say(sentence, indent=f"{_INDENT}- ")

    def command(self, words: str) -> None:
        self._out.line(f"{_INDENT}$ safeload {words}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self._out.table(columns, rows, indent=_INDENT)


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="work in DIR, which is made, and keep it", show_default=False),
    ] = None,
    json: options.Json = False,
) -> int:
    """Make, sign, attack and load a small checkpoint: see what is refused, and why."""
    out = Output(json=json)
    with _folder(directory) as folder:
        return _run(out, folder, kept=directory is not None)


@contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="safeload-demo-") as made:
            yield Path(made)
        return
    try:
        directory.mkdir()
    except (OSError, ValueError) as err:
        message = f"cannot make the folder {shown(str(directory))}: {reason(err)}"
        raise ConfigError(message, hint="name one that does not exist yet") from err
    yield directory


def _run(out: Output, folder: Path, *, kept: bool) -> int:
    from safeload import demo as steps
    from safeload import loading

    tell = _Teller(out)
    good, poisoned, manifest = folder / "good", folder / "poisoned", folder / "manifest.json"
    public_key, sentinel = folder / "publisher.key.pub", folder / "the-hostile-pickle-ran"

    out.line("safeload demo: untrusted files, trusted arrays\n")
    tell.say(_DANGER)
    tell.say(_ANSWER)

    tell.step("A checkpoint")
    shards = steps.write_checkpoint(good)
    size = sum(path.stat().st_size for path in good.iterdir())
    tell.say(
        f"{len(shards)} pickles of random weights, {human_size(size)} in all: Grok-1's layout on a small scale. "
        f"The folder is {shown(str(good))}."
    )

    tell.step("Its publisher signs it")
    tell.say(
        "A manifest is a list of all the files: the SHA-256 digest of each, and the tensors in it. The publisher signs "
        "it with a secret key. You need the public half of that key, from a place other than that of the files."
    )
    tell.command("keygen -o publisher.key --no-passphrase")
    tell.command(
        f"sign good --key publisher.key -o manifest.json --model {steps.MODEL} --layout grok-1 -p {steps.POLICY}"
    )
    keyid = steps.sign_checkpoint(good, manifest, public_key)
    tell.say(f"signed with key {keyid[:16]}...")

    tell.step("You verify what you got")
    verify = f"-m manifest.json --trust publisher.key.pub -p {steps.POLICY}"
    tell.command(f"verify good {verify}")
    accepted = loading.check(good, manifest=manifest, trust=[public_key], policy=steps.POLICY)
    tell.say(
        f"{accepted.verdict}: {len(accepted.files)} files, exactly the signed ones, with nothing in them but tensors."
    )

    tell.step("Somebody changes five things in a copy")
    attacks = steps.poison(good, poisoned, shards, sentinel)
    tell.list([f"{attack.file}: {attack.what}" for attack in attacks])
    tell.command(f"verify poisoned {verify}")
    rejected = loading.check(poisoned, manifest=manifest, trust=[public_key], policy=steps.POLICY)
    by_file = _by_file(rejected)
    tell.table(
        ["refused", "because", "in words"],
        [(shown(file), f.code, _brief(f)) for file, findings in by_file.items() for f in findings],
    )
    tell.say(f"{rejected.verdict}: nothing of this copy is loaded, not even the files that nobody touched.")

    ran = sentinel.exists()
    surprises = _surprises(accepted, attacks, by_file)
    if ran:
        surprises.append(f"the hostile pickle ran: {sentinel.name} exists")
    if surprises:
        return out.report(Report((), tuple(Finding("demo-failed", surprise) for surprise in surprises)))
    tell.say(
        "The hostile pickle was read to find this out, and did not run: it would have made the file "
        f"{sentinel.name}, and there is none."
    )

    tell.step(f"You load the good one into JAX, on {steps.N_DEVICES} devices")
    if importlib.util.find_spec("jax") is None:
        raise ConfigError(_NO_JAX, hint=INSTALL_JAX)
    tell.say(
        "Each file is read once and hashed on the way, and the arrays are made of the very bytes that were hashed. "
        f"This machine's CPU stands for {steps.N_DEVICES} devices here; each tensor is split over them as in Grok-1's "
        "own code."
    )
    out.line(f'{_INDENT}>>> safeload.load("good", manifest=..., trust=..., policy="{steps.POLICY}", shardings=...)')
    steps.ask_for_devices()
    tensors, seconds = steps.load_over_devices(good, manifest, public_key, shards)
    tell.table(*_table(tensors))
    total = sum(tensor.nbytes for tensor in tensors)
    tell.say(f"{len(tensors)} tensors, {human_size(total)}: verified, loaded and on their devices in {seconds:.2f} s.")

    tell.step("What this proves")
    tell.list(_PROVED)
    tell.say("It does not prove:")
    tell.list(_NOT_PROVED)
    if kept:
        tell.say(f"The files are still in {shown(str(folder))}: go there and run the two verify commands.")
    out.line()
    if not out.json:
        return out.verdict(accepted.verdict)
    refused = [{"path": f.file, "code": f.code} for f in rejected.all_findings]
    rows = [asdict(tensor) for tensor in tensors]
    facts = {"keyid": keyid, "refused": refused, "hostile_pickle_ran": ran, "tensors": rows, "seconds": seconds}
    return out.report(accepted, extra={"demo": facts})


def _by_file(report: Report) -> Mapping[str, list[Finding]]:
    found: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in report.all_findings:
        found[finding.file or "the whole"].append(finding)
    return dict(sorted(found.items()))


def _brief(finding: Finding) -> str:
    """The message, with digests cut to their first digits."""
    words = (word[:19] + "..." if word.startswith("sha256:") else word for word in finding.message.split(" "))
    place = "" if finding.offset is None else f" (at byte {finding.offset})"
    return " ".join(words) + place


def _surprises(accepted: Report, attacks: Sequence[Attack], by_file: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Compare what came with what was promised, in both directions."""
    surprises = [] if accepted.verdict == "accepted" else ["the good checkpoint was refused"]
    expected = {attack.file: sorted(attack.codes) for attack in attacks}
    for file in sorted(expected.keys() | by_file.keys()):
        found = sorted(finding.code for finding in by_file.get(file, ()))
        if found != expected.get(file, []):
            surprises.append(f"{file}: expected {expected.get(file) or 'nothing'}, found {found or 'nothing'}")
    return surprises


def _table(tensors: Sequence[LoadedTensor]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    rows = [
        (t.name, t.part, t.dtype, shape_text(t.shape), t.sharding, f"{t.nbytes:,}", f"{t.device_nbytes:,}")
        for t in tensors
    ]
    return ("parameter", "part", "dtype", "shape", "sharding", ">bytes", ">a device"), rows
