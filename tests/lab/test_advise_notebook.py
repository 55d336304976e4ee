"""The notebook of `labkit advise`: its cells as they are, and with the changes that it proposes."""

import ast

import nbformat
import pytest

from labkit.lab.advise.notebook import Plan, ask
from labkit.lab.config import ParameterError
from labkit.lab.figures import Plot
from labkit.lab.project import notebook_path
from tests.cases import thinned

TRIED = [{}, {"gpu": "4090", "gpus": 8, "model": "llama-3.2-1b", "network_gbps": 25}]
TRIED += [{"model": "llama-3-70b", "sequence": 32768, "tokens_per_step": "16M"}]


def _shown(changes):
    """What each code cell shows: its last expression, if it ends in one."""
    cells = [cell for cell in nbformat.read(notebook_path("advise"), as_version=4).cells if cell.cell_type == "code"]
    names, shown = {}, []
    for cell in cells:
        *statements, last = ast.parse(cell.source).body
        exec(compile(ast.Module([*statements], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
        if "parameters" in cell.metadata.get("tags", []):
            names |= changes
    return shown


@pytest.mark.parametrize("changes", thinned(TRIED, lambda changes: "sequence" not in changes), ids=str)
def test_the_reader_sees_an_answer_a_ranking_and_where_the_time_goes(changes):
    plan, ranking, layouts, pair, questions, steps, by_gpus, names = _shown(changes)
    assert isinstance(plan, Plan)
    assert repr(plan).startswith(("Yes", "Only just"))
    assert (ranking["low_s"] <= ranking["step_s"]).all()
    assert ranking["layout"].is_unique
    for plot, shown in ((layouts, ranking), (steps, questions)):
        assert isinstance(plot, Plot)
        parts = plot.data[plot.data["part"] != "step"].groupby("layout", sort=False)["seconds"].sum()
        whole = shown["step_s"].to_numpy()[: len(parts)]
        assert ((parts > 0.96 * whole) & (parts < 1.001 * whole)).all()
    asked, changed = pair.plans.values()
    assert (asked, changed.asked.request.gpus) == (plan, plan.asked.request.gpus // 2)
    html = pair._repr_html_()
    assert all(html.count(text) >= 1 for text in (changed.ranking(1)["layout"].iloc[0], "data:image/png;base64,"))
    assert "script" not in html
    assert questions.index[0] == "as asked"
    assert questions["tokens_per_s"].iloc[2] < questions["tokens_per_s"].iloc[0]
    assert isinstance(by_gpus, Plot)
    assert by_gpus.data.groupby("gpus")["percent"].sum().between(96, 100.1).all()
    assert names == sorted(names)


def test_a_changed_question_keeps_the_rest_and_refuses_what_is_no_option():
    plan = ask({"model": "llama-3-8b", "gpu": "h100", "gpus": 16, "tokens_per_step": "1M", "else": 3})
    changed = plan.but(gpus=32)
    assert (changed.asked.request.gpus, changed.asked.request.model) == (32, plan.asked.request.model)
    assert plan.but(tokens_per_step=None).asked.unnamed == {"sequence", "tokens_per_step"}
    with pytest.raises(ParameterError, match="expected options among"):
        plan.but(networks=3)
    with pytest.raises(ParameterError, match="whole number"):
        plan.but(gpus=2.5)
