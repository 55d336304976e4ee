"""The configuration that runs recommend: whose runs count, a reader's own alternatives, and the
printed code, which runs."""

from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import pytest
import torch

from labkit.costs.transformer import SIZES
from labkit.lab import recommended
from labkit.lab.answers import Compare
from labkit.lab.recommended import CHOICES, Configuration, recommend, runs_here, write_code
from labkit.lab.runs.store import Run
from labkit.machine.description import Gpu
from labkit.nn.attention_implementations import IMPLEMENTATIONS as ATTENTION
from labkit.parallel.data_parallel import IMPLEMENTATIONS as WRAPPERS
from labkit.parallel.data_parallel import LOCAL
from labkit.studies import load_lab
from tests.cases import thinned
from tests.pages.cells import recorded, run_of
from tests.parallel.shared_ranks import on_ranks

ON_GPU = {"flash", "sdpa_efficient", "sdpa_cudnn"}
EAGER = [name for name in ATTENTION if name not in {*ON_GPU, "compiled"}]
PRECISIONS = ("float32", "bfloat16", "float16")


def with_header(run, **changes):
    return replace(run, header=run.header.model_copy(update=changes))


def with_mine(lab, column, name):
    """A recorded run in which `mine` stands in the place of an alternative, and is four times as
    fast."""

    def rename(_, row):
        values = row["values"]
        if values.get(column) != name:
            return row
        faster = [seconds / 4 for seconds in values.get("seconds", [])]
        return row | {"values": values | {column: "mine"} | ({"seconds": faster} if faster else {})}

    return with_header(run_of(recorded(lab), rename), user_alternatives=["mine"])


@pytest.mark.parametrize(
    ("lab", "field", "name"),
    [("attention", "attention", "tiled"), ("data_parallel", "wrapper", "naive")],
)
def test_an_alternative_of_the_readers_own_is_recommended_as_a_name_and_never_as_code(
    lab, field, name, monkeypatch
):
    runs = {choice.lab: recorded(choice.lab) for choice in CHOICES}
    runs[lab] = with_mine(lab, "implementation", name)
    recommendation = recommend("nano", 512, runs)
    assert recommendation.user_alternatives == {field: "mine"}
    assert getattr(recommendation.configuration, field) != "mine"
    monkeypatch.setattr(recommended, "runs_here", lambda machine: runs)
    code = recommended.recommended_code("nano", 512)
    assert "'mine'" in code
    train(code.replace("model.compile(dynamic=False)", ""))  # which would take long


@pytest.mark.parametrize(
    "changes",
    [{"profile": "smoke"}, {"is_partial": True}, {"planned": {"another": {}}}, {"busy": True}],
    ids=str,
)
def test_a_run_that_is_not_whole_does_not_replace_the_one_before_it(changes, monkeypatch):
    old = recorded("attention")
    new = with_header(old, **{name: one for name, one in changes.items() if name != "busy"})
    if "busy" in changes:
        new = Mock(Run, wraps=old, header=old.header, pending=[], is_busy=True)
    monkeypatch.setattr(recommended, "newest_runs", lambda *_: [new, old])
    assert list(runs_here(old.header.machine).values()) == [old] * len(CHOICES)


def test_a_machine_with_gpus_is_told_nothing_that_was_measured_on_cpu_tensors():
    run = recorded("data_parallel")
    assert recommend("nano", 32, {"data_parallel": run}).configuration.wrapper != "torch"
    gpu = Gpu(name="A GPU", memory_bytes=2**34, compute_capability="9.0")
    machine = run.header.machine.model_copy(update={"gpus": [gpu]})
    on_gpu = with_header(run, machine=machine)
    assert recommend("nano", 32, {"data_parallel": on_gpu}).configuration.wrapper == "torch"


def train(code):
    names = {}
    exec(code, names)
    tokens = torch.randint(SIZES["nano"].vocabulary, (2, 9))
    loss = names["train_step"](tokens[:, :-1], tokens[:, 1:])
    assert torch.isfinite(loss)
    return float(loss)


@pytest.mark.parametrize(
    ("attention", "precision"),
    thinned(
        product(EAGER, PRECISIONS), lambda *case: case[0] == EAGER[0] or case[1] == PRECISIONS[0]
    ),
)
def test_the_printed_code_runs(attention, precision):
    train(write_code(Configuration(precision, attention), "nano", 16))


# Compiling takes a minute: under the first, code that is compiled runs as it is written.
@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", [{"compiled": True}, {"attention": "compiled"}], ids=str)
def test_the_printed_code_runs_compiled(changes, stance):
    with torch.compiler.set_stance(stance):
        train(write_code(Configuration(**changes), "nano", 16))


@pytest.mark.parametrize("attention", sorted(ON_GPU))
def test_the_printed_code_for_another_device_builds_its_model(attention):
    names = {}
    exec(write_code(Configuration(attention=attention), "nano", 16), names)
    assert isinstance(names["model"], torch.nn.Module)


@pytest.mark.parametrize("size", SIZES)
def test_the_printed_code_builds_every_model(size):
    # On meta, since the largest one takes some GiB.
    with torch.device("meta"):
        exec(write_code(Configuration(), size, 2048), {})


@pytest.mark.parametrize(
    ("lab", "column", "name"),
    [
        ("all_reduce", "algorithm", "ring"),
        ("attention", "implementation", "tiled"),
        ("data_parallel", "implementation", "naive"),
        ("sharding", "implementation", "zero1"),
        ("sync_batchnorm", "alternative", "labkit"),
    ],
)
def test_every_lab_that_takes_an_alternative_judges_it(lab, column, name):
    study = load_lab(lab)
    assert study.plugin_parameter is not None
    run = with_mine(lab, column, name)
    answers = study.answers(run.results())
    tables = [
        answers[question.id].table
        for question in study.questions
        if isinstance(question, Compare) and question.metric.compare == column
    ]
    verdicts = [
        row["verdict"]
        for table in tables
        if table is not None
        for row in table.to_dict("records")
        if row[column] == "mine"
    ]
    assert "faster" in verdicts


@on_ranks(2)
@pytest.mark.parametrize(
    "wrapper", thinned(sorted({*WRAPPERS} - {LOCAL}), lambda name: name in ("torch", "flat"))
)
def test_the_printed_code_runs_with_every_wrapper_on_several_ranks(wrapper):
    train(write_code(Configuration(wrapper=wrapper), "nano", 16))
