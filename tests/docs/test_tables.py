"""The docs agree with the code: generated tables, the reference of every public name, the guarantees pages.

The text between <!-- generated: WORD --> and <!-- end --> is generated from the code. After a change of the code,
`python tests/docs/test_tables.py` regenerates it. Other tables are written by hand and compared.
"""

import functools
import importlib
import inspect
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

import leasehold
from leasehold import blocking, config, engines, errors, events, fences
from leasehold.client.lease import BaseLease
from leasehold.config import SCHEME_ALIASES
from leasehold.engines.registry import ClaimRegistry
from leasehold.runtime.threads import Threads
from leasehold.server.settings import SETTINGS
from leasehold.telemetry.alerts import rules

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
comparison = importlib.import_module("comparison.table")
report = importlib.import_module("bench.report")
lab = importlib.import_module("harness.lab.evidence")
distances = importlib.import_module("harness.lab.distances")
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

GENERATED = re.compile(r"(?P<open><!-- generated: (?P<word>.+?) -->\n)(?P<text>.*?)(?P<close><!-- end -->)", re.S)

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")

# A page for each engine, by the name of its module, and its first scheme.
PAGE_NAMES = {"remote": "server"}
ENGINES = {
    PAGE_NAMES.get(module.rpartition(".")[2], module.rpartition(".")[2]): scheme
    for scheme, module in reversed(engines.BUILT_IN.items())
}

# -------------------------------------------------------- generated from the code

# Instead of a table without rows; `tools/dist.py` builds no release with it.
NOT_MEASURED = "*Not measured in this version.*\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n" for cells in lines)


def comments(thing: type) -> dict[str, str]:
    """The trailing comment of each field of a class."""
    found = re.findall(r"^    (\w+): .*?(?:  # (.*))?$", inspect.getsource(thing), re.M)
    return dict(found)


REQUIRED_HOSTS = {"redlock": "a,b,c"}  # engines whose URL needs hosts


def traits_table(scheme: str) -> str:
    runtime = Threads()
    traits = engines.opener(scheme)(
        config.EngineConfig.parse(f"{scheme}://{REQUIRED_HOSTS.get(scheme, '')}", 5.0),
        runtime,
        ClaimRegistry(runtime, ""),
    ).traits
    descriptions = comments(leasehold.Traits)
    rows = [(f"`{name}`", f"`{value!r}`", descriptions[name]) for name, value in traits._asdict().items()]
    return table(("trait", "here", "meaning"), rows)


def lock_options_table() -> str:
    descriptions = comments(config.LockArguments)
    defaults = dict(config.LockOptions._field_defaults)
    defaults |= {"ttl": None, "require": ()}
    rows = [
        (f"`{name}`", f"`{kind.__forward_arg__}`", f"`{defaults[name]!r}`", descriptions[name])
        for name, kind in config.LockArguments.__annotations__.items()
    ]
    return table(("option", "type", "default", "meaning"), rows)


def reasons_table() -> str:
    rows = [(f"`{reason}`", text) for reason, text in leasehold.LeaseLost.EXPLANATIONS.items()]
    return table(("reason", "meaning"), rows)


def error_tree() -> str:
    tree = re.search(r"^    LeaseholdError\n.*?\n\n", inspect.getsource(errors), re.M | re.S)
    assert tree is not None
    return f"```text\n{inspect.cleandoc(tree[0])}\n```\n"


def fences_reference() -> str:
    """Every public name of `leasehold.fences` except the asyncio classes, with its docstrings."""
    found = []
    for name in sorted(set(fences.__all__) - {"LeaseLike"}, key=str.lower):
        thing = getattr(fences, name)
        if name.startswith("Async"):
            continue
        title = name if getattr(thing, "_is_protocol", False) else f"{name}{signature_without_types(thing)}"
        found.append(f"## {name}\n\n`{title}`: {docstring_in_one_line(thing)}\n")
        if isinstance(thing, type) and inspect.isfunction(vars(thing).get("__init__", thing.__init__)):
            init_docstring = thing.__init__.__doc__
            found += (
                [f"{' '.join(init_docstring.split())}\n"]
                if init_docstring and not getattr(thing, "_is_protocol", False)
                else []
            )
        if methods := signatures(thing):
            found.append(
                table(
                    ("call", "promise"),
                    [(f"`{method}{signature}`", promise) for method, (signature, promise) in methods.items()],
                )
            )
    return "\n" + "\n".join(found) + "\n"


def signatures(thing: object) -> dict[str, tuple[str, str]]:
    """The public methods of a class: their arguments and docstrings."""
    members = inspect.getmembers(thing, inspect.isfunction) if isinstance(thing, type) else []
    own = [(name, method) for name, method in members if name[0] != "_" and name not in INTERNAL_METHODS]
    return {name: (signature_without_types(method), docstring_in_one_line(method)) for name, method in own}


INTERNAL_METHODS = {
    "claim_row",
    "is_fence_column",
    "read_locked",
    "read_row",
    "resource_of",
    "take_row",
    "update",
    "write_row",
}  # helpers that two kinds share


def signature_without_types(thing: Callable[..., object]) -> str:
    """The arguments without their types."""
    signature = inspect.signature(thing)
    given = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(signature.replace(parameters=given, return_annotation=signature.empty))


def docstring_in_one_line(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def growth_table(what: str) -> str:
    """The results of `python -m bench.growth`: each engine's cost in microseconds, by number of locks or waiters."""
    found = json.loads((DOCS / "evidence" / "growth.json").read_text(encoding="utf-8"))
    counts = sorted({count for series in found.values() for count, _ in series[what]})
    rows = []
    for engine, series in found.items():
        costs = dict(series[what])
        rows.append((engine, *(f"{costs[count]:,.0f}" if count in costs else "—" for count in counts)))
    return table((what, *(f"{count:,}" for count in counts)), rows)


def bench_results() -> dict[str, dict[str, object]]:
    """The results of `make bench ARGS=report`."""
    return json.loads((ROOT / "bench" / "results.json").read_text(encoding="utf-8"))


PAIR_TABLES = ("memory", "sqlite", "redis", "redlock", "postgresql", "mysql", "etcd", "zookeeper")


def speed_table() -> str:
    """Each engine's pairs as a ratio to the base of its table."""
    found = bench_results()
    rows = []
    for part in [part for name in PAIR_TABLES if name in found for part in found[name]["parts"] if "results" in part]:
        base, *cases = part["results"]
        title = part["title"].partition(":")[0] + (", asyncio" if "asyncio" in part["title"] else "")
        ours = [case["ratio"] for case in cases if case["name"].startswith("leasehold")]
        others = [case for case in cases if not case["name"].startswith(("leasehold", "two ", "the least "))]
        best = min(others, key=lambda case: case["ratio"], default=None)
        rows.append((title, base["name"], f"{min(ours):.2f}", f"{best['ratio']:.2f}: {best['name']}" if best else "—"))
    return table(("engine", "base", "ours", "the best of the others"), rows)


def hand_off_table() -> str:
    """How long it takes from a release until the next holds, ours and what a user would pick instead."""
    rows = []
    for part in bench_results().get("hand_offs", {"parts": []})["parts"]:
        if "results" in part:
            ours, *others = part["results"]
            compared = "; ".join(f"{case['name']}: {case['ratio']:.2g}" for case in others)
            rows.append((part["title"].partition(":")[0], f"{ours['micros'] / 1000:.2f} ms", compared))
    return table(("engine", "ours", "others, ours is 1"), rows)


CROWD_LINE = re.compile(
    r"\s*10 workers, (?P<lock>.+?):\s+(?P<rate>[\d,]+) grants a second"
    r".*most to fewest (?P<spread>\S+); overtaken (?P<late>\d+)"
)


def crowd_table() -> str:
    """Ten workers on one name, from the lines of `bench.contention`."""
    rows = []
    for part in bench_results().get("contention", {"parts": []})["parts"]:
        for line in part.get("lines", ()):
            if found := CROWD_LINE.match(line):
                rows.append((part["title"].partition(":")[0], *found.group("lock", "rate", "spread", "late")))
    return table(("engine", "lock", "grants a second", "most to fewest", "overtaken"), rows)


def aims_table() -> str:
    return table(("what", "measured", "aim", "met"), report.aim_rows(bench_results()))


def comparison_table() -> str:
    """The results of `make comparison`."""
    return table(("approach", *comparison.FAULTS), comparison.table_rows(comparison.load_results()))


def breaking_table() -> str:
    """The results of `python -m bench.breaking`, and how many servers at half of that carry 100,000 requests/s."""
    found = json.loads((DOCS / "evidence" / "breaking.json").read_text(encoding="utf-8"))
    rows = []
    for engine, result in found.items():
        sustained = result["sustained"] or 0.0
        broken = next((step for step in reversed(result["steps"]) if step["rate"] == result["broke_at"]), None)
        limit = re.split("[:,]", result["limited_by"] or "")[0] + (
            f"; clients {broken['client_cpu']:.0%}" if broken else ""
        )
        servers = "—" if engine in ("memory", "sqlite") or not sustained else f"{math.ceil(100_000 / sustained):,}"
        rows.append((engine, f"{sustained:,.0f}", f"{2 * sustained:,.0f}", result["broke_by"] or "", limit, servers))
    return table(("engine", "pairs/s", "requests/s", "broke by", "limited by", "servers for 100,000 requests/s"), rows)


def comparison_costs() -> str:
    """What each approach costs, as `make comparison` measured it, what it needs, and what it is for."""
    head = ("approach", "cost of an update", "needs", "use it for")
    return table(head, comparison.cost_rows(comparison.load_results()))


def lab_table(rows: list[tuple[str, ...]]) -> str:
    return table(rows[0], rows[1:])


def lab_figures() -> str:
    """A table for each setup that was run."""
    found = lab.load()
    tables = {name: lab.figures_table(found, name) for name in lab.SETUPS}
    return "".join(f"\n### {name}\n\n{lab_table(rows)}" for name, rows in tables.items() if len(rows) > 1) + "\n"


def server_settings_table() -> str:
    rows = []
    for setting in SETTINGS:
        default = setting.default
        shown = (
            ", ".join(default)
            if isinstance(default, tuple)
            else f"{default:g}"
            if isinstance(default, float)
            else default
        )
        rows.append(
            (
                f"`{setting.name}`",
                f"`{setting.flag}`",
                "" if shown is None or shown is False else f"`{shown}`",
                setting.text.removesuffix("."),
            )
        )
    return table(("in the file", "flag", "default", "what it is"), rows)


def alerts_table(severity: str) -> str:
    chosen = [alert for alert in rules.ALERTS if alert.severity == severity]
    return table(
        ("alert", "fires"),
        [(f"[{alert.name}](#{alert.name.lower()})", _readable(alert.summary)) for alert in chosen],
    )


def runbook() -> str:
    """A section for each alert."""
    parts = []
    for alert in rules.ALERTS:
        after = f" for {alert.after}" if alert.after != "0s" else ""
        text = "\n".join(textwrap.wrap(alert.runbook, 120, break_on_hyphens=False))
        expression = f"```text\n{alert.expression}\n```"
        parts.append(
            f"## {alert.name}\n\n**{alert.severity}**{after}: {_readable(alert.summary)}.\n\n{text}\n\n{expression}\n"
        )
    return "\n" + "\n".join(parts) + "\n"


def _readable(summary: str) -> str:
    """Without the templates of Prometheus: their label, or `N`."""
    return re.sub(r"\{\{ \$(?:labels\.(\w+)|value)[^}]*\}\}", lambda found: (found[1] or "N").upper(), summary)


GENERATORS: dict[str, Callable[[], str]] = {
    "server settings": server_settings_table,
    "comparison": comparison_table,
    "comparison costs": comparison_costs,
    "breaking": breaking_table,
    "lab matrix": lambda: lab_table(lab.matrix_table(lab.load())),
    "lab setups": lambda: lab_table(lab.setups_table(lab.load())),
    "lab pauses": lambda: lab_table(lab.pauses_table(lab.load())),
    "lab quotes": lambda: lab_table(lab.quotes_table()),
    "lab figures": lab_figures,
    "lab soak": lambda: lab_table(lab.soak_table(lab.load())),
    "lab soak growth": lambda: lab_table(lab.growth_table(lab.load())),
    "site distances": lambda: lab_table(distances.round_trips_table()),
    "site latencies": lambda: lab_table(distances.latencies_table()),
    "lab blanks": lambda: lab_table(lab.blanks_table()),
    "speed": speed_table,
    "speed, hand-offs": hand_off_table,
    "speed, crowds": crowd_table,
    "speed, aims": aims_table,
    "growth held": lambda: growth_table("held"),
    "growth waiting": lambda: growth_table("waiting"),
    "fences": fences_reference,
    "options of a lock": lock_options_table,
    "reasons": reasons_table,
    "error tree": error_tree,
    "runbook": runbook,
    **{
        f"alerts, {severity}": (lambda severity=severity: alerts_table(severity))
        for severity in ("critical", "warning", "info")
    },
    **{f"traits of {engine}": (lambda scheme=scheme: traits_table(scheme)) for engine, scheme in ENGINES.items()},
}


def regenerate(text: str) -> str:
    """Return the text of a page with its generated parts regenerated."""

    def make(match: re.Match[str]) -> str:
        assert match["word"] in GENERATORS, f"no generator for {match['word']!r}; known: {', '.join(GENERATORS)}"
        return match["open"] + GENERATORS[match["word"]]() + match["close"]

    return GENERATED.sub(make, text)


@each_page
def test_generated_parts_agree_with_the_code(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated") == len(GENERATED.findall(text)), "a generated part has no <!-- end -->"
    assert text == regenerate(text), "out of date: run `python tests/docs/test_tables.py`"


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
def test_cases_named_as_evidence_exist(engine):
    """A guarantees page names conformance cases as `a_name_of_words`, and some tests."""
    evidence = (DOCS / "guarantees" / f"{engine}.md").read_text(encoding="utf-8").partition("## Evidence")[2]
    folder = ROOT / "src" / "leasehold" / "testing" / "conformance" / "cases"
    cases = set().union(*(functions(path) for path in folder.glob("*.py")))
    missing = [name for name in re.findall(r"`([a-z]+_\w*_\w+)`", evidence) if name not in cases]
    assert NAMED_TEST.search(evidence)
    assert missing == []


@each_page
def test_tests_named_on_a_page_exist(page):
    tests = NAMED_TEST.findall(page.read_text(encoding="utf-8"))
    assert [f"{file}::{name}" for file, name in tests if not exists(ROOT / file, name)] == []


def exists(path: Path, name: str) -> bool:
    return path.is_file() and (not name or name in functions(path))


@functools.cache
def functions(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (\w+)", path.read_text(encoding="utf-8"), re.M))


def test_files_named_in_architecture_page_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", text))
    source = ROOT / "src" / "leasehold"
    assert named
    assert [path for path in sorted(named) if not (source / path).exists() and not (ROOT / path).exists()] == []


def test_members_named_in_architecture_page_exist():
    """The file that defines the class names the member, too."""
    bodies: dict[str, str] = {}
    for path in (ROOT / "src" / "leasehold").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^class (\w+)", text, re.M):
            bodies[name] = bodies.get(name, "") + text
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`", page))
    assert len(named) > 40
    assert [
        f"{owner}.{member}" for owner, member in sorted(named) if not re.search(rf"\b{member}\b", bodies.get(owner, ""))
    ] == []


# -------------------------------------------------------- the reference is complete


def section(page: str, heading: str) -> str:
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert found, f"{page} has no heading {heading!r}"
    return found[1]


def first_column(page: str, heading: str) -> list[str]:
    """The code in the first column of the table below a heading."""
    return [cell.replace("\\|", "|") for cell in re.findall(r"^\| `(.+?)`", section(page, heading), re.M)]


def call_signature(name: str, member: object) -> str:
    """A method as the page writes it: without types, except a return type that is not a function."""
    if not inspect.isfunction(member):
        return name
    signature = inspect.signature(member)
    # `**unknown` only exists to give a better error for a misspelt argument.
    parameters = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:] if p.name != "unknown"]
    shown = str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("=UNSET", "=...")
    given = str(signature.return_annotation)
    return f"{name}{shown}" + ("" if given == "None" or "Callable" in given or given == "Decorator" else f" -> {given}")


# Methods and attributes that classes use internally and users do not.
INTERNAL = {
    "Lock": {"options", "shape"},
    "Lease": {name for name, member in vars(BaseLease).items() if inspect.isfunction(member)}
    - {"check", "on_at_risk", "on_lost"},
    "MultiLock": {"locks", "wait"},
}

API_PAIRS = {
    blocking.Client: leasehold.AsyncClient,
    blocking.Lock: leasehold.AsyncLock,
    blocking.RWLock: leasehold.AsyncRWLock,
    blocking.Lease: leasehold.AsyncLease,
    blocking.MultiLock: leasehold.AsyncMultiLock,
    blocking.Leases: leasehold.AsyncLeases,
    blocking.Election: leasehold.AsyncElection,
    blocking.Schedule: leasehold.AsyncSchedule,
    blocking.Status: leasehold.AsyncStatus,
}


# Public attributes that no class body declares.
ATTRIBUTES = {"Schedule": ("name", "ticks"), "Status": ("name", "start")}


@pytest.mark.parametrize("api_class", [*API_PAIRS, blocking.ThreadingLock])
def test_api_page_lists_every_method(api_class):
    ours = [base for base in api_class.__mro__ if base.__module__.startswith("leasehold.")]
    members = {
        name: member
        for base in reversed(ours)
        for name, member in vars(base).items()
        if name[0] != "_" and hasattr(api_class, name)  # locks explain attributes of the lease, and do not have them
    }
    members |= dict.fromkeys(ATTRIBUTES.get(api_class.__name__, ()))
    public = members.keys() - INTERNAL.get(api_class.__name__, set())
    assert sorted(first_column("api.md", api_class.__name__)) == sorted(
        call_signature(name, members[name]) for name in public
    )


@pytest.mark.parametrize(("api_class", "async_class"), API_PAIRS.items())
def test_api_page_marks_awaited_methods(api_class, async_class):
    rows = re.findall(r"^\| `(\w+).*?` \| (\w*) *\|", section("api.md", api_class.__name__), re.M)
    members = inspect.getmembers(async_class, inspect.iscoroutinefunction)
    awaited = {name for name, _ in members if name[0] != "_"}
    assert {name for name, awaited_word in rows if awaited_word == "await"} == awaited


def test_api_page_lists_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert [name for name in leasehold.__all__ if not re.search(rf"`{name}`|^## {name}$", text, re.M)] == []


@pytest.mark.parametrize(
    "thing",
    [leasehold.CurrentLease, leasehold.Holding, leasehold.Holder, leasehold.Outcome, leasehold.Term, leasehold.Traits],
)
def test_api_page_lists_every_field(thing):
    assert tuple(first_column("api.md", thing.__name__)) == thing._fields


def test_errors_page_lists_every_error():
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (\w+)$", text, re.M)) == sorted(set(errors.__all__) - {"LeaseholdError"})


def test_events_page_lists_every_event():
    assert first_column("events.md", "Kinds") == list(get_args(events.EventKind))
    assert first_column("events.md", "Fields") == list(events.Event._fields)


def test_api_page_explains_every_require_word():
    assert first_column("api.md", "Words for `require`") == list(config.REQUIREMENTS)


# URLs on the pages that no engine serves: one in an error message, names in certificates.
OTHER_SCHEMES = {"file", "nowhere", "spiffe"}


@each_page
def test_page_names_only_schemes_that_an_engine_serves(page):
    shown = set(re.findall(r"(?<![\w+.-])([a-z][a-z0-9+.-]*)://", page.read_text(encoding="utf-8")))
    assert shown - set(engines.BUILT_IN) - set(SCHEME_ALIASES) - OTHER_SCHEMES == set()


def test_api_page_and_readme_name_every_scheme():
    for page in (ROOT / "README.md", DOCS / "reference" / "api.md"):
        text = page.read_text(encoding="utf-8")
        assert [scheme for scheme in engines.BUILT_IN if f"{scheme}://" not in text] == [], page.name


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md", "docs/choosing.md", "docs/reference/api.md"])
def test_overview_page_names_every_engine(page):
    text = (ROOT / page).read_text(encoding="utf-8").lower()
    assert [engine for engine in ENGINES if engine not in text] == []


def test_outdated_table_is_detected():
    old = "<!-- generated: reasons -->\n| reason | meaning |\n<!-- end -->"
    assert regenerate(old) != old
    assert regenerate(regenerate(old)) == regenerate(old)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(regenerate(each.read_text(encoding="utf-8")), encoding="utf-8")
