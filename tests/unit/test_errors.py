"""The tree of errors: what is drawn is what there is, and each class is used."""

import ast
import builtins
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import safeload
from safeload import errors

PACKAGE = Path(safeload.__file__).parent
EXIT_REJECTED = 1
EXIT_NO_VERDICT = 2


def import_everything() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "safeload."):
        if module.name != "safeload.__main__":
            importlib.import_module(module.name)


def drawn() -> dict[str, tuple[str | None, int]]:
    """Return the drawn tree: each class's parent and exit code, which a branch states once for all below it."""
    assert errors.__doc__ is not None
    tree: dict[str, tuple[str | None, int]] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+Error)\b.*?(?:exit (?P<code>\d))?$", line)
        if not found:
            continue
        depth = len(found["branch"]) // 4
        del path[depth:]
        parent = path[-1] if path else None
        inherited = EXIT_NO_VERDICT if parent is None else tree[parent][1]
        tree[found["name"]] = parent, int(found["code"] or inherited)
        path.append(found["name"])
    return tree


def descend(cls: type[errors.SafeloadError]) -> Iterator[type[errors.SafeloadError]]:
    # Tests may derive classes of their own; the claim is about the package's.
    if cls.__module__.split(".")[0] == "safeload":
        yield cls
    for child in cls.__subclasses__():
        yield from descend(child)


def test_the_drawn_tree_is_the_class_tree() -> None:
    import_everything()
    parents = {cls.__name__: cls.__bases__[0].__name__ for cls in descend(errors.SafeloadError)}
    parents_drawn = {name: parent or "Exception" for name, (parent, _) in drawn().items()}
    assert parents == parents_drawn


def test_every_exit_code_is_the_drawn_one() -> None:
    import_everything()
    codes = {cls.__name__: cls.exit_code for cls in descend(errors.SafeloadError)}
    assert codes == {name: code for name, (_, code) in drawn().items()}


def test_a_rejection_exits_1_and_no_verdict_exits_2() -> None:
    import_everything()
    assert {cls.exit_code for cls in descend(errors.RejectedError)} == {EXIT_REJECTED}
    assert {cls.exit_code for cls in descend(errors.OperationalError)} == {EXIT_NO_VERDICT}


def test_every_cause_is_raised_somewhere() -> None:
    # A class that only groups others is there to be caught, and need not be raised itself.
    tree = drawn()
    causes = set(tree) - {parent for parent, _ in tree.values()}
    made = set()
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "errors.py":
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            # `raise X(...)`, and `return X(...)` of a helper whose caller raises what it gets.
            if isinstance(node, (ast.Raise, ast.Return)):
                inner = node.exc if isinstance(node, ast.Raise) else node.value
                made |= {n.id for n in ast.walk(inner or node) if isinstance(n, ast.Name)}
                made |= {n.attr for n in ast.walk(inner or node) if isinstance(n, ast.Attribute)}
    assert causes - made == set()


def recognized(nodes: list[ast.AST]) -> set[str]:
    """Return the names of the exceptions that a file catches, or tells apart with `isinstance`."""
    places: list[ast.AST] = [n.type for n in nodes if isinstance(n, ast.ExceptHandler) and n.type is not None]
    places += [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance"]
    return {n.id for place in places for n in ast.walk(place) if isinstance(n, ast.Name)}


def test_every_exception_of_the_package_is_a_safeload_error() -> None:
    # A private one is a jump within its file, and has to end there.
    known = {name for name, value in vars(builtins).items() if isinstance(value, type)}
    strays = set()
    for file in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
        private = {name for name in recognized(nodes) if name.startswith("_")}
        strays |= {
            f"{file.relative_to(PACKAGE)}: {node.name}"
            for node in nodes
            if isinstance(node, ast.ClassDef) and node.name not in private
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in known and base.id.endswith(("Exception", "Error", "Exit"))
        }
    assert strays == {"errors.py: SafeloadError"}


def test_a_rejection_needs_a_finding() -> None:
    with pytest.raises(TypeError, match="at least one finding"):
        errors.RejectedError()


def test_a_rejection_says_where_what_and_what_to_do() -> None:
    finding = errors.Finding("code", "expected 1, found 2", file="a", offset=3, hint="type this")
    assert str(errors.FormatError(finding)) == "a: expected 1, found 2 (at byte 3); type this"
    assert "and 1 more finding(s)" in str(errors.FormatError(finding, finding))


def test_no_verdict_says_what_to_do() -> None:
    error = errors.StagingError("no room", hint="free some")
    assert (str(error), error.message, error.hint) == ("no room; free some", "no room", "free some")


@pytest.mark.parametrize(
    ("untrusted", "shown"),
    [
        ("plain-é", "plain-é"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb", r"a\nb"),
        ("back\\slash", r"back\\slash"),
        ("right-to-left\u202e", r"right-to-left\u202e"),
        ("undecodable\udcff", r"undecodable\udcff"),
    ],
)
def test_escape_never_lets_a_terminal_obey(untrusted: str, shown: str) -> None:
    assert errors.escape(untrusted) == shown


def test_escape_cuts_what_is_too_long() -> None:
    assert errors.escape("x" * 11, limit=10) == "x" * 9 + "…"
    assert errors.escape("x" * 10, limit=10) == "x" * 10
    assert len(errors.escape("\n" * 10, limit=10)) == len("x" * 10)


def test_a_finding_is_placed_in_a_file() -> None:
    assert errors.Finding("c", "m").in_file("x") == errors.Finding("c", "m", file="x")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a/##[add-mask]b", r"a/#\x23[add-mask]b"),
        ("##vso[task.complete]", r"#\x23vso[task.complete]"),
        ("###", r"#\x23#"),
        ("::error::x", r"\x3a:error::x"),
        ("  ::error::x", r"  \x3a:error::x"),
        ("a::b", "a::b"),
        ("a#b", "a#b"),
    ],
)
def test_a_runner_takes_no_name_for_a_command(name: str, shown: str) -> None:
    assert errors.escape(name) == shown
