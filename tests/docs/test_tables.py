"""The docs agree with the code: generated tables, the reference of every public name, the guarantees pages.

What stands between <!-- generated: WORD --> and <!-- end --> is made from the code. After a change of the code,
`python tests/docs/test_tables.py` writes it anew. Other tables are written by hand, and compared.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import leasehold
from leasehold import blocking, config, engines, errors, events, fences, once_aio, once_blocking
from leasehold.book import Book
from leasehold.recipes.lease import BaseLease
from leasehold.runtime.threads import Threads

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
comparison = importlib.import_module("comparison.table")
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

GENERATED = re.compile(r"(?P<open><!-- generated: (?P<word>.+?) -->\n)(?P<text>.*?)(?P<close><!-- end -->)", re.S)

# A page for each engine, by the name of its module, and the first of the schemes that lead to it.
ENGINES = {module.rpartition(".")[2]: scheme for scheme, module in reversed(engines.BUILT_IN.items())}

# ------------------------------------------------------------- made from the code


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def comments(thing: type) -> dict[str, str]:
    """What the source says beside each field of a class."""
    found = re.findall(r"^    (\w+): .*?(?:  # (.*))?$", inspect.getsource(thing), re.M)
    return dict(found)


PLACES = {"redlock": "a,b,c"}  # engines that cannot do without


def traits_of(scheme: str) -> str:
    runtime = Threads()
    traits = engines.opener(scheme)(
        config.EngineConfig.parse(f"{scheme}://{PLACES.get(scheme, '')}", 5.0), runtime, Book(runtime, "")
    ).traits
    said = comments(leasehold.Traits)
    rows = [(f"`{field.name}`", f"`{getattr(traits, field.name)!r}`", said[field.name]) for field in fields(traits)]
    return table(("trait", "here", "meaning"), rows)


def options_of_a_lock() -> str:
    said = comments(config.LockArguments)
    usual = {field.name: field.default for field in fields(config.LockOptions)}
    usual |= {"ttl": None, "require": ()}
    rows = [
        (f"`{name}`", f"`{kind.__forward_arg__}`", f"`{usual[name]!r}`", said[name])
        for name, kind in config.LockArguments.__annotations__.items()
    ]
    return table(("option", "type", "default", "meaning"), rows)


def reasons() -> str:
    rows = [(f"`{reason}`", text) for reason, text in leasehold.LeaseLost.MEANING.items()]
    return table(("reason", "meaning"), rows)


def error_tree() -> str:
    tree = re.search(r"^    LeaseholdError\n.*?\n\n", inspect.getsource(errors), re.M | re.S)
    assert tree is not None
    return f"```text\n{inspect.cleandoc(tree[0])}\n```\n"


def of_fences() -> str:
    """Every public name of `leasehold.fences` but the asyncio twins, with what its docstrings promise."""
    found = []
    for name in sorted(set(fences.__all__) - {"Shown"}, key=str.lower):
        thing = getattr(fences, name)
        if name.startswith("Async"):
            continue
        title = name if getattr(thing, "_is_protocol", False) else f"{name}{plain(thing)}"
        found.append(f"## {name}\n\n`{title}`: {in_one_line(thing)}\n")
        if isinstance(thing, type) and inspect.isfunction(vars(thing).get("__init__", thing.__init__)):
            about = thing.__init__.__doc__
            found += [f"{' '.join(about.split())}\n"] if about and not getattr(thing, "_is_protocol", False) else []
        if methods := signatures(thing):
            found.append(
                table(("call", "promise"), [(f"`{each}{sign}`", said) for each, (sign, said) in methods.items()])
            )
    return "\n" + "\n".join(found) + "\n"


def signatures(thing: object) -> dict[str, tuple[str, str]]:
    """The public methods of a class: their arguments, and what they promise."""
    verbs = inspect.getmembers(thing, inspect.isfunction) if isinstance(thing, type) else []
    own = [(name, method) for name, method in verbs if name[0] != "_" and name not in ABSTRACT]
    return {name: (plain(method), in_one_line(method)) for name, method in own}


ABSTRACT = {
    "claiming",
    "is_mark",
    "look",
    "reading",
    "resource_of",
    "taking",
    "update",
    "writing",
}  # steps that two kinds share


def plain(thing: Callable[..., object]) -> str:
    """Arguments without their types."""
    signature = inspect.signature(thing)
    given = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(signature.replace(parameters=given, return_annotation=signature.empty))


def in_one_line(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def of_growth(what: str) -> str:
    """From what `python -m bench.growth` measured: of each engine the cost, in microseconds, by how many there are."""
    found = json.loads((DOCS / "evidence" / "growth.json").read_text(encoding="utf-8"))
    counts = sorted({many for lines in found.values() for many, _ in lines[what]})
    rows = []
    for engine, lines in found.items():
        costs = dict(lines[what])
        rows.append((engine, *(f"{costs[many]:,.0f}" if many in costs else "—" for many in counts)))
    return table((what, *(f"{many:,}" for many in counts)), rows)


def of_speed() -> str:
    """From what `make bench ARGS=report` measured: pairs of each engine, against the base of their table."""
    found = json.loads((ROOT / "bench" / "results.json").read_text(encoding="utf-8"))
    parts = [part for name, kept in found.items() if name != "imports" for part in kept["parts"] if "results" in part]
    rows = []
    for part in parts:
        base, *cases = part["results"]
        what = part["title"].partition(":")[0] + (", asyncio" if "asyncio" in part["title"] else "")
        ours = [case["ratio"] for case in cases if case["name"].startswith("leasehold")]
        others = [case for case in cases if not case["name"].startswith(("leasehold", "two ", "the least "))]
        best = min(others, key=lambda case: case["ratio"], default=None)
        rows.append((what, base["name"], f"{min(ours):.2f}", f"{best['ratio']:.2f}: {best['name']}" if best else "—"))
    return table(("engine", "base", "ours", "the best of the others"), rows)


def of_comparison() -> str:
    """From what `make comparison` measured."""
    return table(("approach", *comparison.FAULTS), comparison.lines(comparison.measured()))


GENERATORS: dict[str, Callable[[], str]] = {
    "comparison": of_comparison,
    "speed": of_speed,
    "growth held": lambda: of_growth("held"),
    "growth waiting": lambda: of_growth("waiting"),
    "fences": of_fences,
    "options of a lock": options_of_a_lock,
    "reasons": reasons,
    "error tree": error_tree,
    **{f"traits of {engine}": (lambda scheme=scheme: traits_of(scheme)) for engine, scheme in ENGINES.items()},
}


def regenerated(text: str) -> str:
    """The text of a page with its generated parts made anew."""

    def make(match: re.Match[str]) -> str:
        assert match["word"] in GENERATORS, f"nothing generates {match['word']!r}; known: {', '.join(GENERATORS)}"
        return match["open"] + GENERATORS[match["word"]]() + match["close"]

    return GENERATED.sub(make, text)


@each_page
def test_generated_parts_agree_with_the_code(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated") == len(GENERATED.findall(text)), "a generated part is not closed"
    assert text == regenerated(text), "out of date: run `python tests/docs/test_tables.py`"


HEADINGS = [
    "Promises",
    "Not promised",
    "What frees a dead holder",
    "Whose clock",
    "Failure table",
    "Settings that change this",
    "Evidence",
]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_a_guarantees_page(engine):
    text = (DOCS / "guarantees" / f"{engine}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert f"<!-- generated: traits of {engine} -->" in text
    promises = text.partition("## Promises")[2].partition("\n## ")[0]
    assert re.findall(r"\*\*(E\d)\*\*", promises) == [f"E{n}" for n in range(1, 10)]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_evidence_exists(engine):
    """Every test that a guarantees page names: `tests/path.py::name`, or a conformance case: `a_name_of_words`."""
    evidence = (DOCS / "guarantees" / f"{engine}.md").read_text(encoding="utf-8").partition("## Evidence")[2]
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", evidence)
    missing = [f"{file}::{name}" for file, name in tests if not exists(ROOT / file, name)]
    folder = ROOT / "src" / "leasehold" / "testing" / "cases"
    cases = set().union(*(functions(path) for path in folder.glob("*.py")))
    missing += [name for name in re.findall(r"`([a-z]+_\w*_\w+)`", evidence) if name not in cases]
    assert tests
    assert missing == []


def exists(path: Path, name: str) -> bool:
    return path.is_file() and (not name or name in functions(path))


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_files_that_the_map_names_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", text))
    source = ROOT / "src" / "leasehold"
    assert named
    assert [each for each in sorted(named) if not (source / each).exists() and not (ROOT / each).exists()] == []


# -------------------------------------------------------- the reference is complete


def section(page: str, heading: str) -> str:
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert found, f"{page} has no heading {heading!r}"
    return found[1]


def first_column(page: str, heading: str) -> list[str]:
    """The code in the first column of the table below a heading."""
    return [cell.replace("\\|", "|") for cell in re.findall(r"^\| `(.+?)`", section(page, heading), re.M)]


def call(name: str, member: object) -> str:
    """A method as the page writes it: without types, but for what it gives if that is no function."""
    if not inspect.isfunction(member):
        return name
    signature = inspect.signature(member)
    # `**unknown` only serves to refuse a misspelt argument with a better text.
    plain = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:] if p.name != "unknown"]
    shown = str(signature.replace(parameters=plain, return_annotation=signature.empty)).replace("=UNSET", "=...")
    given = str(signature.return_annotation)
    return f"{name}{shown}" + ("" if given == "None" or "Callable" in given else f" -> {given}")


# Methods and attributes that the recipes share with each other, and not with users.
INTERNAL = {
    "Lock": {"options", "shape"},
    "Lease": {name for name, member in vars(BaseLease).items() if inspect.isfunction(member)} - {"check", "on_lost"},
    "MultiLock": {"locks", "wait"},
}

FACES = {
    blocking.Client: leasehold.AsyncClient,
    blocking.Lock: leasehold.AsyncLock,
    blocking.RWLock: leasehold.AsyncRWLock,
    blocking.Lease: leasehold.AsyncLease,
    blocking.MultiLock: leasehold.AsyncMultiLock,
    blocking.Leases: leasehold.AsyncLeases,
    blocking.Election: leasehold.AsyncElection,
    once_blocking.Schedule: once_aio.AsyncSchedule,
    once_blocking.Status: once_aio.AsyncStatus,
}


# Public attributes that no class body names.
ATTRIBUTES = {"Schedule": ("name", "ticks"), "Status": ("name", "start")}


@pytest.mark.parametrize("face", [*FACES, blocking.ThreadingLock])
def test_the_api_page_has_every_method(face):
    ours = [each for each in face.__mro__ if each.__module__.startswith("leasehold.")]
    members = {name: member for each in reversed(ours) for name, member in vars(each).items() if name[0] != "_"}
    members |= dict.fromkeys(ATTRIBUTES.get(face.__name__, ()))
    public = members.keys() - INTERNAL.get(face.__name__, set())
    assert sorted(first_column("api.md", face.__name__)) == sorted(call(name, members[name]) for name in public)


@pytest.mark.parametrize(("face", "twin"), FACES.items())
def test_the_api_page_says_what_is_awaited(face, twin):
    rows = re.findall(r"^\| `(\w+).*?` \| (\w*) *\|", section("api.md", face.__name__), re.M)
    members = inspect.getmembers(twin, inspect.iscoroutinefunction)
    awaited = {name for name, _ in members if name[0] != "_"}
    assert {name for name, word in rows if word == "await"} == awaited


def test_the_api_page_has_every_name():
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert [name for name in leasehold.__all__ if not re.search(rf"`{name}`|^## {name}$", text, re.M)] == []


@pytest.mark.parametrize(
    "thing",
    [leasehold.CurrentLease, leasehold.Holding, leasehold.Holder, leasehold.Outcome, leasehold.Term, leasehold.Traits],
)
def test_the_api_page_has_every_field(thing):
    expected = getattr(thing, "_fields", None) or tuple(field.name for field in fields(thing))
    assert tuple(first_column("api.md", thing.__name__)) == expected


def test_the_errors_page_has_every_error():
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (\w+)$", text, re.M)) == sorted(set(errors.__all__) - {"LeaseholdError"})


def test_the_events_page_has_every_event():
    assert first_column("events.md", "Kinds") == list(get_args(events.EventKind))
    assert first_column("events.md", "Fields") == [field.name for field in fields(events.Event)]


def test_the_words_of_require_are_all_explained():
    assert first_column("api.md", "Words for `require`") == list(config.REQUIREMENTS)


def test_an_outdated_table_is_found():
    old = "<!-- generated: reasons -->\n| reason | meaning |\n<!-- end -->"
    assert regenerated(old) != old
    assert regenerated(regenerated(old)) == regenerated(old)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(regenerated(each.read_text(encoding="utf-8")), encoding="utf-8")
