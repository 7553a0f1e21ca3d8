"""Circles and blocking chains in a picture."""

import pytest

from leasehold.model import Holder, Holding
from leasehold.server import deadlocks
from leasehold.server.auth import Caller
from leasehold.server.history import History
from leasehold.server.keys import Right
from leasehold.server.picture import Picture, Snapshot
from leasehold.server.queries import may_see


def held(name, owner, token, age=10.0):
    return Holding(
        "", name, "held", "exclusive", "lock", 1, f"{owner}-{name}", Holder(owner), age, 20.0, token, owner=owner
    )


def waits(name, owner, position=0):
    return Holding(
        "",
        name,
        "waiting",
        "exclusive",
        "lock",
        1,
        f"{owner}-{name}",
        Holder(owner),
        1.0,
        15.0,
        position=position,
        owner=owner,
    )


def picture(*holdings, as_of=100.0):
    return Picture(Snapshot("", as_of, holdings), 0.0, False)


CIRCLE = (held("a", "one", 1), waits("a", "two"), held("b", "two", 2, age=3.0), waits("b", "one"))


def test_circle_names_the_youngest_grant_to_break():
    (found,) = deadlocks.find(picture(*CIRCLE))
    assert (found.victim.name, found.victim.token) == ("b", 2)


def test_deadlock_is_one_incident_once_two_pictures_show_it():
    history = History(lambda: 100.0)
    history.observe(picture(*CIRCLE).snapshot)
    assert not history.incidents(), "one picture may mix two moments"
    for as_of in (101.0, 102.0):
        history.observe(picture(*CIRCLE, as_of=as_of).snapshot)
    (incident,) = history.incidents()
    assert (incident.kind, incident.name, incident.token, incident.at) == ("deadlock", "b", 2, 101.0)
    assert "token 2" in incident.advice
    assert history.deadlocks("") == 1
    history.observe(picture(*CIRCLE[:2], as_of=103.0).snapshot)
    assert incident.ended_at == 103.0
    assert history.deadlocks("") == 0


@pytest.mark.parametrize(
    ("right", "seen"), [("read::", True), ("read:*:", True), ("read::b", False), ("read::a", False), ("lock::", False)]
)
def test_deadlock_is_shown_only_to_callers_that_may_read_all_its_names(right, seen):
    """Its text has all names and holders of the circle."""
    history = History(lambda: 100.0)
    for as_of in (101.0, 102.0):
        history.observe(picture(*CIRCLE, as_of=as_of).snapshot)
    (incident,) = history.incidents()
    assert may_see(Caller("web", (Right.parse(right),)), incident) is seen


def test_chain_leads_to_the_lock_that_all_wait_for():
    """three waits for what two holds, who waits for what one holds."""
    found = deadlocks.chains(
        picture(
            held("a", "one", 1),
            waits("a", "two"),
            waits("a", "late", 1),
            held("b", "two", 2),
            waits("b", "three"),
            held("c", "four", 3),
            waits("c", "five"),
        )
    )
    (chain,) = found
    assert [(link.lock.name, link.holder.holder.label) for link in chain.links] == [("b", "two"), ("a", "one")]
    assert chain.root.lock.name == "a"
    assert chain.blocked == 3


def test_chain_into_a_circle_ends():
    (chain,) = deadlocks.chains(picture(*CIRCLE, held("c", "two", 9), waits("c", "three")))
    assert [link.lock.name for link in chain.links] == ["c", "a", "b"]


def test_lock_whose_holder_waits_for_nothing_is_no_chain():
    assert deadlocks.chains(picture(held("a", "one", 1), waits("a", "two"))) == []
