"""The architecture, read off the source: imports run one way, files stay short, dependencies are named once."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "labkit").rglob("*.py"))
WORKERS = sorted((ROOT / "labkit" / "studies").glob("*/worker.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOUR = ROOT / "notebooks" / "00_start_here.ipynb"  # a function of the reader's own is what it shows

# Which parts of labkit a part may import. `lab.point` and `lab.units` are plain data, open to all studies' workers.
ALLOWED = {
    "__main__": {"studies", "lab", "scaling", "machine"},
    "studies": {"studies", "lab", "nn", "parallel", "bench", "costs", "machine"},
    "lab": {"lab", "nn", "parallel", "bench", "costs", "machine"},
    "nn": {"nn", "machine", "costs"},
    "parallel": {"parallel", "machine", "memory_limits", "costs"},
    "scaling": {"scaling", "costs"},
    "bench": {"bench"},
    "costs": {"costs"},
    "machine": {"memory_limits"},
    "memory_limits": set(),
    "__init__": set(),
}


def _imports(path):
    """Modules of labkit that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("labkit"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(path):
    return path.relative_to(ROOT / "labkit").with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    for name in _imports(path):
        target = name.split(".")[1] if "." in name else "__init__"
        assert target in ALLOWED[_part(path)], f"{_part(path)} must not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_studies_never_import_one_another(path):
    if _part(path) != "studies" or path.parent.name == "studies":
        return
    others = [name for name in _imports(path) if name.startswith("labkit.studies.")]
    assert all(name.split(".")[2] == path.parent.name for name in others)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are_for(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 320
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "the first lines say what a file is for"


def test_importing_labkit_is_cheap():
    code = "import labkit, sys; print(sorted({'torch', 'pandas', 'pydantic'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# A rank is forked from a process that has imported torch, and imports its worker there.
IMPORT_IN_FORKS = """
import json, os, sys, torch
for module in sys.argv[1:]:
    if not os.fork():
        __import__(module)
        heavy = sorted({"pandas", "pydantic", "matplotlib", "IPython"} & set(sys.modules))
        print(json.dumps([module, heavy]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported_by_ranks():
    """What is heavy of what the worker of each lab imports, by the lab's name; each in a process of its own."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in WORKERS]
    told = subprocess.check_output([sys.executable, "-c", IMPORT_IN_FORKS, *modules], text=True)
    return {module.split(".")[-2]: heavy for module, heavy in map(json.loads, told.splitlines())}


@pytest.mark.parametrize("lab", [path.parent.name for path in WORKERS])
def test_what_a_rank_imports_is_light(lab, imported_by_ranks):
    assert imported_by_ranks[lab] == []


def test_environment_yml_is_in_step_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in environment if isinstance(entry, dict))
    assert [entry for entry in pip if not entry.startswith("--")] == project["dependencies"]
    assert f"python{project['requires-python']}" in environment


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_clean_and_thin(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    others = ["".join(cell["source"]) for cell in code if cell not in tagged]
    assert max(len(source.splitlines()) for source in others) <= 10
    assert sum(len(source.splitlines()) for source in others) <= 80
    for source in others if path != TOUR else []:
        kinds = {type(node) for node in ast.walk(ast.parse(source))}
        assert not kinds & {ast.FunctionDef, ast.ClassDef, ast.Lambda}, "definitions belong in the package"
