"""What a power cut may undo: neither a token nor a grant that outlives its process."""

from __future__ import annotations

import shutil

import pytest

from tests.support.power_cut import Recording, violations

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, which records the writes"),
]


@pytest.mark.parametrize("seed", range(3))
def test_power_cut_lowers_no_token_and_loses_no_lasting_grant(tmp_path, seed) -> None:
    recording = Recording(tmp_path, "", seed)
    found = violations(recording, 100, seed)
    print(dict(found))
    assert found["recoveries"] == 400
    assert (found["tokens fell"], found["grants lost"]) == (0, 0)
    assert violations(recording, 30, seed, forget_ceiling=True)["tokens fell"] > 0  # so the ceiling was needed


def test_power_cut_undoes_both_with_durable_no(tmp_path) -> None:
    """Shows that this rig would find it."""
    found = violations(Recording(tmp_path, "?durable=no", 1), 60, 1)
    print(dict(found))
    assert found["tokens fell"] > 0
    assert found["grants lost"] > 0
