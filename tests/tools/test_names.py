"""Names of tests fit into one line of a report: they have fewer than 70 characters."""

import ast

from tests.support.paths import ROOT

TOO_LONG = 70


def long_names(source: str) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) >= TOO_LONG
    ]


def test_names_of_all_tests_are_short_enough() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    assert len(sources) > 300
    found = [f"{path.relative_to(ROOT)}: {name}" for path, source in sources.items() for name in long_names(source)]
    assert not found, f"shorten to `test_<subject>_<condition>_<expectation>`: {found}"


def test_name_that_is_too_long_is_found() -> None:
    fits, too_long = "test_" + "a" * 64, "test_" + "a" * 65
    assert long_names(f"def {fits}(): ...\nasync def {too_long}(): ...\ndef helper_{too_long}(): ...") == [too_long]
