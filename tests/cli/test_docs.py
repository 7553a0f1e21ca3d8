"""`leasehold docs`: every page of the documentation, from the installed package."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_lists_every_page_with_its_title(shell):
    lines = shell("docs").stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(
        str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")
    )
    assert any(line.split(maxsplit=1) == ["tutorial", "Tutorial"] for line in lines)


def test_docs_prints_a_page_by_name_or_path(shell):
    text = (DOCS / "reference/json.md").read_text(encoding="utf-8")
    for name in ("reference/json", "docs/reference/json.md"):
        assert shell("docs", name).stdout == text


def test_docs_of_a_missing_page_is_64(shell):
    done = shell("docs", "../README")
    assert (done.returncode, done.stdout) == (64, "")
    assert "`leasehold docs` lists the pages" in done.stderr


def test_docs_of_a_part_of_a_name_suggests_the_page(shell):
    assert "did you mean 'how-to/cron-job-once'?" in shell("docs", "cron").stderr
    assert "did you mean 'tutorial'?" in shell("docs", "tutorail").stderr
