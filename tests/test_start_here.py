"""The tour for newcomers: executed as they would, and right in what it says of the labs."""

import re
from unittest.mock import Mock

import nbformat
import pandas as pd
import pytest

from labkit.lab import contents
from labkit.lab.project import notebook_path, recorded_directory
from labkit.lab.runs.store import Run
from labkit.lab.units import format_seconds
from labkit.studies import LABS, load_lab


@pytest.fixture(scope="module")
def outputs(tour):
    """What each code cell left, by its first line."""
    cells = nbformat.read(tour, as_version=4).cells
    return {cell.source.splitlines()[0]: cell.outputs for cell in cells if cell.cell_type == "code"}


def _shown(outputs, kind):
    return [output.data[kind] for some in outputs.values() for output in some if kind in output.get("data", {})]


def test_the_tour_runs_from_any_directory_without_noise(outputs):
    assert {output.output_type for some in outputs.values() for output in some} <= {"display_data", "execute_result"}
    assert sum(html.count('<figure class="labkit-figure">') for html in _shown(outputs, "text/html")) == 2


def test_a_picture_is_stored_once_and_says_in_text_where_its_file_is(tour, outputs):
    assert _shown(outputs, "image/png") == []
    assert tour.read_text().count("data:image/png;base64,") == 2
    assert sum(".png" in text for text in _shown(outputs, "text/plain")) == 2


def test_a_function_of_the_reader_has_run_on_four_ranks(outputs):
    (table,) = [html for html in _shown(outputs, "text/html") if "average that each rank has" in html]
    assert table.count("[1.5, 1.5, 1.5]") == 4


def test_the_point_that_was_added_is_measured_alone(outputs):
    first, second = [html for html in _shown(outputs, "text/html") if re.search("points? planned", html)]
    assert re.search(r"(\d+) points planned, \1 measured", first)
    assert re.search(r"\b(\d+) points? planned, \1 measured", second)


def test_what_is_interrupted_in_the_last_cell_is_what_lab_resume_goes_on_with(tour):
    (source,) = [cell.source for cell in nbformat.read(tour, as_version=4).cells if "One size more" in cell.source]
    lab = Mock(measure=Mock(side_effect=KeyboardInterrupt))
    namespace = {"open_lab": lambda *_: lab, "load_lab": load_lab, "pd": pd, "frame": pd.DataFrame(), "more": None}
    with pytest.raises(KeyboardInterrupt):
        exec(source, namespace)
    assert namespace["more"] is lab


def test_the_table_has_every_lab_with_a_link_to_its_notebook(outputs):
    (table,) = _shown(outputs, "text/markdown")
    for lab in LABS:
        assert f"]({notebook_path(lab).name}) | {load_lab(lab).summary} |" in table


def test_a_lab_that_was_never_measured_here_gets_a_guess(monkeypatch, tmp_path):
    monkeypatch.setattr(contents, "runs_directory", lambda: tmp_path)
    assert contents.NOT_MEASURED_YET in contents.labs_table([load_lab("all_reduce")])


def test_the_time_of_a_lab_is_that_of_its_last_whole_run(monkeypatch, tmp_path):
    monkeypatch.setattr(contents, "runs_directory", lambda: tmp_path)
    recorded = min(recorded_directory().glob("all_reduce/*-quick.jsonl"))
    lines = recorded.read_text().splitlines(keepends=True)
    (tmp_path / "all_reduce").mkdir()
    for name, some in {"1-quick": lines, "2-quick": lines[:-1], "3-quick": ["no run\n"], "4-smoke": lines}.items():
        (tmp_path / "all_reduce" / f"{name}.jsonl").write_text("".join(some))
    took = format_seconds(Run.load(recorded).coverage()["elapsed_s"].sum())
    assert contents.labs_table([load_lab("all_reduce")]).endswith(f"| {took}, measured here |")
