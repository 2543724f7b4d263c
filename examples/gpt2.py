# ruff: noqa: INP001, T201
"""GPT-2 from three kinds of checkpoint, each signed, verified and mapped, to one tree: bit for bit the same.

Without arguments it makes a small GPT-2 of random numbers in each kind, in a temporary folder, and maps all three:

    python examples/gpt2.py

With arguments it maps a checkpoint of yours, which you have signed (`safeload sign DIR -o gpt2.json --key KEY`):

    python examples/gpt2.py DIR gpt2.json KEY.pub --source huggingface --size 124M
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import safeload
from safeload.fingerprinting import Fingerprint, check_fingerprint, fingerprint
from safeload.gpt2 import CONFIGS, GPT2Config, Source, remap_gpt2
from safeload.saving import save


def load_gpt2(
    directory: Path, manifest: Path | bytes, trust: Path | safeload.PublicKey, config: GPT2Config, source: Source
) -> dict[str, Any]:
    """Return a GPT-2 of this size as nested dicts: what was signed, all of it, and nothing else."""
    loaded = safeload.load(directory, manifest=manifest, trust=trust)
    return remap_gpt2(loaded, config, source=source)


def show(name: str, values: Fingerprint) -> None:
    """Print what a tree comes to in one line."""
    print(f"{name:12} {len(values.tensors)} tensors, fingerprint sha256:{values.sha256}")


def demo(folder: Path) -> None:
    """Make the same small model in each kind, sign each, and load each."""
    # The tests' writers make the files that TensorFlow and transformers would: neither has to be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests import gpt2_sample as sample

    key = safeload.SecretKey.generate("ed25519")
    original = sample.published()
    sources: dict[Source, Path] = {
        "tensorflow": folder / "tensorflow",
        "huggingface": folder / "huggingface",
        "nested": folder / "nested",
    }
    sources["tensorflow"].mkdir()
    sample.write_tensorflow(sources["tensorflow"], original)
    sources["huggingface"].mkdir()
    sample.write_safe(sources["huggingface"], sample.huggingface(original))

    trees: dict[Source, dict[str, Any]] = {}
    for source in ("tensorflow", "huggingface"):
        manifest = safeload.sign(sources[source], keys=[key], model="gpt2-small", revision=source)
        trees[source] = load_gpt2(sources[source], manifest, key.public, sample.CONFIG, source)

    # What was mapped once is saved under the new names, and loads without any rule that moves something.
    converted = save(
        trees["tensorflow"], sources["nested"], layout="safetensors", keys=[key], model="gpt2-small", revision="nested"
    )
    trees["nested"] = load_gpt2(sources["nested"], converted, key.public, sample.CONFIG, "nested")

    # Values, and what the model computes of eight tokens: a query in a key's place has the right shape, and neither.
    expected = fingerprint(trees["tensorflow"], forward=sample.logits, inputs=sample.TOKENS)
    for source, tree in trees.items():
        show(source, fingerprint(tree, forward=sample.logits, inputs=sample.TOKENS))
        check_fingerprint(tree, expected, forward=sample.logits, inputs=sample.TOKENS)
    print("all three are equal, and so is what they compute")


def main() -> None:
    """Run the demo, or map the checkpoint that was named."""
    parser = argparse.ArgumentParser(description="GPT-2 from three kinds of checkpoint")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("manifest", nargs="?", type=Path)
    parser.add_argument("trust", nargs="?", type=Path)
    parser.add_argument("--source", choices=["tensorflow", "huggingface", "nested"], default="huggingface")
    parser.add_argument("--size", choices=list(CONFIGS), default="124M")
    arguments = parser.parse_args()
    if arguments.directory is None:
        with tempfile.TemporaryDirectory() as folder:
            demo(Path(folder))
    elif arguments.manifest is None or arguments.trust is None:
        parser.error("a checkpoint needs its manifest and the key to trust")
    else:
        config = CONFIGS[arguments.size]
        tree = load_gpt2(arguments.directory, arguments.manifest, arguments.trust, config, arguments.source)
        show(arguments.source, fingerprint(tree))


if __name__ == "__main__":
    main()
