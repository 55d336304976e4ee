"""The stepper: recorded messages, gone through by keyboard, on a page and in a notebook."""

import json
import re

import pytest

from labkit.lab.pages.cards import stepper
from labkit.lab.pages.html import render, script, style_sheet
from labkit.parallel.collectives import ALGORITHMS
from tests.browser import opened_browser


def test_every_algorithm_and_one_from_outside_are_recorded_for_every_number_of_ranks():
    steps = stepper(dict(ALGORITHMS) | {"my_own": ALGORITHMS["ring"]}, world_sizes=[2, 3])
    page = steps.on_page
    schedules = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert list(schedules) == [*ALGORITHMS, "my_own"]
    assert {*schedules["ring"]} == {"2", "3"}
    assert schedules["my_own"] == schedules["ring"]
    assert len(schedules["ring"]["3"]["messages"]) == 12


@pytest.mark.parametrize("is_page", [True, False])
def test_it_is_used_by_keyboard_alone(is_page, tmp_path):
    steps = stepper(world_sizes=[3, 4])
    html = f"<!DOCTYPE html><title>stepper</title>{steps.data}"  # a notebook, which has nothing of a page
    if is_page:
        piece = steps.on_page
        head = f"{render('head.html.j2')}<title>stepper</title><style>{style_sheet()}</style>"
        html = f"<!DOCTYPE html><html><head>{head}</head><body>{piece}<script>{script()}</script></body></html>"
    (tmp_path / "page.html").write_text(html)
    with opened_browser() as visit:
        page, _, errors = visit(tmp_path / "page.html", width=380)
        status, arrows = page.locator("[role=status]"), page.locator(".labkit-stepper .message")
        page.keyboard.press("Tab")
        page.keyboard.type("halv")
        page.keyboard.press("Tab")
        page.keyboard.press("4")
        page.keyboard.press("Tab")  # past a button that cannot go back
        assert "4 steps" in status.inner_text()
        for step in range(1, 5):
            page.keyboard.press("ArrowRight")
            assert f"Step {step} of 4" in status.inner_text()
            assert arrows.count() == 4
        assert "100% of the result" in status.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert errors == []
