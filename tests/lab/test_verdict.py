"""The verdict of the fault lab on recorded events: what it must find, what it must allow, and the part it shows."""

from __future__ import annotations

from typing import Any

from harness.lab.expectations import Expectation
from harness.lab.verdict import Event, Recording, Silence, Verdict, judge, smallest

SAFE = Expectation()
OVERLAPS = Expectation(overlaps="a sentence")


class Script:
    """Events of contenders, one after the other; each takes a tenth of a second."""

    def __init__(self) -> None:
        self.at, self.events, self.cycles = 0.0, list[Event](), dict[str, int]()

    def add(self, process: str, what: str, *details: Any, at: float | None = None) -> Script:
        self.at += 0.1
        self.cycles[process] = self.cycles.get(process, 0) + (what == "asks")
        self.events.append(Event(self.at if at is None else at, process, self.cycles[process], what, details))
        return self

    def holds(self, process: str, token: int) -> Script:
        return self.add(process, "asks", 0.5).add(process, "holds", token, False)

    def reads(self, process: str, token: int) -> Script:
        return self.add(process, "reads", token).add(process, "accepted")

    def writes(self, process: str, token: int, before: int, answer: str = "accepted") -> Script:
        return self.add(process, "writes", token, before).add(process, answer)

    def ends(self, process: str, token: int, lost: str | None = None) -> Script:
        return self.add(process, "ends", token, lost)

    def cycle(self, process: str, token: int, before: int) -> Script:
        return self.holds(process, token).reads(process, token).writes(process, token, before).ends(process, token)

    def judge(self, expectation: Expectation = SAFE, *, plain: bool = False, **facts: Any) -> Verdict:
        accepted = sum(event.what == "writes" for event in self.events)
        recording = Recording(self.events, **{"balance": accepted, **facts})
        return judge(recording, expectation, plain=plain, call_timeout=1.0)


def test_contenders_that_take_turns_are_valid():
    verdict = Script().cycle("a", 1, 0).cycle("b", 2, 1).cycle("a", 3, 2).judge(requests=12)
    assert (verdict.violations, verdict.late, verdict.bad_part) == ([], [], [])
    assert (verdict.operations, verdict.grants, verdict.requests_per_grant) == (12, 3, 4.0)


def test_two_holders_are_found_and_shown_alone():
    script = Script().cycle("a", 1, 0).cycle("b", 2, 1)
    script.holds("a", 3).holds("b", 4).ends("a", 3).ends("b", 4).cycle("a", 5, 2)
    verdict = script.judge()
    assert "exclusion" in verdict.violations[0]
    assert {(event.process, event.cycle) for event in verdict.bad_part} == {("a", 2), ("b", 2)}


def test_two_holders_are_allowed_only_where_the_page_says_so():
    script = Script().holds("a", 3).holds("b", 4).ends("a", 3).ends("b", 4)
    assert (script.judge(OVERLAPS).violations, script.judge(OVERLAPS).overlaps) == ([], 1)
    assert script.judge(SAFE).violations


def test_falling_token_is_found_even_where_two_holders_are_allowed():
    assert "token" in Script().cycle("a", 5, 0).cycle("b", 4, 1).judge(OVERLAPS).violations[0]


def test_stale_write_accepted_by_fence_is_found():
    script = Script().holds("a", 1).reads("a", 1).ends("a", 1, "expired").cycle("b", 2, 0)
    script.writes("a", 1, 0)
    assert script.judge(balance=1).violations
    assert script.judge(plain=True, balance=1).violations == []
    assert script.judge(plain=True, balance=1).lost_updates == 1


def test_refused_stale_write_is_valid():
    script = Script().holds("a", 1).reads("a", 1).ends("a", 1, "stalled").cycle("b", 2, 0)
    verdict = script.writes("a", 1, 0, "refused").judge(balance=1)
    assert (verdict.violations, verdict.stale, verdict.losses) == ([], 1, 1)


def test_grant_to_contender_that_was_cut_off_is_found():
    script = Script().cycle("a", 1, 0)
    silences = [Silence(frozenset({"a"}), 0.0, 10.0)]
    assert "cut off" in script.judge(silences=silences).violations[0]
    assert script.judge(silences=[Silence(frozenset({"b"}), 0.0, 10.0)]).violations == []


def test_lost_lease_that_had_to_be_kept_is_found():
    script = Script().holds("a", 1).ends("a", 1, "unreachable")
    assert "unreachable" in script.judge(kept={("a", 1)}).violations[0]
    assert script.judge().violations == []


def test_missing_update_with_fence_is_found():
    assert "missing" in Script().cycle("a", 1, 0).judge(balance=0).violations[0]


def test_hold_of_killed_contender_ends_with_it():
    script = Script().holds("a", 1)
    killed_at = script.at + 0.05
    assert script.cycle("b", 2, 0).judge(crashes=[(killed_at, "a")]).violations == []
    assert script.judge().violations


def test_late_refusal_is_reported_unless_contender_was_paused():
    script = Script().add("a", "asks", 0.5).add("a", "fails", "Unavailable", at=5.0)
    assert "5.0 s" not in str(script.judge().violations)
    assert "4.9 s" in script.judge().late[0]
    assert script.judge(pauses=[("a", 1.0, 4.0)]).late == []


def test_late_next_holder_is_reported():
    assert "3.0 s" in Script().cycle("a", 1, 0).judge(Expectation(within=2.5), waits=[3.0]).late[0]


def test_longest_gap_is_between_the_end_of_a_hold_and_the_next():
    verdict = Script().holds("a", 1).ends("a", 1).add("b", "asks", 9.0).add("b", "holds", 2, False, at=4.3).judge()
    assert verdict.longest_gap == 4.0


def test_refusals_in_the_longest_gap_are_counted_by_error():
    script = Script().add("c", "asks", 0.0).add("c", "fails", "NotAcquired", False, "").holds("a", 1).ends("a", 1)
    for _ in range(3):
        script.add("b", "asks", 0.0).add("b", "fails", "Unavailable", True, "")
    assert script.holds("a", 2).judge().refused_in_gap == {"Unavailable": 3}


def test_smallest_keeps_only_what_is_needed():
    items = [("a", number) for number in range(100)]
    assert smallest(items, lambda rest: ("a", 7) in rest and ("a", 93) in rest) == [("a", 7), ("a", 93)]
