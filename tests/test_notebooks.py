"""Notebooks through the users' own path: `labkit report`, papermill's command line, a browser.

Every lab is executed once, at profile `smoke`; in `make test` one is, and another draws its
recorded run. The tests look at what that left. `tests/pages/test_tries.py` runs the cells of
all labs, and tests/studies their workers.
"""

import base64
import json
import os
import re
import shutil
import signal
import sys
from contextlib import closing, suppress
from html import unescape
from pathlib import Path
from threading import Event, Thread
from unittest.mock import Mock

import nbformat
import papermill
import pytest
from papermill.clientwrap import PapermillNotebookClient
from papermill.inspection import _infer_parameters as infer_parameters
from papermill.iorw import load_notebook_node

from labkit.lab.pages.execute import ENGINE, Kernel, execute_notebook
from labkit.lab.pages.html import mark_code
from labkit.lab.pages.index import write_index
from labkit.lab.pages.record import PageRecord
from labkit.lab.pages.report import LabResult, plan_report, report_lab
from labkit.lab.parameters import COMMON_PARAMETERS, notebook_parameters
from labkit.lab.project import notebook_path, notebooks_directory, recorded_directory, shipped
from labkit.lab.runs.store import Run, RunFileError
from labkit.lab.wording import headline, statement
from labkit.studies import LABS, load_lab
from tests.browser import CONTRASTS, OVERLAPS, TOO_WIDE, barriers, fetch_axe
from tests.cases import thinned
from tests.commands import carry_out
from tests.conftest import SERVER
from tests.fork_server import share_with_kernels
from tests.lab.test_labs import check_headline

TOUR = notebooks_directory() / "00_start_here.ipynb"
# Labs that `make test` measures, or draws.
MEASURED = ("all_reduce",)
DRAWN = ("memory",)
# All but the tuned step, which has a table.
WITH_FIGURES = [lab for lab in LABS if any(question.figure for question in load_lab(lab).questions)]
PAGES = thinned(["index", *LABS], lambda name: name == "all_reduce")  # in a browser
QUICK_VIEWS = [("all_reduce", "dark", 380)]
VIEWS = [(name, *view) for name in ("index", *LABS) for view in (("light", 1280), ("dark", 380))]


@pytest.fixture(scope="module")
def kernel():
    """Executes notebooks of this file, with ranks of the fork server that the processes of the
    tests share; its home is that of the first notebook."""
    with pytest.MonkeyPatch.context() as patch:
        share_with_kernels(SERVER, patch)
        kernel = Kernel([load_lab(lab) for lab in (*MEASURED, *DRAWN)])
        yield kernel
        kernel.close()


@pytest.mark.filterwarnings("error")
def test_a_kernel_needs_no_home_directory_that_can_be_written(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    execute = Mock()
    monkeypatch.setattr(PapermillNotebookClient, "execute", execute)
    notebook = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]))
    with closing(Kernel()) as kernel:
        assert kernel.manager.kernel_spec.argv
        execute_notebook(notebook, tmp_path / "a.ipynb", {}, kernel)
        folder = Path(execute.call_args.kwargs["env"]["IPYTHONDIR"])
        assert folder.is_dir()
    assert not folder.exists()


@pytest.fixture(scope="module")
def report(request, tmp_path_factory, kernel):
    """The folder of the pages of all labs and of the tour: by commands, or in `make test` for
    less."""
    pages = tmp_path_factory.mktemp("smoke") / "pages"
    if "not slow" in request.config.option.markexpr:
        with pytest.MonkeyPatch.context() as patch:
            _report_in_one_kernel(pages, patch, kernel)
        return pages
    program = ["labkit", "report", "--profile", "smoke", "--output"]
    tour = pages / "notebooks" / TOUR.name
    for command in (
        [*program, str(pages)],
        ["papermill", str(TOUR), str(tour), "-p", "repeats", "6"],
    ):
        outcome = carry_out(
            [sys.executable, "-m", *command], pages.parent, {"LABKIT_HOME": str(pages / "home")}
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return pages


def _report_in_one_kernel(pages, patch, kernel):
    """With half of the rounds of `smoke`."""
    pages.mkdir()
    patch.chdir(pages)
    patch.setenv("LABKIT_HOME", str(pages / "home"))
    for study in map(load_lab, (*MEASURED, *DRAWN)):
        (recorded,) = (recorded_directory() / study.name).glob("*.jsonl")
        fewer = {"repeats": 3} if "repeats" in type(study.profiles["smoke"]).model_fields else {}
        parameters = (
            {"profile": "smoke", **fewer} if study.name in MEASURED else {"run": recorded.stem}
        )
        (page,) = plan_report([study], parameters, pages)
        assert report_lab(page, pages, kernel).error is None
    tour = pages / "notebooks" / TOUR.name
    options = {
        "kernel": kernel,
        "on_progress": lambda _: None,
        "target": tour,
        "progress_bar": False,
    }
    papermill.execute_notebook(
        TOUR, tour, {"repeats": 3}, engine_name=ENGINE, kernel_name="python3", **options
    )
    write_index(map(load_lab, LABS), pages)


@pytest.fixture(scope="module")
def tour(report):
    """What each code cell of the tour left, by its first line."""
    executed = report / "notebooks" / TOUR.name
    cells = nbformat.read(executed, as_version=4).cells
    return {cell.source.splitlines()[0]: cell.outputs for cell in cells if cell.cell_type == "code"}


@pytest.mark.parametrize("lab", LABS)
def test_a_parameters_cell_has_a_few_with_a_comment_and_a_place_for_all_others(lab):
    study = load_lab(lab)
    path = notebook_path(lab)
    profile, run, *own, config = notebook_parameters(path.read_text(), path.name)
    assert (profile, run, config) == COMMON_PARAMETERS
    assert len(own) <= 4
    assert set(own) <= set(type(study.profiles["quick"]).model_fields)
    shown = infer_parameters(load_notebook_node(str(path)))
    assert [parameter.name for parameter in shown] == [profile, run, *own, config]
    assert all(parameter.help for parameter in shown)


@pytest.mark.parametrize("lab", LABS)
def test_every_question_is_a_heading_above_the_cell_that_answers_it(lab):
    study = load_lab(lab)
    cells = nbformat.read(notebook_path(lab), as_version=4).cells
    for question in study.questions:
        heading = next(
            index
            for index, cell in enumerate(cells)
            if cell.source.startswith(f"## {question.text}")
        )
        following = [
            index
            for index, cell in enumerate(cells)
            if index > heading and cell.source.startswith("## ")
        ]
        section = cells[heading : following[0] if following else None]
        assert any(
            f'lab.answer("{question.id}"' in cell.source
            for cell in section
            if cell.cell_type == "code"
        )


def run_of(lab, report):
    """The run of a page; its path is relative to the report's home, or to what comes with
    labkit."""
    record = PageRecord.model_validate_json((report / f"{lab}.json").read_bytes())
    paths = [root / record.run for root in (report / "home", shipped())]
    return Run.load(next(path for path in paths if path.is_file()))


@pytest.mark.parametrize("lab", thinned(LABS, lambda lab: lab in MEASURED + DRAWN))
def test_a_page_has_every_answer_and_where_its_numbers_come_from_without_noise(lab, report):
    executed = report / "notebooks" / f"{lab}.ipynb"
    run = run_of(lab, report)
    html = (report / f"{lab}.html").read_text()
    assert "failed" not in set(run.coverage()["status"])
    for name, answer in load_lab(lab).answers(run.results()).items():
        check_headline(headline(answer))
        assert f'id="answer-{name}"' in html
    links = re.findall(
        r'<a download="[\w.-]+\.csv" href="data:text/csv;base64,([^"]*)">', html.replace("\n", " ")
    )
    figures = html.count('<figure class="labkit-figure">')
    assert len(links) + html.count(".csv under figures/") == figures
    assert all(b"," in base64.b64decode(link) for link in links)
    for element in ("<header>", 'aria-label="Contents"', '<main id="main">', "<footer>"):
        assert html.count(element) == 1
    assert "$\\" not in html  # no formula is left as TeX
    anchors = re.findall(r'href="#([^"]+)"', html)
    assert {anchor for anchor in anchors if f'id="{anchor}"' not in html} == set()
    assert f"labkit report {lab} --profile {run.header.profile}" in html[html.index("<footer>") :]
    cells = nbformat.read(executed, as_version=4).cells
    kinds = {output.output_type for cell in cells for output in cell.get("outputs", [])}
    assert not {"error", "stream"} & kinds


def test_the_index_is_made_of_runs_and_links_every_lab(report, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(report / "home"))
    records = list(report.glob("*.json"))
    for record in records:
        shutil.copy(record, tmp_path)
    index = write_index([load_lab(lab) for lab in LABS], tmp_path).read_text()
    end = "<summary>This machine</summary>"  # below it the source, which may have changed since
    assert index.split(end)[0] == (report / "index.html").read_text().split(end)[0]
    assert all(f'href="{record.stem}.html"' in index for record in records)


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return fetch_axe(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_offline_stands_out_from_its_background_names_its_images_and_fits(
    name, report, visit
):
    """A narrow screen needs no scrolling, and a small laptop cuts no table and lays no text on
    another."""
    page, requests, errors = visit(report / f"{name}.html")
    assert page.title()
    texts = page.evaluate("[...document.images].map(image => image.alt)")
    texts += page.evaluate(
        "[...document.querySelectorAll('.labkit-plot')].map(plot => plot.ariaLabel)"
    )
    assert texts or name not in WITH_FIGURES
    assert all(texts)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRASTS) == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    page.set_viewport_size({"width": 1200, "height": 800})
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(OVERLAPS) == []
    assert [url for url in requests if not url.startswith("data:")] == [
        (report / f"{name}.html").as_uri()
    ]
    assert errors == []


@pytest.mark.parametrize(
    ("name", "scheme", "width"), thinned(VIEWS, lambda *view: view in QUICK_VIEWS)
)
def test_a_page_has_no_serious_barrier(name, scheme, width, axe, report, visit):
    page, _, _ = visit(report / f"{name}.html", scheme, width)
    assert barriers(page, axe) == []


def test_tables_are_sorted_figures_say_their_values_and_the_steps_of_an_all_reduce_go_by_key(
    report, visit
):
    page, _, errors = visit(report / "all_reduce.html", width=1000)
    numbers = page.locator(
        "details.labkit-numbers", has=page.locator("thead th:nth-child(3)")
    ).first
    numbers.locator("summary").press("Enter")
    table = numbers.locator("table.labkit-table")
    heading = table.locator("thead button").nth(2)
    for key in ("ascending", "descending"):
        heading.press("Enter")
        assert table.locator(f"th[aria-sort={key}]").count() == 1
        values = [
            float(cell.get_attribute("data-sort"))
            for cell in table.locator("tbody td:nth-child(3)").all()
        ]
        assert values == sorted(values, reverse=key == "descending")
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


def test_a_drawn_page_has_the_answers_of_its_run(report):
    run = run_of("memory", report)
    html = unescape((report / "memory.html").read_text().replace("\N{NO-BREAK SPACE}", " "))
    for answer in load_lab("memory").answers(run.results()).values():
        assert unescape(mark_code(statement(answer))) in html


def _begun(folder):
    """The run in the folder, once a point of it has ended and before the last has."""
    for path in folder.glob("data/runs/*/*.jsonl"):
        with suppress(RunFileError, FileNotFoundError):
            run = Run.load(path)
            if 0 < len(run.pending) < len(run.header.planned):
                return run
    return None


@pytest.mark.slow
def test_a_report_that_is_interrupted_names_its_run_and_goes_on_with_it(
    command, report, kernel, monkeypatch
):
    home = report / "home"
    monkeypatch.setenv("LABKIT_HOME", str(home))
    monkeypatch.setattr("labkit.lab.pages.execute.Kernel", lambda studies: kernel)
    begun = []
    has_ended = Event()

    def interrupt():
        while not (begun or has_ended.wait(0.02)):
            if (run := _begun(home)) is not None:
                begun.append(run)
                os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt).start()
    try:
        fewest = ("world_sizes=[2]", "algorithms=['ring']", "transports=[]", "scheduling_bytes=[]")
        settings = (*fewest, "sizes_bytes=[64, 128]", "repeats=300")
        options = [part for text in settings for part in ("--set", text)]
        status, *said = command("report", "all_reduce", "--profile", "smoke", *options)
    finally:
        has_ended.set()
    (run,) = begun
    assert (status, "Traceback" in "".join(said)) == (130, False)
    assert f"`labkit measure all_reduce --resume {run.name}`" in "".join("".join(said).split("\n"))

    drawn = []

    def draw(page, *_):
        drawn.append(page.parameters)
        return LabResult(page.study, home, 0, None)

    monkeypatch.setattr("labkit.lab.pages.report.report_lab", draw)
    assert command("measure", "all_reduce", "--resume", run.name)[0] == 0
    assert command("report", "--run", run.name)[0] == 0  # whose lab the run knows
    assert drawn == [{"run": run.name}]
    assert Run.load(run.path).coverage()["status"].unique().tolist() == ["ok"]


# The tour for newcomers


def _shown(tour, kind):
    return [
        output.data[kind]
        for outputs in tour.values()
        for output in outputs
        if kind in output.get("data", {})
    ]


def test_the_tour_runs_without_noise_on_ranks_and_measures_alone_the_point_that_is_added(tour):
    assert {output.output_type for outputs in tour.values() for output in outputs} <= {
        "display_data",
        "execute_result",
    }
    pieces = _shown(tour, "text/html")
    assert sum(html.count("data:image/svg+xml;base64,") for html in pieces) == 2
    (table,) = [html for html in pieces if "average that each rank has" in html]
    assert table.count("[1.5, 1.5, 1.5]") == 4
    first, second = [html for html in pieces if re.search("points? planned", html)]
    assert re.search(r"(\d+) points planned, \1 measured", first)
    assert re.search(r"\b(\d+) points? planned, \1 measured", second)


def test_what_is_interrupted_in_the_last_cell_is_what_lab_resume_goes_on_with():
    assert '"more = lab.but(' in TOUR.read_text()


def test_the_table_has_every_lab_with_a_link_to_its_notebook(tour):
    (table,) = _shown(tour, "text/markdown")
    for lab in LABS:
        assert f"]({notebook_path(lab).name}) | {load_lab(lab).summary} |" in table
