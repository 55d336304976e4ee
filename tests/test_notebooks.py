"""Notebooks through the users' own path: `labkit report`, papermill's command line, a browser.

Every lab is executed once, at profile `smoke`; the tests look at what it left.
"""

import base64
import json
import re
import shutil
import sys
from functools import cache

import nbformat
import pytest
from papermill.inspection import _infer_parameters as infer_parameters
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from labkit.lab.config import ParameterError
from labkit.lab.notebook import open_lab
from labkit.lab.pages.execute import notebook_parameters
from labkit.lab.pages.record import read_notebook_record, write_index
from labkit.lab.parameters import COMMON_PARAMETERS
from labkit.lab.project import checkout, notebook_path, project_root
from labkit.studies import LABS, load_lab
from tests.browser import CONTRASTS, OVERLAPS, TOO_WIDE, barriers, fetch_axe, opened_browser
from tests.cases import thinned
from tests.commands import carry_out
from tests.lab.test_labs import check_headline

PAGES = thinned(["index", *LABS], lambda name: name in ("index", "all_reduce"))  # in a browser


@pytest.fixture(scope="module")
def report(smoke_report):
    """The folder of a report over all labs."""
    return smoke_report


@pytest.fixture
def unmeasured(tmp_path):
    """Carries out a command that begins no run, and says what it came to."""

    def outcome(command, folder):
        home = tmp_path / "home"
        result = carry_out([sys.executable, "-m", *command], folder, {"LABKIT_HOME": str(home)})
        assert not list(home.glob("data/runs/**/*.jsonl"))
        return result

    return outcome


@pytest.fixture
def drawn_elsewhere(unmeasured, report, tmp_path):
    """The run of another machine drawn here: what the command came to, and the pages' folder."""
    measured = project_root() / read_notebook_record(report / "notebooks" / "all_reduce.ipynb").run
    header, *rest = measured.read_text().splitlines(keepends=True)
    header = json.loads(header)
    header["machine"] |= {"host": "elsewhere", "cpu": "Some Other CPU"}
    run = tmp_path / "other.jsonl"
    run.write_text(json.dumps(header) + "\n" + "".join(rest))
    command = ["labkit", "report", "all_reduce", "--run", str(run), "--output", str(tmp_path / "pages")]
    return unmeasured(command, checkout()), tmp_path / "pages"


@pytest.fixture(scope="module")
def page_visit(report):
    """Opens a page of the report in a browser, once in each context; returns it, its requests and console errors."""
    with opened_browser() as visit:
        yield cache(lambda name, scheme="light", width=1280: visit(report / name, scheme, width))


@pytest.mark.parametrize("lab", LABS)
def test_a_parameters_cell_has_a_few_with_a_comment_and_a_place_for_all_others(lab):
    study, path = load_lab(lab), notebook_path(lab)
    profile, run, *own, config = notebook_parameters(path.read_text(), path.name)
    assert (profile, run, config) == COMMON_PARAMETERS
    assert len(own) <= 4
    assert set(own) <= set(type(study.profiles["quick"]).model_fields)
    shown = infer_parameters(load_notebook_node(str(path)))
    assert [parameter.name for parameter in shown] == [profile, run, *own, config]
    assert all(parameter.help for parameter in shown)


@pytest.mark.parametrize("lab", LABS)
def test_every_question_is_a_heading_above_the_cell_that_answers_it(lab):
    study, cells = load_lab(lab), nbformat.read(notebook_path(lab), as_version=4).cells
    for question in study.questions:
        heading = next(index for index, cell in enumerate(cells) if cell.source.startswith(f"## {question.text}"))
        following = [index for index, cell in enumerate(cells) if index > heading and cell.source.startswith("## ")]
        section = cells[heading : following[0] if following else None]
        assert any(f'lab.answer("{question.id}"' in cell.source for cell in section if cell.cell_type == "code")


@pytest.mark.parametrize("lab", LABS)
def test_every_question_is_answered_on_the_page(lab, report):
    record = read_notebook_record(report / "notebooks" / f"{lab}.ipynb")
    html = (report / f"{lab}.html").read_text()
    assert [answer.id for answer in record.answers] == [question.id for question in load_lab(lab).questions]
    for answer in record.answers:
        check_headline(answer.headline)
        assert f'id="answer-{answer.id}"' in html
    assert record.coverage.get("failed", 0) == 0


def test_the_index_is_made_of_records_alone_and_links_every_lab(report, tmp_path):
    for lab in LABS:
        shutil.copy(report / f"{lab}.json", tmp_path)
    index = write_index([load_lab(lab) for lab in LABS], tmp_path).read_text()
    end = "<summary>This machine</summary>"  # below it the source, which may have changed since
    assert index.split(end)[0] == (report / "index.html").read_text().split(end)[0]
    assert all(f'href="{lab}.html"' in index for lab in LABS)


def test_every_figure_has_its_numbers(report):
    for lab in LABS:
        html = (report / f"{lab}.html").read_text()
        figures = html.count('<figure class="labkit-figure">')
        links = re.findall(r'<a download="[\w.-]+\.csv" href="data:text/csv;base64,([^"]*)">', html.replace("\n", " "))
        assert len(links) + html.count(".csv under figures/") == figures
        assert all(b"," in base64.b64decode(link) for link in links)


@pytest.mark.parametrize("lab", LABS)
def test_a_page_has_landmarks_contents_and_where_its_numbers_come_from(lab, report):
    html = (report / f"{lab}.html").read_text()
    for element in ("<header>", 'aria-label="Contents"', '<main id="main">', "<footer>"):
        assert html.count(element) == 1
    assert "$\\" not in html  # no formula is left as TeX
    anchors = re.findall(r'href="#([^"]+)"', html)
    assert {anchor for anchor in anchors if f'id="{anchor}"' not in html} == set()
    assert f"labkit report {lab} --profile smoke" in html[html.index("<footer>") :]


def test_tables_are_sorted_by_a_click_and_by_the_keyboard(page_visit):
    page, _, errors = page_visit("all_reduce.html", width=1000)  # its own: it is changed
    numbers = page.locator("details.labkit-numbers", has=page.locator("thead th:nth-child(3)")).first
    numbers.locator("summary").press("Enter")
    table = numbers.locator("table.labkit-table")
    heading = table.locator("thead button").nth(2)
    for key in ("ascending", "descending"):
        heading.press("Enter")
        assert table.locator(f"th[aria-sort={key}]").count() == 1
        values = [float(cell.get_attribute("data-sort")) for cell in table.locator("tbody td:nth-child(3)").all()]
        assert values == sorted(values, reverse=key == "descending")
    assert errors == []


@pytest.mark.parametrize("lab", LABS)
def test_the_executed_notebook_has_no_error_and_no_noise(lab, report):
    notebook = nbformat.read(report / "notebooks" / f"{lab}.ipynb", as_version=4)
    kinds = {output.output_type for cell in notebook.cells for output in cell.get("outputs", [])}
    assert "error" not in kinds
    assert "stream" not in kinds


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_offline_stands_out_from_its_background_and_names_its_images(name, scheme, report, page_visit):
    page, requests, errors = page_visit(f"{name}.html", scheme)
    assert [url for url in requests if not url.startswith("data:")] == [(report / f"{name}.html").as_uri()]
    assert errors == []
    assert page.title()
    assert page.evaluate(CONTRASTS) == []
    texts = page.evaluate("[...document.images].map(image => image.alt)")
    texts += page.evaluate("[...document.querySelectorAll('.labkit-plot')].map(plot => plot.ariaLabel)")
    assert texts or name == "index"  # which draws with elements of its own
    assert all(texts)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_narrow_screen_and_a_small_laptop_cuts_no_table_and_no_text_lies_on_another(name, page_visit):
    page, _, _ = page_visit(f"{name}.html", width=380)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page, _, _ = page_visit(f"{name}.html", width=1200)
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(OVERLAPS) == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return fetch_axe(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 380)])
def test_a_page_has_no_serious_barrier(name, scheme, width, axe, page_visit):
    page, _, _ = page_visit(f"{name}.html", scheme, width)
    assert barriers(page, axe) == []


def test_figures_say_their_values_on_hover_and_the_steps_of_an_all_reduce_go_by_key(page_visit):
    page, _, errors = page_visit("all_reduce.html", width=1100)  # its own: it is changed
    plot = page.locator(".labkit-plot").first
    plot.press("ArrowRight")
    told = plot.locator(".labkit-tip").inner_text()
    assert " · " in told
    page.keyboard.press("Escape")
    assert plot.locator(".labkit-tip").inner_text() == ""
    left, top, *_ = json.loads(plot.get_attribute("data-places"))[0]
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * left / 100, "y": box["height"] * top / 100})
    assert plot.locator(".labkit-tip").inner_text() == told
    page.locator(".labkit-stepper input").press("ArrowRight")
    assert "Step 1 of 6" in page.locator(".labkit-stepper [role=status]").inner_text()
    assert not page.locator(".code").first.is_visible()
    page.locator("#show-code").check()
    assert page.locator(".code").first.is_visible()
    assert errors == []


def test_a_run_of_another_machine_is_drawn_without_measuring_and_labeled(report, drawn_elsewhere):
    result, folder = drawn_elsewhere
    assert result.returncode == 0, result.stderr
    drawn, first = (read_notebook_record(pages / "notebooks" / "all_reduce.ipynb") for pages in (folder, report))
    assert drawn.answers == first.answers
    assert "Some Other CPU (a recorded run, not measured here)" in (folder / "all_reduce.html").read_text()
    index = (folder / "index.html").read_text()
    assert "measured elsewhere" in index
    assert "No record of this machine recommends anything" in index
    assert 'id="largest"' not in index


@pytest.mark.slow  # the tour, which is carried out by papermill, too, is quick
def test_papermill_works_from_any_directory(notebook_by_papermill):
    assert read_notebook_record(notebook_by_papermill).profile == "smoke"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"wrold_sizes": [2]}, ["unknown parameter 'wrold_sizes'", "did you mean 'world_sizes'"]),
        ({"world_sizes": "[2,4]"}, ["parameter 'world_sizes'", "valid list", "'[2,4]'"]),
        ({"sizes_bytes": [-1]}, ["parameter 'sizes_bytes'", "multiple of 8"]),
        ({"sizes_bytes": [4098]}, ["parameter 'sizes_bytes'", "multiple of 8"]),
        ({"world_sizes": [1000]}, ["parameter 'world_sizes'", "1000"]),
    ],
)
def test_the_cell_that_papermill_adds_is_checked_when_the_lab_is_opened(wrong, words):
    notebook = load_notebook_node(str(notebook_path("all_reduce")))
    cells = parameterize_notebook(notebook, {"profile": "smoke"} | wrong, kernel_name="python3").cells
    sources = [c.source for c in cells if {"parameters", "injected-parameters"} & set(c.metadata.get("tags", []))]
    assert len(sources) == 2
    namespace = {"In": sources}
    for source in sources:
        exec(source, namespace)
    with pytest.raises(ParameterError) as error:
        open_lab(load_lab("all_reduce"), namespace)
    for word in words:
        assert word in str(error.value)


def test_a_failed_lab_is_named_its_page_shows_the_failure_and_the_others_still_run(broken_report):
    """The run to draw is damaged, which only the notebook finds out."""
    result, folder = broken_report
    assert result.returncode == 1
    assert "all_reduce: failed" in result.stdout
    assert "damaged header" in (folder / "all_reduce.html").read_text()
    assert "damaged header" in (folder / "index.html").read_text()
    assert not list((folder / "notebooks").glob("*.running*"))
