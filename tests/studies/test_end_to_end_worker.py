"""The worker of the end-to-end lab, in this process, on the smallest model."""

import pytest
import torch
from labkit.studies.end_to_end.study import STUDY
from labkit.studies.end_to_end.worker import EndToEndPoint, measure_point

from labkit.lab import capacity
from labkit.machine import describe_machine
from labkit.nn.attention_implementations import no_compiler_reason


def _measure(sweep, **options):
    fields = {"device": "cpu", "size": "nano", "batch": 1, "context_length": 8, "warmup": 1, "repeats": 2}
    return list(measure_point(EndToEndPoint(sweep=sweep, **(fields | options))))


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("forward", ["inference", "forward"]),
        ("forward_backward", ["inference", "forward", "backward"]),
        ("step", ["inference", "forward", "backward", "optimizer"]),
    ],
)
def test_a_mode_says_how_far_a_step_goes(mode, phases):
    rows = _measure("phases", mode=mode)
    assert [row["phase"] for row in rows] == phases
    assert all(len(row["seconds"]) == 2 and row["check"] == "ok" for row in rows)


def test_a_loss_that_is_not_finite_is_wrong(monkeypatch):
    from labkit.nn import training

    monkeypatch.setattr(training, "language_model_loss", lambda logits, _: logits.sum() * torch.nan)
    for sweep in ("warmup", "phases"):
        assert _measure(sweep) == [{"check": "wrong: the loss is nan"}]


def test_without_a_compiler_the_point_says_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    point = EndToEndPoint(sweep="compile", device="cpu", size="nano")
    assert STUDY.skip_reason(point, describe_machine()) == (
        "torch.compile needs a C++ compiler on a CPU; there is none on the path"
    )


@pytest.mark.slow
@pytest.mark.skipif(no_compiler_reason("cpu") is not None, reason=str(no_compiler_reason("cpu")))
def test_compiled_code_is_gated_timed_in_turn_and_its_compiling_told_apart(compiled_rows):
    assert [(row["implementation"], row["phase"]) for row in compiled_rows] == [
        (name, phase) for phase in ("inference", "step") for name in ("eager", "compiled")
    ]
    assert all(row["check"] == "ok" and len(row["seconds"]) == 2 for row in compiled_rows)
    for column in ("compile_s", "compiler_s"):
        assert all((column in row) == (row["implementation"] == "compiled") for row in compiled_rows)


def test_compiled_code_that_computes_something_else_gets_no_time(monkeypatch):
    from labkit.nn import training

    def compile_wrongly(model, **_):
        return lambda tokens: model(tokens) * 2

    monkeypatch.setattr(training.torch, "compile", compile_wrongly)
    (row,) = _measure("compile")
    assert row["check"].startswith("wrong: error")
    assert "seconds" not in row


def test_a_compiler_that_raises_is_a_row_with_what_it_said(monkeypatch):
    from labkit.nn import training

    def refuse(model, **_):
        raise NotImplementedError("no backend for this GPU")

    monkeypatch.setattr(training.torch, "compile", refuse)
    (row,) = _measure("compile")
    assert row["implementation"] == "compiled"
    assert row["check"].startswith("failed: NotImplementedError: no backend for this GPU, line ")
    assert "seconds" not in row


def test_a_single_gradient_that_is_not_a_number_is_wrong(monkeypatch):
    from labkit.nn import training

    def compile_wrongly(model, **_):
        model.output.weight.register_hook(lambda gradient: gradient * torch.nan)  # the last one
        return model

    monkeypatch.setattr(training.torch, "compile", compile_wrongly)
    (row,) = _measure("compile")
    assert row["check"].startswith("wrong: error inf")


def test_a_model_that_does_not_fit_is_skipped_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 2**30)
    machine = describe_machine().model_copy(update={"gpus": []})
    config = STUDY.profiles["paper"].model_copy(update={"device": "cpu"})
    reasons = [STUDY.skip_reason(point, machine) for point in STUDY.points(config, machine)]
    assert any(reason and reason.startswith("needs 2.") for reason in reasons)
    assert STUDY.skip_reason(EndToEndPoint(sweep="phases", device="cuda", size="nano"), machine) == (
        "needs a CUDA device, and there is none"
    )
