"""Several real processes of one JAX job on this machine: CPU devices, collectives by gloo, loopback only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent

_PRELUDE = """
import json, os, sys
sys.path.insert(0, {repository!r})
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")  # JAX 0.4.35 has none by itself
{initialize}
PROCESS = {process}
ARGUMENTS = json.loads(sys.stdin.read())
def answer(value):
    sys.stdout.write("ANSWER " + json.dumps(value) + "\\n")
    sys.stdout.flush()
"""


@dataclass(frozen=True)
class Ended:
    """How one process ended: what it answered, its exit code and what it wrote."""

    answer: Any
    code: int
    output: str


def run_processes(
    code: str, arguments: Sequence[Any], *, n_devices: int = 8, seconds: float = 90, mates: int | None = None
) -> list[Ended]:
    """Run `code` in one process of a JAX job for each of `arguments`, and return how they ended.

    The code finds its own argument in `ARGUMENTS`, its number in `PROCESS`, and says what it found with `answer`. No
    process outlives the call.

    Args:
        code: Python source.
        arguments: One for each process, as JSON has it.
        n_devices: Devices of all processes together.
        seconds: How long they may take.
        mates: How many processes the job has, if not all of them are started here.
    """
    count = len(arguments) if mates is None else mates
    coordinator = f"127.0.0.1:{_free_port()}"
    each = n_devices // count
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={each}", "JAX_PLATFORMS": "cpu"}
    ended: list[Ended] = []
    with ExitStack() as stack:
        processes = []
        for number, argument in enumerate(arguments):
            initialize = (
                f"jax.distributed.initialize({coordinator!r}, {count}, {number}, initialization_timeout=60)"
                if count > 1
                else ""
            )
            prelude = _PRELUDE.format(repository=str(REPOSITORY), process=number, initialize=initialize)
            process = subprocess.Popen(
                [sys.executable, "-c", prelude + code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            stack.callback(_end, process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(argument))
            process.stdin.close()
            process.stdin = None
            processes.append(process)
        for process in processes:
            output, _ = process.communicate(timeout=seconds)
            answers = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("ANSWER ")]
            ended.append(Ended(answers[-1] if answers else None, process.returncode, output))
    return ended


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
