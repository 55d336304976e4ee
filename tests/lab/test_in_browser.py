"""In a browser: the stepper by keyboard, tables that are printed, the page that compares many
machines."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from labkit.lab.compare import compare_runs, write_comparison
from labkit.lab.pages import cards
from labkit.lab.pages.cards import stepper
from labkit.lab.pages.html import render, script, style_sheet
from labkit.lab.pages.schedule import record_schedule
from labkit.parallel.collectives import ALGORITHMS
from tests.browser import CONTRASTS
from tests.lab.test_comparison import SIZES, load_lab, run_file
from tests.lab.test_index import write_page


def test_every_algorithm_and_a_readers_own_are_recorded_for_every_number_of_ranks(monkeypatch):
    recorded = record_schedule(ALGORITHMS["ring"], 2)
    monkeypatch.setattr(cards, "record_user_schedule", lambda *_: recorded)
    page = stepper(print, world_sizes=[2, 3]).on_page
    schedules = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert list(schedules) == ["your print", *ALGORITHMS]
    assert {*schedules["ring"]} == {"2", "3"}
    assert schedules["your print"]["2"] == schedules["ring"]["2"]
    assert len(schedules["ring"]["3"]["messages"]) == 12


@pytest.mark.slow
def test_the_stepper_is_used_by_keyboard_alone(tmp_path, visit):
    steps = stepper(world_sizes=[3, 4])
    title = "<title>stepper</title>"
    head = f"{render('head.html.j2')}<style>{style_sheet()}</style>"
    notebook = f"<!DOCTYPE html>{title}{steps.data}"  # which has nothing of a page
    body = f"{steps.on_page}<script>{script()}</script>"
    for html in (
        f"<!DOCTYPE html><html><head>{head}{title}</head><body>{body}</body></html>",
        notebook,
    ):
        (tmp_path / "page.html").write_text(html)
        _go_through(*visit(tmp_path / "page.html", width=380))


def _go_through(page, _, errors):
    status = page.locator("[role=status]")
    arrows = page.locator(".labkit-stepper .message")
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


# Those of a figure's lines and ground, and of each word of code.
COLORS = """() => [
  ...["--labkit-0", "--labkit-page"].map((name) =>
    getComputedStyle(document.documentElement).getPropertyValue(name)),
  ...[...document.querySelectorAll(".highlight span")].map((each) => getComputedStyle(each).color),
]"""

UNCUT = """() => [...document.querySelectorAll(".labkit-scroll")].map((box) =>
  [box.checkVisibility(), box.scrollHeight - box.clientHeight <= 1,
    box.scrollWidth - box.clientWidth <= 1])"""


def test_folded_tables_are_printed_whole_however_long_and_wide_they_are(tmp_path, visit):
    frame = pd.DataFrame(
        {f"name of column {at}": [f"value {at} {row}" for row in range(60)] for at in range(14)}
    )
    page_file = write_page(tmp_path, piece=cards.table(frame))
    page, _, _ = visit(page_file, width=794)  # a sheet of A4
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(UNCUT) == [[True, True, True]]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator("details.labkit-numbers").get_attribute("data-printing")
    assert page.locator("details[open]").count() == 0


@pytest.mark.slow
def test_a_page_that_is_dark_on_the_screen_is_printed_in_the_colors_of_a_light_one(tmp_path, visit):
    page_file = write_page(tmp_path, piece=cards.render_source(ALGORITHMS["ring"]))
    pages = [visit(page_file, scheme)[0] for scheme in ("light", "dark")]
    colors = []
    for page in pages:
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(CONTRASTS) == []
        assert not any(link.is_visible() for link in page.locator("header nav").all())
        colors.append(page.evaluate(COLORS))
    assert colors[0] == colors[1]


def test_the_page_of_many_machines_opens_offline_fits_a_narrow_screen_and_runs_its_own_script_alone(
    tmp_path, visit
):
    cpus = [f"CPU {number}" for number in range(12)]
    runs = [
        run_file(
            tmp_path / lab / f"{cpu}.jsonl",
            lab=lab,
            cpu=cpu,
            ring=0.5 + at / 10,
            seed=at,
            sizes=SIZES[:2],
        )
        for lab, machines in (("one", cpus), ("two", cpus[:2]))
        for at, cpu in enumerate(machines)
    ]
    page_file = Path(tmp_path / "compare.html")
    foreign = "<script>document.title = 'run'</script>"
    lines = write_comparison(compare_runs(runs, load_lab), "labkit compare", page_file, {})
    assert len(lines) == 11 + 1
    page_file.write_text(page_file.read_text().replace("<h1>", f"{foreign}<h1>"))
    page, requests, _ = visit(page_file, width=380)
    assert page.title() == "labkit compare"
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRASTS) == []
    page.locator("table.labkit-table thead button").first.click()  # made by the page's script
    assert page.locator("th[aria-sort=ascending]").count() == 1
    assert [url for url in requests if not url.startswith("data:")] == [page_file.as_uri()]
