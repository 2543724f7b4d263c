"""The shape of the package: who makes a proof, who prints, who imports what.

`lint-imports` holds the layers (see pyproject.toml); here is what it cannot see.
"""

import ast
import dataclasses
import importlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import safeload

PACKAGE = Path(safeload.__file__).parent
SOURCES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_bytes(), str(f)) for f in sorted(PACKAGE.rglob("*.py"))}

PROOFS = {
    "TrustedManifest": "verifying.py",
    "OmsManifest": "oms.py",
    "StagedCheckpoint": "staging.py",
    "AdmittedCheckpoint": "scanning.py",
    "HostTensor": "decoding.py",
    "PartialTensor": "decoding.py",
}
"""Each proof type, and the only file that may make one."""

HEAVY = {"cryptography", "jax", "jaxlib", "ml_dtypes", "numpy"}
"""Packages that a scan has no use for: slow to import, and a scan must work where they are broken."""


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a name or a chain of attributes, and "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def imports() -> Iterator[tuple[str, str]]:
    """Yield the file and the full name of everything that is imported, wherever in the file."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield file, str(node.module)
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)


def uses(*, outside: tuple[str, ...] = ()) -> set[tuple[str, str]]:
    """Return the file and the dotted name of everything that is read, called or imported outside some files.

    A name imported from a module counts as `module.name`, whatever it is called afterwards.
    """
    read = {
        (file, dotted(node))
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    return {(file, name) for file, name in read | set(imports()) if not file.startswith(outside)}


@pytest.mark.parametrize(("proof", "maker"), PROOFS.items())
def test_a_proof_is_made_at_one_place(proof: str, maker: str) -> None:
    calls = [
        file
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == proof
    ]
    assert calls == [maker]


@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_has_no_other_name(proof: str) -> None:
    # An alias, a subclass, a class method or an argument of `replace` would make one without calling it by its name.
    aliases = []
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(a.name == proof and a.asname for a in node.names):
                aliases.append(f"{file}: renamed by an import")
            elif isinstance(node, ast.Assign) and dotted(node.value).split(".")[-1] == proof:
                aliases.append(f"{file}: assigned")
            elif isinstance(node, ast.ClassDef) and proof in {dotted(base).split(".")[-1] for base in node.bases}:
                aliases.append(f"{file}: subclass {node.name}")
            elif isinstance(node, ast.ClassDef) and node.name == proof:
                aliases += [
                    f"{file}: class method {item.name}"
                    for item in node.body
                    if isinstance(item, ast.FunctionDef)
                    and {"classmethod", "staticmethod"} & {dotted(d) for d in item.decorator_list}
                ]
    assert aliases == []


def test_nothing_makes_an_object_past_its_constructor() -> None:
    past = {"dataclasses.replace", "copy.copy", "copy.deepcopy", "copy.replace"}
    found = {(file, name) for file, name in uses() if name in past or name.split(".")[-1] == "__new__"}
    # What these copy are a finding, a parsed file, a tensor's row and a file's report; none of them proves anything.
    allowed = {
        (file, "dataclasses.replace")
        for file in (
            *(
                "auditing.py",
                "cli/trust.py",
                "errors.py",
                "expecting.py",
                "explaining.py",
                "interchange.py",
                "loading.py",
                "publishing.py",
                "scanning.py",
            ),
            "trust/store.py",
        )
    }
    assert found - allowed == set()


@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_is_frozen_and_has_slots(proof: str) -> None:
    defined = [f for f, tree in SOURCES.items() for n in tree.body if isinstance(n, ast.ClassDef) and n.name == proof]
    assert len(defined) == 1
    module = importlib.import_module("safeload." + defined[0].removesuffix(".py").replace("/", "."))
    cls = getattr(module, proof)
    assert dataclasses.is_dataclass(cls)
    assert "__slots__" in vars(cls)
    assert cls.__setattr__ is not object.__setattr__


def test_only_the_command_prints_or_exits() -> None:
    ends = {"SystemExit", "exit", "os._exit", "os.abort", "quit", "sys.exit"}
    ends |= {"input", "print", "sys.stderr", "sys.stdin", "sys.stdout"}
    assert {(file, name) for file, name in uses(outside=("cli/", "__main__.py")) if name in ends} == set()


def test_nothing_runs_code_by_name() -> None:
    runs = {"__builtins__", "__import__", "__loader__", "compile", "eval", "exec", "importlib.import_module"}
    loaders = {"exec_module", "load_module", "module_from_spec", "spec_from_file_location"}
    modules = {"builtins", "code", "codeop", "imp", "pkgutil", "runpy"}
    found = {(file, name) for file, name in uses() if name in runs or name.split(".")[-1] in loaders}
    found |= {(file, name) for file, name in imports() if name in modules}
    # __init__.py imports the package's own modules late, by names that stand there.
    assert found - {("__init__.py", "importlib.import_module")} == set()


def test_nothing_reads_the_environment() -> None:
    environment = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.path.expandvars", "os.putenv"}
    read = {(file, name) for file, name in uses() if name in environment}
    # The demo sets, for itself, how many devices JAX makes of this machine's CPU.
    assert read == {(file, "os.environ") for file in ("cli/completion.py", "cli/output.py", "demo.py")}
    # By one variable a shell asks for words. Only a run without arguments, which has no verdict to give, answers it.
    completion = (PACKAGE / "cli" / "completion.py").read_text(encoding="utf-8")
    assert completion.count("environ") == 1
    # What the command reads decides about color and a progress bar, and about nothing else.
    output = (PACKAGE / "cli" / "output.py").read_text(encoding="utf-8")
    assert set(re.findall(r'environ\.get\("(\w+)"\)|"(\w+)" in os\.environ', output)) == {
        ("CI", ""),
        ("TERM", ""),
        ("", "NO_COLOR"),
    }
    assert output.count("environ") == 3


def test_nothing_unpickles_or_starts_a_process() -> None:
    modules = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "pickletools"}
    modules |= {"shelve", "subprocess"}
    calls = {"os.fork", "os.popen", "os.posix_spawn", "os.system"}
    found = {(file, name) for file, name in imports() if name.split(".")[0] in modules}
    found |= {(file, name) for file, name in uses() if name in calls or name.startswith(("os.exec", "os.spawn"))}
    # numpy's own way to an unpickler.
    found |= {
        (file, "allow_pickle") for file, tree in SOURCES.items() for n in ast.walk(tree) if keyword(n) == "allow_pickle"
    }
    assert found == set()


def keyword(node: ast.AST) -> str | None:
    return node.arg if isinstance(node, ast.keyword) else None


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `code`."""
    report = "\nimport json, sys\nsys.stderr.write('\\n' + json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    command = [sys.executable, "-c", code + report]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import safeload") & HEAVY == set()


def test_scan_loads_nothing_heavy(tmp_path: Path) -> None:
    # Both verdicts: explaining a refusal must not load more than finding none.
    (tmp_path / "hostile").write_bytes(pickle.dumps(print))
    (tmp_path / "harmless.json").write_bytes(b"{}")
    loaded = loaded_by(
        "import sys\n"
        "from safeload.__main__ import main\n"
        f"sys.argv = ['safeload', 'scan', {str(tmp_path)!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 1, end.code\n"
    )
    assert "safeload" in loaded
    assert loaded & HEAVY == set()
