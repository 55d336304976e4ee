"""The stepper: recorded messages, gone through by keyboard, on a page and in a notebook."""

import json
import re

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


def test_it_is_used_by_keyboard_alone(tmp_path):
    steps = stepper(world_sizes=[3, 4])
    title, head = "<title>stepper</title>", f"{render('head.html.j2')}<style>{style_sheet()}</style>"
    notebook = f"<!DOCTYPE html>{title}{steps.data}"  # which has nothing of a page
    body = f"{steps.on_page}<script>{script()}</script>"
    with opened_browser() as visit:
        for html in (f"<!DOCTYPE html><html><head>{head}{title}</head><body>{body}</body></html>", notebook):
            (tmp_path / "page.html").write_text(html)
            _go_through(*visit(tmp_path / "page.html", width=380))


def _go_through(page, _, errors):
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
