"""The architecture, read off the source: imports run one way, files stay short, dependencies are
named once."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "labkit").rglob("*.py"))
WORKERS = sorted((ROOT / "labkit" / "studies").glob("*/worker.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOUR = ROOT / "notebooks" / "00_start_here.ipynb"  # a function of the reader's own is what it shows

# Which parts of labkit a part may import. `lab.point` and `lab.units` are plain data, open to all
# studies' workers.
ALLOWED = {
    "__main__": {"advise", "check", "studies", "lab", "scaling", "machine", "__version__"},
    "advise": {"advise", "lab", "scaling"},
    "check": {"check", "studies", "lab", "nn", "parallel", "scaling", "bench", "costs", "machine"},
    "studies": {
        "studies",
        "lab",
        "nn",
        "parallel",
        "scaling",
        "bench",
        "costs",
        "machine",
        "torch_private",
    },
    "lab": {"lab", "nn", "parallel", "scaling", "bench", "costs", "machine", "torch_private"},
    "nn": {"nn", "machine", "costs", "torch_private"},
    "parallel": {"parallel", "nn", "machine", "costs", "torch_private"},
    "scaling": {"scaling"},
    "bench": {"bench", "torch_private"},
    "costs": {"costs"},
    "machine": {"machine", "__version__"},
    "torch_private": set(),
    "__init__": set(),
}


@cache
def _tree(path):
    return ast.parse(path.read_text())


@cache
def _imports(path):
    """Modules of labkit that a file imports, wherever the statement stands, or the call."""
    return list(_imported(_tree(path)))


def _imported(tree):
    for node in ast.walk(tree):
        # import_module("labkit.parallel.ranks.worker") hides an import from its readers
        if isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "attr", ""),
            getattr(node.func, "id", ""),
        ):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from (name for name in names if name.startswith("labkit"))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("labkit"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(path):
    return path.relative_to(ROOT / "labkit").with_suffix("").parts[0]


def test_imports_run_one_way():
    for path in MODULES:
        for name in _imports(path):
            target = name.split(".")[1] if "." in name else "__init__"
            assert target in ALLOWED[_part(path)], f"{path} must not import {name}"


def test_no_modules_import_one_another_in_a_circle():
    """Wherever the statement stands: an import inside of a function hides a circle and does not
    break it."""
    names = {_module(path) for path in MODULES}
    imported = {_module(path): {_known(name, names) for name in _imports(path)} for path in MODULES}
    # A package's __init__ hands its modules on, and so imports what stands below it.
    edges = {
        name: {to for to in found if to and not name.startswith(f"{to}.")}
        for name, found in imported.items()
    }
    sorter = TopologicalSorter(edges)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(name, names):
    """The module that an imported name is, or is in."""
    return (
        name
        if name in names
        else next((part for part in (name.rpartition(".")[0],) if part in names), None)
    )


def test_studies_never_import_one_another():
    for path in (ROOT / "labkit" / "studies").glob("*/*.py"):
        others = {
            name.split(".")[2] for name in _imports(path) if name.startswith("labkit.studies.")
        }
        assert others <= {path.parent.name, "shared"}, path


def test_files_are_short_and_say_what_they_are_for():
    for path in MODULES:
        text = path.read_text()
        assert len(text.splitlines()) <= 320, path
        assert not text.strip() or ast.get_docstring(_tree(path)), (
            f"the first lines of {path} say what it is for"
        )


TORCH_PRIVATE = ROOT / "labkit" / "torch_private.py"


def test_private_names_of_torch_are_imported_in_one_file():
    for path in MODULES:
        if path != TORCH_PRIVATE:
            assert not {*_private_names_of_torch(_tree(path))}, path


def _private_names_of_torch(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = {alias.name for alias in node.names} | {*node.module.split(".")}
            yield from (name for name in names if name.startswith("_"))
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            start = ast.unparse(node).split(".")[0]
            if start in ("torch", "dist", "distributed_c10d", "nn", "Variable"):
                yield ast.unparse(node)


# torch's collectives of objects unpickle what a peer sends, and a pickle runs code.
UNPICKLES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "recv_object_list",
}
UNPICKLES |= {"read_pickle", "unsafe_load"}
LAUNCH = ROOT / "labkit" / "parallel" / "ranks" / "worker.py"  # what a rank's own parent sends


def test_nothing_from_a_peer_or_a_file_is_unpickled():
    for path in MODULES:
        every_call = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
        assert not [
            word for call in every_call for word in call.keywords if word.arg == "allow_pickle"
        ], path
        assert not {"eval", "exec"} & {
            call.func.id for call in every_call if isinstance(call.func, ast.Name)
        }, path
        calls = [call for call in every_call if isinstance(call.func, ast.Attribute)]
        assert not UNPICKLES & {call.func.attr for call in calls}, path
        for call in calls:
            whose = call.func.value.id if isinstance(call.func.value, ast.Name) else None
            if (whose, call.func.attr) == ("torch", "load"):
                assert any(
                    word.arg == "weights_only" and word.value.value is True
                    for word in call.keywords
                ), path
            if whose in ("pickle", "cloudpickle"):
                assert call.func.attr == "dumps" or path == LAUNCH, path


def test_importing_labkit_is_cheap():
    code = "import labkit, sys; print(sorted({'torch', 'pandas', 'pydantic'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# A rank is forked from a process that has imported torch, and imports its worker there. The table
# of attention comes first: it imports neither Triton nor the compiler.
IMPORT = """
import sys, torch, labkit.nn.attention_implementations
heavy = {"triton", "torch._dynamo", "pandas", "pydantic", "matplotlib", "IPython"}
print("attention", *sorted(heavy & set(sys.modules)))
for module in sys.argv[1:]:
    before = set(sys.modules)
    __import__(module)
    print(module, *sorted((heavy - {"triton", "torch._dynamo"}) & (set(sys.modules) - before)))
import labkit.studies.all_reduce.lab
of_pages = {"matplotlib", "seaborn", "scipy.stats", "IPython", "nbconvert"}
print("a lab", *sorted(of_pages & set(sys.modules)))
# A kernel runs a notebook and reads none; what reads one takes a second to load.
import labkit.lab.parameters, labkit.lab.pages.record
print("a kernel", *sorted({"nbformat", "jsonschema"} & set(sys.modules)))
"""


def test_what_a_rank_imports_is_light_and_a_lab_is_loaded_without_what_only_its_page_needs():
    modules = [_module(path) for path in WORKERS]
    imported = subprocess.check_output([sys.executable, "-c", IMPORT, *modules], text=True)
    assert imported.splitlines() == ["attention", *modules, "a lab", "a kernel"]


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
    # as JupyterLab writes it, but for the version of Python: opened, run, cleared and saved, it is
    # the same bytes
    assert path.read_text() == nbformat.writes(nbformat.from_dict(notebook)) + "\n"
    assert notebook["metadata"]["kernelspec"]["display_name"] == "Python 3 (ipykernel)"
    language = notebook["metadata"]["language_info"]
    assert (language["file_extension"], language["codemirror_mode"]["version"]) == (".py", 3)
    assert "version" not in language
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    others = ["".join(cell["source"]) for cell in code if cell not in tagged]
    # a reader's training is the reader's to overwrite
    others = [source for source in others if "def setup(" not in source]
    assert max(len(source.splitlines()) for source in others) <= 10
    assert sum(len(source.splitlines()) for source in others) <= 80
    for source in others if path != TOUR else []:
        kinds = {type(node) for node in ast.walk(ast.parse(source))}
        assert not kinds & {
            ast.FunctionDef,
            ast.ClassDef,
            ast.Lambda,
        }, "definitions belong in the package"


CUDA_BRANCH = re.compile(
    r"torch\.cuda\.|\.is_cuda\b|@triton\.jit|has_triton\(\)"
    r'|(type|\bdevice) [!=]= "(cuda|cpu)"|(starts|ends)with\("cuda"\)|== "nccl"|"nccl:'
)
EXECUTED_BY = ("interpreter", "compiled", "mock", "made up", "**nothing**", "names from")


def test_docs_say_what_has_executed_each_file_with_a_branch_for_cuda():
    page = (ROOT / "docs" / "gpus.md").read_text()
    rows = re.findall(r"^\|[^|]+\| (`[^|]+`) \| ([^|]+) \|$", page, re.MULTILINE)
    listed = set()
    for where, executed_by in rows:
        assert executed_by.startswith(EXECUTED_BY), executed_by
        for name in re.findall(r"`([^`]+)`", where):
            files = [*(ROOT / "labkit").glob(name)]
            assert files, f"{name} is gone"
            listed.update(file for path in files for file in (path, *path.rglob("*.py")))
    branches = [path for path in MODULES if CUDA_BRANCH.search(path.read_text())]
    assert len(branches) > 40
    assert [path for path in branches if path not in listed] == []
