"""Worked examples: what `--help` shows below each command, and `docs/cli.md` with it. One story, told in order.

A test runs them all in one folder, one after the other. KEYID and ID stand for what an earlier command printed; what
asks a network is parsed and not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import typer
import typer.main
from typer.models import CommandInfo

_SIGNED: Final = "-m manifest.json --trust publisher.key.pub"

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "keygen": (
            "safeload keygen -o publisher.key --passphrase-file passphrase.txt",
            "safeload keygen -o root.key --no-passphrase",
        ),
        "scan": (
            "safeload scan checkpoint",
            "safeload scan --policy grok-1 ckpt-0",
            "safeload scan hf://org/name@main",
        ),
        "inspect": ("safeload inspect checkpoint", "safeload inspect --digest checkpoint/weights.pkl"),
        "explain": ("safeload explain evil.pkl",),
        "sign": (
            (
                "safeload sign checkpoint --key publisher.key --passphrase-file passphrase.txt -o manifest.json "
                "--model my-model --revision r1"
            ),
            "safeload sign checkpoint --payload-only -o payload.json --model my-model --revision r1",
        ),
        "attach-signature": (
            "openssl dgst -sha256 -sign hsm.pem -out payload.sig payload.json",
            "safeload attach-signature payload.json --signature payload.sig --public-key hsm.pub -o by-hsm.json",
        ),
        "verify": (
            f"safeload verify checkpoint {_SIGNED}",
            f"safeload verify checkpoint {_SIGNED} --history history.json --for inference",
        ),
        "load": (
            f"safeload load checkpoint {_SIGNED} --memory-budget 8GiB",
            f"safeload load checkpoint {_SIGNED} --jax",
        ),
        "plan": (
            "safeload plan checkpoint --mesh 1x4 --device-memory 16GiB",
            "safeload plan grok-1 --mesh 1x8 --rules grok-1 --device-memory 80GiB",
        ),
        "audit": (
            f"safeload audit checkpoint {_SIGNED} --sarif audit.sarif --junit audit.xml --html audit.html",
            "safeload audit models/a models/b --json audit.json",
        ),
        "convert": (
            (
                f"safeload convert checkpoint converted --to safetensors {_SIGNED} --key publisher.key "
                "--passphrase-file passphrase.txt -o converted.json"
            ),
        ),
        "diff": ("safeload diff checkpoint converted",),
        "fingerprint": (
            f"safeload fingerprint checkpoint {_SIGNED} -o values.json",
            "safeload fingerprint converted -m converted.json --trust publisher.key.pub --against values.json",
        ),
        "fetch": (
            f"safeload fetch /mirror/my-model fetched {_SIGNED}",
            f"safeload fetch hf://org/name@v1 fetched {_SIGNED} --mirror https://mirror.example/my-model",
            "safeload fetch --unsigned /mirror/unknown looked-at",
        ),
        "quarantine list": ("safeload quarantine list looked-at",),
        "quarantine show": ("safeload quarantine show looked-at ID",),
        "quarantine purge": ("safeload quarantine purge looked-at --all",),
        "policy list": ("safeload policy list",),
        "policy show": ("safeload policy show numpy-quantized",),
        "policy diff": ("safeload policy diff numpy-quantized ./mine.toml",),
        "trust init": (
            (
                "safeload trust init -o trust.json --root root.key.pub --publisher us --stream 'my-*' "
                "--publisher-key publisher.key.pub --sign root.key"
            ),
        ),
        "trust show": ("safeload trust show trust.json",),
        "trust add": (
            "safeload trust add trust.json -o trust-2.json --publisher us --publisher-key hsm.pub --sign root.key",
        ),
        "trust revoke": (
            "safeload trust revoke trust-2.json -o trust-3.json --key KEYID --reason 'a lost laptop' --sign root.key",
        ),
        "trust sign": ("safeload trust sign trust-3.json --key root-2.key",),
        "trust update": ("safeload trust update trust.json trust-2.json trust-3.json",),
        "demo": ("safeload demo",),
        "doctor": ("safeload doctor", "safeload doctor . --json"),
        "completion": ('eval "$(safeload completion bash)"',),
    }
)
"""The examples of each command, by what one types behind `safeload`; each a line for a shell."""


def add_examples(app: typer.Typer) -> None:
    """Put the examples below the help of each command of `app`."""
    for info in app.registered_commands:
        _add(info, "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            for info in group.typer_instance.registered_commands:
                _add(info, f"{group.name} ")


def name_of(info: CommandInfo) -> str:
    """Return what one types for a command: its name, or that of its function."""
    return info.name or typer.main.get_command_name(getattr(info.callback, "__name__", ""))


def _add(info: CommandInfo, group: str) -> None:
    lines = EXAMPLES.get(f"{group}{name_of(info)}", ())
    # Typer joins the lines of a paragraph; only an empty line keeps two apart. A bracket would be markup to it.
    info.epilog = "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines]).replace("[", r"\[")
