"""The notebooks without a lab: their cells run as they are, and with the changes that they
propose."""

import ast

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest

from labkit.advise.notebook import Plan, ask
from labkit.lab.config import ParameterError
from labkit.lab.project import notebook_path
from tests.cases import thinned

TRIED = [{}, {"gpu": "4090", "gpus": 8, "model": "llama-3.2-1b", "network_gbps": 25}]
TRIED += [{"model": "llama-3-70b", "sequence": 32768, "tokens_per_step": "16M"}]


def _results(notebook, changes):
    """The value of each code cell's last expression, if it ends in one."""
    cells = [
        cell
        for cell in nbformat.read(notebook_path(notebook), as_version=4).cells
        if cell.cell_type == "code"
    ]
    names = {}
    results = []
    for cell in cells:
        *statements, last = ast.parse(cell.source).body
        exec(compile(ast.Module([*statements], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            results.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
        if "parameters" in cell.metadata.get("tags", []):
            names |= changes
    return results


@pytest.mark.parametrize("changes", thinned(TRIED, lambda changes: not changes), ids=str)
def test_the_reader_sees_an_answer_a_ranking_and_the_parts_of_a_step(changes):
    plan, ranking, layouts, questions, steps, names = _results("advise", changes)
    assert isinstance(plan, Plan)
    assert repr(plan).startswith(("Yes", "It may fit"))
    assert (ranking["low_s"] <= ranking["step_s"]).all()
    assert ranking["layout"].is_unique
    firsts = questions.groupby(level=0, sort=False).first()
    assert plan.parts().sum(axis=1).to_numpy() == pytest.approx(ranking["step_s"].to_numpy()[:3])
    for axes, count in ((layouts, len(plan.advice.best)), (steps, len(firsts))):
        assert len(axes.get_yticks()) == count
    plt.close("all")
    assert firsts["tokens_per_s"]["half the GPUs"] < firsts["tokens_per_s"]["as asked"]
    assert names == sorted(names)


def test_the_reader_sees_how_wrong_predictions_are_and_a_training_taken_apart():
    results = _results("scaling", {"gpus": [8, 64]})
    tables = [result for result in results if isinstance(result, pd.DataFrame)]
    assert all(len(table) for table in tables)
    assert tables[0]["covered"].between(85, 100).all()
    assert tables[1].loc["nanotron"].dropna().between(0, 100).all()
    plt.close("all")


def test_a_changed_question_keeps_the_rest_and_refuses_other_options():
    plan = ask(
        {"model": "llama-3-8b", "gpu": "h100", "gpus": 16, "tokens_per_step": "1M", "else": 3}
    )
    changed = plan.but(gpus=32)
    assert (changed.request.gpus, changed.request.model) == (
        32,
        plan.request.model,
    )
    assert plan.but(tokens_per_step=None).request.tokens == 1024 * 4096
    with pytest.raises(ParameterError, match="expected options among"):
        plan.but(networks=3)
    with pytest.raises(ParameterError, match="fractional part"):
        plan.but(gpus=2.5)
