"""No test waits by sleeping: a busy machine takes longer, a quiet one waits for nothing. Tests poll with a deadline."""

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

UNTIL_ENDED = 30.0  # seconds: a sleep that long is ended by the test, which cancels its task or kills its process


def bare_sleeps(source: str) -> list[int]:
    """The lines that sleep, except `sleep(0)`, the steps of a `while` loop that polls, sleeps until the test ends
    them, and sleeps with a comment `# pause: WHY`: time that is part of the scenario, such as the length of a fault."""
    lines = source.splitlines()
    return [
        call.lineno
        for call, polls in _sleeps(ast.parse(source), polls=False)
        if not polls and not _is_harmless(call) and "# pause: " not in lines[call.lineno - 1]
    ]


def _sleeps(node: ast.AST, polls: bool) -> Iterator[tuple[ast.Call, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = polls
        if isinstance(child, ast.While):
            inside = True
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.For | ast.AsyncFor):
            inside = False
        if isinstance(child, ast.Call) and _is_sleep(child.func):
            yield child, inside
        yield from _sleeps(child, inside)


def _is_sleep(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "sleep"
        and ast.unparse(function) in ("time.sleep", "asyncio.sleep")
    )


def _is_harmless(call: ast.Call) -> bool:
    seconds = call.args[0]
    return isinstance(seconds, ast.Constant) and (seconds.value == 0 or seconds.value >= UNTIL_ENDED)


def test_no_test_waits_by_sleeping() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))}
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, source in sources.items()
        if ".sleep(" in source
        for line in bare_sleeps(source)
    ]
    assert not found, f"poll with a deadline (`wait_until`), or say why it is no wait (`# pause: WHY`): {found}"


def test_bare_sleep_is_found_and_the_others_are_not() -> None:
    source = """
time.sleep(0.1)
for _ in range(10):
    await asyncio.sleep(1)
while not done():
    time.sleep(0.01)
    for _ in range(3):
        time.sleep(seconds)
await asyncio.sleep(0)
time.sleep(60)
time.sleep(0.5)  # pause: the fault lasts
"""
    assert bare_sleeps(source) == [2, 4, 8]
