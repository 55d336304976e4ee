"""A lab as a reader has it in JupyterLab: opened, changed, run, interrupted, played with, in a real
browser."""

import importlib.util
import json
import re
from contextlib import closing

import nbformat
import pytest

from labkit.lab.pages.record import RUN_MIME
from labkit.lab.project import notebook_path, recorded_directory
from labkit.lab.runs.store import Run
from labkit.machine.description import describe_machine
from labkit.studies import load_lab
from labkit.studies.your_training.lab import found
from tests.jupyterlab import Notebook, Server, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("jupyterlab"), reason="no jupyterlab"),
]
LAB = "all_reduce"
# A reader's first ring: `LAST` is where it stops to add and begins to copy. With 2 it stops a step
# too early.
RING = """
import torch
import torch.distributed as dist

def mine(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(size)
    for step in range(2 * (size - 1)):
        sent, received = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(received)
        sending = dist.isend(sent.clone(), (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        sending.wait()
        received.copy_(received + arrived if step < size - LAST else arrived)

frame = lab.measure({"mine": mine})
"""
IN_THE_FIGURE = 'lab.answer("algorithms"'


def _outputs(cells, kind):
    return [output for cell in cells for output in cell.outputs if output.output_type == kind]


def _parameters(path):
    (cell,) = [
        c
        for c in nbformat.read(path, as_version=4).cells
        if "parameters" in c.metadata.get("tags", [])
    ]
    return cell.source


def _smoke(config=None, **parameters):
    """The cell of parameters with these and no sweep but the one over sizes."""
    few = {"transports": [], "scheduling_bytes": [], **(config or {})}
    changed = {"profile": "smoke", **parameters, "config": few}
    lines = [f"{name} = {value!r}" for name, value in changed.items()]
    return "\n".join([_parameters(notebook_path(LAB)), *lines])


def _measuring(cells):
    (cell,) = [cell for cell in cells if "frame = lab.measure(" in cell.source]
    return cell


def _run_of(notebook, server):
    """The run of the finished notebook, after a look at everything else it shows."""
    until(
        lambda: all(any(map(str.isdigit, prompt)) for prompt in notebook.prompts()),
        "every cell to have run",
    )
    notebook.wait_until_idle()
    assert server.ranks() == []
    cells = notebook.saved()
    assert _outputs(cells, "error") == []
    assert _outputs(cells, "stream") == []
    (line,) = _measuring(cells).outputs
    assert re.search("points? planned", line.data["text/html"])
    (record,) = [
        output.data[RUN_MIME]
        for output in _outputs(cells, "display_data")
        if RUN_MIME in output.data
    ]
    return Run.load(server.root / record["run"])


@pytest.fixture(scope="module")
def server(visit, tmp_path_factory):
    with closing(Server(tmp_path_factory.mktemp("jupyterlab"))) as running:
        _calibrate(running.root)
        yield running


@pytest.fixture
def notebook(server, visit):
    """The opened notebook of the lab; afterwards its kernel is gone."""
    path = server.notebooks / notebook_path(LAB).name
    with closing(Notebook(visit(server.url(path.name))[0], path)) as opened:
        yield opened


def _calibrate(folder):
    """A recorded run of the lab `limits`, as if it were of this machine."""
    (recorded,) = (recorded_directory() / "limits").glob("*.jsonl")
    header, *rows = recorded.read_text().splitlines()
    header = json.dumps(
        json.loads(header) | {"machine": describe_machine().model_dump(mode="json")}
    )
    own = folder / "data" / "runs" / "limits" / recorded.name
    own.parent.mkdir(parents=True)
    own.write_text("\n".join([header, *rows, ""]))


def test_run_all_then_interrupt_a_longer_sweep_then_another_parameter(server, notebook):
    notebook.write_parameters(_smoke(world_sizes=[3]))
    notebook.run_all()
    run = _run_of(notebook, server)
    assert set(run.coverage()["status"]) == {"ok"}
    assert set(run.frame()["world_size"]) == {3}
    assert notebook.alignment_of(".labkit-card td") == "left"

    # an hour, were nobody to interrupt it
    endless = {"repeats": 100_000, "timeout_s": 3600.0}
    notebook.write_parameters(_smoke(endless, world_sizes=[3]))
    notebook.run_all()
    until(server.ranks, "ranks to measure")
    until(
        lambda: re.search(r"of \d+ points", notebook.text_below("lab.measure(")),
        "the progress line",
    )
    notebook.interrupt()
    until(lambda: not server.ranks(), "the ranks to end", deadline_s=20)
    notebook.wait_until_idle()
    cells = notebook.saved()
    line, error = _measuring(cells).outputs
    assert re.search(r"of \d+ points   .* so far", line.data["text/html"])
    assert len(error.traceback) == 1
    assert "KeyboardInterrupt: interrupted; what was measured is kept" in error.traceback[0]
    assert _outputs(cells, "error") == [error]

    notebook.write_parameters(_smoke(world_sizes=[2]))
    notebook.run_all()
    run = _run_of(notebook, server)
    assert set(run.coverage()["status"]) == {"ok"}
    assert set(run.frame()["world_size"]) == {2}

    notebook.write_parameters(_parameters(notebook_path(LAB)))
    assert notebook.clear_and_save() == notebook_path(LAB).read_bytes()


def test_a_sweep_that_was_interrupted_goes_on_from_there(server, notebook):
    slow = {"algorithms": ["torch", "ring"], "repeats": 1000}
    notebook.begin(_smoke(slow, sizes_bytes=[1024, 2048, 4096]))
    notebook.start("lab.measure(")
    until(lambda: re.search(r"[1-9] of \d+ points", notebook.text_below("lab.measure(")), "a point")
    notebook.interrupt()
    notebook.wait_until_idle()
    assert "frame = lab.resume() goes on" in notebook.text_below("lab.measure(")
    said = notebook.run_new("frame = lab.resume()", below="lab.measure(")
    assert re.search(r"(\d+) points planned, \d+ measured", said)
    assert server.ranks() == []


def test_a_ring_of_ones_own_first_with_a_bug(server, notebook):
    algorithms = ["torch", "ring", "recursive_doubling"]
    notebook.begin(_smoke({"algorithms": algorithms}, world_sizes=[3]))
    notebook.run_new(RING.replace("LAST", "2"), below="frame = lab.measure(")
    answer = notebook.run(IN_THE_FIGURE)
    assert re.search(r"Wrong.*mine \(rank \d, element \d+: expected [\d.-]+, got [\d.-]+", answer)
    assert "mine" not in notebook.points_drawn_below(IN_THE_FIGURE)

    notebook.write('lab.measure({"mine"', RING.replace("LAST", "1"))
    notebook.run('lab.measure({"mine"')
    assert "wrong" not in notebook.run(IN_THE_FIGURE).lower()
    assert "mine" in notebook.points_drawn_below(IN_THE_FIGURE)
    assert server.ranks() == []


MODEL = """
import torch
from torch import nn


def setup(batch=4):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, [torch.randn(batch, 8)], lambda model, x: model(x).square().mean()
"""


def test_a_model_typed_into_the_cell_is_measured_and_is_no_example(server, visit):
    study = load_lab("your_training")
    path = server.notebooks / notebook_path(study.name).name
    with closing(Notebook(visit(server.url(path.name))[0], path)) as opened:
        opened.write("profile =", f"{_parameters(path)}\nprofile = 'smoke'")
        for changed in (False, True):
            if changed:
                opened.write("def setup(", MODEL)
            opened.run_all()
            run = _run_of(opened, server)
            assert set(run.coverage()["status"]) == {"ok"}
            assert (study.example(run.results()) is None) == changed
        (row,) = found(run.results()).to_dict("records")
        assert (row["n_parameters"], row["batch_shape"]) == (8 * 16 + 16 + 16 * 2 + 2, "4 x 8")
