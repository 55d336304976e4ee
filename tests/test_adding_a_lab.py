"""The documentation's four steps to a new lab, followed to the letter in a copy of the project."""

import re
import shutil
import sys
import textwrap

import nbformat
import pytest

from labkit.lab.pages.record import PageRecord
from labkit.lab.project import checkout, notebook_path
from labkit.lab.runs.store import Run
from tests.commands import carry_out, mounted

COPIED = (
    "labkit",
    "notebooks",
    "tests",
    "data/reference",
    "data/recorded",
    "pyproject.toml",
    "environment.yml",
)


def _steps():
    """The path that each step names first, and its block of code ("" if it has none)."""
    page = (checkout() / "docs" / "adding-a-lab.md").read_text()
    steps = re.split(r"^\d\. ", page, flags=re.M)[1:]
    found = {}
    for step in steps:
        (code,) = re.findall(r"```python\n(.*?)```", step, re.S) or [""]
        found[re.findall(r"`(.+?)`", step)[0]] = textwrap.dedent(code)
    return found


def _notebook(code):
    cells = []
    for cell in re.split(r"^# %%", f"\n{code}", flags=re.M):
        if cell.startswith(" [markdown]"):
            text = re.sub(r"^# ", "", cell.removeprefix(" [markdown]\n"), flags=re.M).strip()
            cells.append(nbformat.v4.new_markdown_cell(text))
        else:
            cells.append(nbformat.v4.new_code_cell(cell.strip()))
    cells[0].metadata["tags"] = ["parameters"]
    made_by_jupyterlab = nbformat.read(notebook_path("all_reduce"), as_version=4).metadata
    return nbformat.v4.new_notebook(cells=cells, metadata=made_by_jupyterlab)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the new lab in it."""
    copy = tmp_path_factory.mktemp("project")
    for name in COPIED:
        source = checkout() / name
        target = copy / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            # compiled as it is
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        else:
            shutil.copy(source, target)
    steps = _steps()
    assert len(steps) == 4
    for name, code in steps.items():
        path = copy / name
        if name.endswith(".ipynb"):
            nbformat.write(_notebook(code), path)
        elif code:
            path.parent.mkdir(exist_ok=True)
            path.write_text(code)
        else:
            path.write_text(
                path.read_text().replace(
                    "\n)\n\n\ndef load_lab", '\n    "sorting",\n)\n\n\ndef load_lab'
                )
            )
    return copy


@pytest.fixture(scope="module")
def outcome(project):
    """Carries out a program in the copy, with a HOME that takes no files."""
    home = project / "read only"
    home.mkdir()
    prefix = [*mounted(f"mount -t tmpfs -o ro none '{home}'"), sys.executable, "-m"]
    variables = {"PYTHONPATH": str(project), "LABKIT_HOME": "", "HOME": str(home)}
    return lambda *arguments: carry_out([*prefix, *arguments], project, variables)


def test_the_new_lab_has_a_page_with_its_answer_whatever_becomes_of_another(project, outcome):
    broken = project / "notebooks" / notebook_path("precision").name
    broken.write_text(
        broken.read_text().replace("lab.machine_card()", "raise ValueError('rehearsed')")
    )
    result = outcome("labkit", "report", "precision", "sorting", "--profile", "smoke")
    assert (result.returncode, "precision: failed" in result.stdout) == (1, True), (
        result.stdout + result.stderr
    )
    assert "Traceback" not in result.stderr  # of what saves its history at the end
    assert all(
        "ValueError: rehearsed" in (project / "reports" / f"{name}.html").read_text()
        for name in ("precision", "index")
    )
    assert not list((project / "reports" / "notebooks").glob("*.running*"))
    record = PageRecord.model_validate_json((project / "reports" / "sorting.json").read_bytes())
    assert Run.load(project / record.run).coverage()["status"].tolist() == ["ok"]
    assert 'id="answer-faster"' in (project / "reports" / "sorting.html").read_text()
    assert "sorting.html" in (project / "reports" / "index.html").read_text()


@pytest.mark.slow
def test_the_new_lab_passes_the_tests_that_every_lab_must(outcome):
    files = ["tests/test_layout.py", "tests/test_notebooks.py", "tests/lab/test_labs.py"]
    selected = "sorting and (layout or rows or profile or questions or parameters or heading)"
    result = outcome("pytest", "-k", selected, "-p", "no:cacheprovider", "-q", *files)
    assert result.returncode == 0, result.stdout
    assert "skipped" not in result.stdout
    (passed,) = re.findall(r"(\d+) passed", result.stdout)
    assert int(passed) >= 6


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_the_new_code_is_in_the_style_of_the_rest(command, project):
    written = [name for name, code in _steps().items() if code]
    result = carry_out([sys.executable, "-m", "ruff", *command, *written], project)
    assert result.returncode == 0, result.stdout
