"""The check of commit messages that `make check` runs."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest

from tests.support.paths import ROOT

spec = spec_from_file_location("tools_commits", ROOT / "tools" / "commits.py")
assert spec is not None
assert spec.loader is not None
commits = module_from_spec(spec)
spec.loader.exec_module(commits)


@pytest.mark.parametrize(
    "subject", ["Bound waiters' reconnect attempts by `wait`", "Pass deadlines down", "Re-read the settings", "Use h2"]
)
def test_imperative_subject_with_a_body_is_accepted(subject):
    assert commits.complaints(subject, "Because.\n") == []


@pytest.mark.parametrize(
    ("subject", "body", "complaint"),
    [
        ("Add " + "x" * 70, "why", "more than 72"),
        ("Added a test", "why", "not an imperative"),
        ("Fixes the build", "why", "not an imperative"),
        ("Tests: ports differ", "why", "capitalised verb"),
        ("a lock is made faster", "why", "capitalised verb"),
        ("Add a test.", "why", "full stop"),
        ("Add a test", "\n", "body"),
    ],
)
def test_other_subject_is_refused(subject, body, complaint):
    (found,) = commits.complaints(subject, body)
    assert complaint in found
