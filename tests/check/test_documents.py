"""The JSON of commands is as `docs/for-scripts.md` says."""

import json
import re

import pytest
from jsonschema import validate
from typer.testing import CliRunner

from labkit.__main__ import app
from labkit.lab.commands.console import answer_numbers, document
from labkit.lab.project import PACKAGE, recorded_directory
from labkit.lab.runs.store import Run
from labkit.studies import load_lab
from tests.scaling.test_files import PLAIN

DOCS = (PACKAGE.parent / "docs" / "for-scripts.md").read_text()
EXAMPLE, SCHEMA = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCS, re.DOTALL))
RUN = max((recorded_directory() / "sync_batchnorm").glob("*.jsonl"))


def test_the_example_and_the_numbers_of_a_run_are_of_the_schema():
    validate(EXAMPLE, SCHEMA)
    run = Run.load(RUN)
    numbers = list(answer_numbers(load_lab(run.header.lab), run))
    assert any("over all" in one["name"] and one["low"] < one["high"] for one in numbers)
    validate(json.loads(json.dumps(document("measure", numbers))), SCHEMA)


@pytest.mark.parametrize(
    ("command", "arguments", "has_numbers"),
    [
        ("doctor", [], False),
        ("list", [], False),
        ("compare", [str(RUN), "later.jsonl"], True),
        ("advise", ["--model", "llama-3-8b", "--gpus", "64", "--gpu", "h100"], True),
        ("predict", ["rows.csv"], True),
    ],
)
def test_a_command_prints_one_document_of_the_schema(
    command, arguments, has_numbers, home, monkeypatch
):
    monkeypatch.chdir(home)
    (home / "later.jsonl").write_text(
        RUN.read_text().replace('"started":"2026', '"started":"2027', 1)
    )
    (home / "rows.csv").write_text(PLAIN)
    result = CliRunner().invoke(app, [command, *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    validate(printed, SCHEMA)
    assert printed["command"] == command
    assert bool(printed["numbers"]) == has_numbers
