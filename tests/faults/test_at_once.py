"""Cases that are checked at the same time: not one of them fails unseen, and their outcomes come in order."""

import threading

import pytest

from tests.faults import check


def test_rows_come_in_the_order_of_the_cases_and_those_of_a_case_together(monkeypatch):
    monkeypatch.setattr(check, "OUTCOMES", [("b", "before", "")])
    second_is_done = threading.Event()

    def checked(case):
        if case == "a":
            assert second_is_done.wait(10)  # so both run at the same time, and this one ends last
        second_is_done.set()
        return [(case, "later", "")]

    check.at_once(checked, ("a",), ("b",))
    assert check.OUTCOMES == [("b", "before", ""), ("a", "later", ""), ("b", "later", "")]
    assert check.table() == [("b", "before", ""), ("b", "later", ""), ("a", "later", "")]


@pytest.mark.parametrize("wrong", [{"one"}, {"two"}, {"one", "two"}], ids=lambda names: " and ".join(sorted(names)))
def test_a_case_that_fails_is_named_and_the_others_are_noted(monkeypatch, wrong):
    monkeypatch.setattr(check, "OUTCOMES", [])

    def checked(case):
        assert case not in wrong
        return [(case, "", "")]

    with pytest.raises(ExceptionGroup) as failed:
        check.at_once(checked, ("one",), ("two",))
    named = [(type(failure), failure.__notes__) for failure in failed.value.exceptions]
    assert named == [(AssertionError, [f"in case ('{case}',)"]) for case in sorted(wrong)]
    assert {row[0] for row in check.OUTCOMES} == {"one", "two"} - wrong
