"""Tests reach private names only through probes: `tests/support/probe*.py`, and `harness/probe.py` for the harness and
`bench/`."""

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.paths import ROOT
from tests.support.probe import Place

PUBLIC = {  # in spite of the underscore
    *("_asdict", "_field_defaults", "_fields", "_replace"),  # of namedtuples
    *("_exit", "_getframe"),  # of os and sys
    # Of pytest, typing and asyncio, which offer nothing else.
    *("_fixtureinfo", "_is_protocol", "_log_destroy_pending", "_set_running_loop"),
}

PRIVATE = re.compile("_[A-Za-z][A-Za-z0-9_]*")
PRIVATE_PATH = re.compile(r"leasehold(\.\w+)*\._[A-Za-z]\w*")
MAY_USE = re.compile(  # to parse few files, because that takes long
    r"(?<!\bself)(?<!\bcls)\._[A-Za-z]|[\"']_[A-Za-z]|\bimport\b.*\b_[A-Za-z]|^\s+_\w+,$", re.MULTILINE
)

THIS_FILE = "tests/tools/test_private_names.py"  # has examples


def is_private(name: object) -> bool:
    return isinstance(name, str) and PRIVATE.fullmatch(name) is not None and name not in PUBLIC


def private_names(source: str) -> list[tuple[int, str]]:
    """The lines that use a private name of another object or module, and the names: `lease._claim`, `import _page`, and
    texts as in `setattr(lease, "_claim", ...)`. Also in programs of child processes."""
    return sorted(set(_uses(ast.parse(source)))) if MAY_USE.search(source) else []


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super"))):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, each.name) for each in names if is_private(each.name))
            case ast.Call(args=[_, ast.Constant(name), *_]) if is_private(name):
                yield node.lineno, name
            case ast.Tuple(elts=[ast.Name() | ast.Attribute(), ast.Constant(name), *_]) if is_private(name):
                yield node.lineno, name
            case ast.Constant(str(text)) if PRIVATE_PATH.fullmatch(text):
                yield node.lineno, text
            case ast.Constant(str(text)) if "\n" in text:
                yield from _uses_in_program(node.lineno, text)
            case ast.JoinedStr(values=parts):
                text = "".join(part.value if isinstance(part, ast.Constant) else "0" for part in parts)
                yield from _uses_in_program(node.lineno, text)


def _uses_in_program(line: int, text: str) -> Iterator[tuple[int, str]]:
    if MAY_USE.search(text):
        with suppress(SyntaxError):  # most texts are no programs
            yield from ((line + number - 1, name) for number, name in _uses(ast.parse(text)))


def own_names(source: str) -> set[str]:
    """The private names that this source defines: its classes may use each other's."""
    nodes = list(ast.walk(ast.parse(source)))
    methods = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = {each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return methods | attributes


def sources(folder: str) -> dict[str, str]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_tests_reach_private_names_only_through_probes() -> None:
    tests = sources("tests")
    assert len(tests) > 400
    found = [
        f"{path}:{line}: {name}"
        for path, source in tests.items()
        if not path.startswith("tests/support/probe") and path != THIS_FILE
        for line, name in private_names(source)
    ]
    assert not found, f"add a function or a `Place` to a probe, named after what it tells: {found}"


@pytest.mark.parametrize("folder", ["harness", "bench"])
def test_harness_and_bench_reach_private_names_through_a_probe(folder: str) -> None:
    found = [
        f"{path}:{line}: {name}"
        for path, source in sources(folder).items()
        if path != "harness/probe.py"
        for line, name in private_names(source)
        if name not in own_names(source)
    ]
    assert not found, f"add a function to harness/probe.py, named after what it tells: {found}"


def test_private_name_is_found_however_it_is_used() -> None:
    source = '''
from leasehold.server.calls import _page, listing
lease._claim.token
client.lock("a")._core.engine
monkeypatch.setattr(lease, "_claim", None)
monkeypatch.setattr("leasehold.events._slow_calls", {})
STEPS = [(Watcher, "_send_due", 1)]
self.client._core
PROGRAM = f"""
print(client._core)
"""
'''
    found = ["_page", "_claim", "_core", "_claim", "leasehold.events._slow_calls", "_send_due", "_core"]
    assert private_names(source) == [*enumerate(found, start=2), (10, "_core")]


def test_names_of_its_own_and_public_ones_are_not_found() -> None:
    source = """
self._claim, cls._known, super()._open()
grant._replace(token=1), os._exit(0), thing.__dict__, lambda _: _
shell(variables, "_LEASEHOLD_COMPLETE=x"), ("-x", "_x")
"""
    assert private_names(source) == []


def test_every_place_of_a_probe_exists() -> None:
    """What mypy does for the functions of a probe."""
    probes = sorted(path.stem for path in (ROOT / "tests/support").glob("probe*.py"))
    assert len(probes) > 15
    known = [value for probe in probes for value in vars(importlib.import_module(f"tests.support.{probe}")).values()]
    places = [place for each in known for place in (each if isinstance(each, list) else [each]) if type(place) is Place]
    assert len(places) > 100
    assert [place for place in places if not hasattr(*place)] == []
