"""The tour for newcomers: executed as they would, and right in what it says of the labs."""

import re
import sys
from unittest.mock import Mock

import nbformat
import pandas as pd
import pytest

from labkit.lab.project import notebook_path, notebooks_directory
from labkit.studies import LABS, load_lab
from tests.commands import carry_out

TOUR = notebooks_directory() / "00_start_here.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each code cell left, by its first line; carried out by papermill in another folder."""
    folder = tmp_path_factory.mktemp("tour")
    command = [sys.executable, "-m", "papermill", str(TOUR), "tour.ipynb", "-p", "repeats", "6"]
    outcome = carry_out(command, folder)
    assert outcome.returncode == 0, outcome.stderr
    cells = nbformat.read(folder / "tour.ipynb", as_version=4).cells
    return {cell.source.splitlines()[0]: cell.outputs for cell in cells if cell.cell_type == "code"}


def _shown(outputs, kind):
    return [output.data[kind] for some in outputs.values() for output in some if kind in output.get("data", {})]


def test_the_tour_runs_from_any_directory_without_noise(outputs):
    assert {output.output_type for some in outputs.values() for output in some} <= {"display_data", "execute_result"}
    assert sum(html.count("data:image/svg+xml;base64,") for html in _shown(outputs, "text/html")) == 2


def test_a_function_of_the_reader_has_run_on_four_ranks(outputs):
    (table,) = [html for html in _shown(outputs, "text/html") if "average that each rank has" in html]
    assert table.count("[1.5, 1.5, 1.5]") == 4


def test_the_point_that_was_added_is_measured_alone(outputs):
    first, second = [html for html in _shown(outputs, "text/html") if re.search("points? planned", html)]
    assert re.search(r"(\d+) points planned, \1 measured", first)
    assert re.search(r"\b(\d+) points? planned, \1 measured", second)


def test_what_is_interrupted_in_the_last_cell_is_what_lab_resume_goes_on_with():
    (source,) = [cell.source for cell in nbformat.read(TOUR, as_version=4).cells if "One size more" in cell.source]
    lab = Mock(measure=Mock(side_effect=KeyboardInterrupt))
    namespace = {"open_lab": lambda *_: lab, "load_lab": load_lab, "pd": pd, "frame": pd.DataFrame(), "more": None}
    with pytest.raises(KeyboardInterrupt):
        exec(source, namespace)
    assert namespace["more"] is lab


def test_the_table_has_every_lab_with_a_link_to_its_notebook(outputs):
    (table,) = _shown(outputs, "text/markdown")
    for lab in LABS:
        assert f"]({notebook_path(lab).name}) | {load_lab(lab).summary} |" in table
