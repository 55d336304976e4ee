"""The Python of `labkit try --apply`: each change is run as it is printed."""

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.studies.your_training.changes import CHANGES
from labkit.studies.your_training.script import setup_with
from labkit.studies.your_training.setup import build, load_setup
from labkit.studies.your_training.worker import YourTrainingPoint, measure

YOURS = """
import torch
from torch import nn
from torch.utils.data import DataLoader


def block():
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())


def setup(batch=2, has_optimizer=True):
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(3)])
    loader = DataLoader(torch.randn(8, 3, 6, 6), batch_size=batch)
    loss = lambda model, x: (model(x) - x).square().mean()
    if not has_optimizer:
        return model, loader, loss
    return model, loader, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A folder on the path with a training, whose settings of the process are taken back."""
    (tmp_path / "a_training.py").write_text(YOURS)
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    yield tmp_path
    sys.modules.pop("a_training", None)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def trained(path: Path) -> list[torch.Tensor]:
    """Run a file as a program; return the parameters of its model."""
    model = runpy.run_path(str(path), run_name="__main__")["model"]
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("name", CHANGES)
def test_the_printed_change_trains_as_yours(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling takes seconds, and the code is the same.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target = f"{folder}/a_training.py:setup"
    path = folder / "faster.py"
    path.write_text(setup_with(target, [("batch", 4)], {}, has_optimizer=True))
    expected = trained(path)
    path.write_text(setup_with(target, [("batch", 4)], {name: "why"}, has_optimizer=True))
    assert CHANGES[name].code.splitlines()[0] in path.read_text()
    tolerance = 0.02 if CHANGES[name].precision == "bfloat16" else 1e-5
    for actual, one in zip(trained(path), expected, strict=True):
        torch.testing.assert_close(actual, one, rtol=tolerance, atol=tolerance)


def test_all_changes_together_are_a_setup_of_a_training_without_an_optimizer(folder: Path) -> None:
    names = {name: "why" for name in CHANGES if name != "torch.compile"}
    target = f"{folder}/a_training.py:setup"
    path = folder / "all_changes.py"
    arguments = [("has_optimizer", False)]
    path.write_text(setup_with(target, arguments, names, has_optimizer=False))
    training = build(load_setup(str(path)))
    assert training.batches.num_workers > 0
    assert training.optimizer.param_groups[0]["fused"]
    point = YourTrainingPoint(file=f"{path}:setup", sweep="step", warmup=0, repeats=1)
    assert not [row for row in measure(point) if row.get("status", "ok") != "ok"]


def test_a_file_whose_name_is_no_identifier_is_imported(folder: Path) -> None:
    (folder / "my-train.py").write_text(YOURS)
    path = folder / "faster.py"
    path.write_text(setup_with(f"{folder}/my-train.py:setup", [], {}, has_optimizer=True))
    assert trained(path)
