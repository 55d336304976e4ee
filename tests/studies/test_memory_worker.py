"""What a rank measures and counts of memory; what does not fit is a row with its reason."""

import resource
from contextlib import closing

import pandas as pd
import psutil
import pytest
import torch
from torch import nn

from labkit.bench.ledger import peak_between
from labkit.costs.transformer import TransformerShape
from labkit.lab import capacity, figures
from labkit.lab.user_models import registered_models
from labkit.lab.runs.measure import measure
from labkit.machine import describe_machine
from labkit.nn.transformer import shape_named
from labkit.parallel.launch import Row, launch
from labkit.studies.memory import study as study_module
from labkit.studies.memory import tables, worker
from labkit.studies.memory.counting import PARTS, count_phases
from labkit.studies.memory.study import STUDY, needed_bytes, segment_lengths
from labkit.studies.memory.worker import MemoryPoint, measure_point, predicted
from tests.rehearsal.machines import MACHINES
from tests.studies.answering import answers_of

MIB, GIB = 2**20, 2**30
HUGE = TransformerShape(d_model=8192, d_ff=32768, n_layers=3, n_heads=64, vocabulary=50_000)
# Of two layers, which segments of each length divide.
SHALLOW = TransformerShape(d_model=64, d_ff=128, n_layers=2, n_heads=2, vocabulary=100)


def _rows(kind, size="nano", context_length=32, **others):
    return list(measure_point(MemoryPoint(kind=kind, size=size, context_length=context_length, **others)))


@pytest.mark.parametrize(
    ("size", "context", "precision", "during"),
    [
        ("nano", 64, "float32", "backward"),
        ("nano", 128, "bfloat16", "backward"),
        ("mini", 64, "float32", "optimizer"),
        pytest.param("mini", 256, "float32", "backward", marks=pytest.mark.slow),
    ],
)
def test_the_counted_peak_is_the_measured_one(size, context, precision, during):
    phases = ("inference", "full_step")
    counted = {r["phase"]: r for r in _rows("counted", size, context, precision=precision, phases=phases)}
    assert counted["full_step"]["peak_during"] == during
    for phase, row in counted.items():
        (measured,) = _rows("measured", size, context, precision=precision, phases=(phase,))
        assert len(set(measured["peak_bytes"])) == 1, "the same to the byte in every repeat"
        assert row["peak_bytes"] == pytest.approx(measured["peak_bytes"][0], rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_fake_step_makes_the_storages_of_a_real_one(precision):
    arguments = {"source": shape_named("nano"), "batch": 2, "context_length": 16, "precision": precision}
    fake, real = (count_phases(("full_step",), fake=fake, **arguments) for fake in (True, False))
    assert fake.peak("full_step").by_category() == real.peak("full_step").by_category()
    assert [a.n_bytes for a in fake.ledger.allocations] == [a.n_bytes for a in real.ledger.allocations]


def test_parts_add_up_and_parameters_gradients_and_states_are_whole():
    rows = _rows("counted", context_length=64, phases=("forward", "full_step"), detail=True)
    for row in rows:
        if row["table"] == "peak":
            assert sum(row[f"{part}_bytes"] for part in PARTS) == row["peak_bytes"]
    full = next(row for row in rows if row.get("phase") == "full_step")
    assert full["optimizer_bytes"] == pytest.approx(2 * full["parameters_bytes"], rel=1e-4)  # and a step counter
    steps = [row for row in rows if row["table"] == "timeline"]
    assert max(row["gradients_bytes"] for row in steps) == full["parameters_bytes"]
    assert max(sum(row[f"{part}_bytes"] for part in PARTS) for row in steps) == full["peak_bytes"]
    largest = [row for row in rows if row["table"] == "allocation"]
    assert all(row["line"].endswith(tuple("0123456789")) for row in largest)
    assert max(row["n_bytes"] for row in largest) == 4 * 4 * 64 * 10_000  # the logits


def test_a_model_of_gigabytes_is_counted_with_little_memory():
    with registered_models({"huge": HUGE}):
        row = _rows("counted", "huge", 4096, phases=("full_step",))[0]
    assert row["peak_bytes"] > 100 * GIB
    assert row["host_bytes"] is None or row["host_bytes"] < 4 * GIB
    assert row["count_s"] > 0


@pytest.mark.parametrize(("machine", "in_16_bits"), [("driver too old", {"nano"}), ("one H100", {"nano", "mini"})])
def test_on_a_cpu_16_bits_are_measured_of_the_smallest_size_alone(machine, in_16_bits):
    """One without instructions for them would take minutes for the next, in whatever order they are named."""
    config = STUDY.profiles["quick"].model_copy(update={"sizes": ["mini", "nano"]})
    points = [point for point in STUDY.points(config, MACHINES[machine]) if point.kind == "measured"]
    assert {point.size for point in points if point.precision == "float32"} == {"nano", "mini"}
    assert {point.size for point in points if point.precision == "bfloat16"} == in_16_bits


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_block_saves_what_is_predicted_to_the_byte(precision):
    *saved, total = _rows("block", precision=precision)
    assert total["saved_bytes"] == total["predicted_bytes"] == sum(row["n_bytes"] for row in saved)
    assert total["residual_bytes"] == total["predicted_residual_bytes"] == 4 * 32 * 128 * 4
    assert {"softmax", "mm", "silu", "rsqrt"} <= {row["operator"] for row in saved}


def test_checkpointing_keeps_the_gradients_and_lowers_the_peak():
    rows = {row["segment"]: row for row in _rows("checkpoint", context_length=64, segments=(0, 1), repeats=2)}
    assert all(row["check"] == "ok" and row["error"] < 1e-6 and len(row["seconds"]) == 2 for row in rows.values())
    assert rows[1]["peak_bytes"] < 0.9 * rows[0]["peak_bytes"]
    for row in rows.values():
        assert row["counted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)


def _limited(monkeypatch, where, too_long):
    """The rows by segment length, where that length runs out of memory in that function."""
    as_it_is = getattr(worker, where)

    def limited(of, segment):
        if segment == too_long:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return as_it_is(of, segment)

    monkeypatch.setattr(worker, where, limited)
    with registered_models({"shallow": SHALLOW}):
        rows = {row["segment"]: row for row in _rows("checkpoint", "shallow", segments=(0, 1, 2))}
    assert rows[too_long]["check"] == "out of memory: tried to allocate 20 GiB"
    assert "seconds" not in rows[too_long]
    assert all(row["counted_bytes"] for row in rows.values())
    return rows


@pytest.mark.parametrize(
    ("where", "too_long"),
    [
        pytest.param("_peak_of_segment", 1, marks=pytest.mark.slow),
        ("_gradients_with", 1),
        pytest.param("_step_with", 1, marks=pytest.mark.slow),
        ("_step_with", 0),
    ],
)
def test_a_segment_length_that_runs_out_of_memory_costs_no_other(where, too_long, monkeypatch):
    rows = _limited(monkeypatch, where, too_long)
    del rows[too_long]
    assert all(row["check"] == "ok" and row["peak_bytes"] and row["seconds"] for row in rows.values())


@pytest.mark.parametrize("where", ["_peak_of_segment", "_gradients_with"])
def test_without_a_step_that_keeps_everything_nothing_is_compared_and_the_answer_says_why(where, monkeypatch):
    rows = _limited(monkeypatch, where, 0)
    for segment in (1, 2):
        assert rows[segment]["peak_bytes"]
        assert rows[segment]["check"] == worker.NOTHING_TO_COMPARE
        assert not {"error", "seconds"} & rows[segment].keys()
    frame = pd.DataFrame([{"size": "shallow", "context_length": 32, "batch": 4} | row for row in rows.values()])
    caveat = answers_of(STUDY, frame)["checkpointing"].caveat
    assert "no checkpointing" in caveat
    assert "20 GiB" in caveat
    assert worker.NOTHING_TO_COMPARE in caveat


def test_recomputed_activations_are_told_apart():
    for segment in (0, 4):
        arguments = {"source": shape_named("nano"), "batch": 1, "context_length": 32, "checkpoint_segment": segment}
        counted = count_phases(("full_step",), **arguments)
        assert any(a.recomputed and a.category == "recomputed" for a in counted.ledger.allocations) == (segment > 0)


def test_what_does_not_fit_is_skipped_with_both_sizes_and_the_sweep_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 0)
    config = STUDY.profiles["smoke"].model_copy(
        update={"contexts": [16], "big_contexts": [], "fitted_sizes": [], "precisions": ["float32"]}
    )
    coverage = measure(STUDY, config, profile="smoke", directory=tmp_path).coverage()
    skipped = coverage[coverage["kind"] != "counted"]
    assert set(skipped["status"]) == {"skipped"}
    assert all("(predicted), 0 B available" in reason for reason in skipped["reason"])
    assert set(coverage.loc[coverage["kind"] == "counted", "status"]) == {"ok"}


def _measure_with_little_memory(point):
    if point.size != "nano":
        used = psutil.Process().memory_info().vms
        # Room for the profiler, its threads and their arenas of 64 MiB; the model's weights alone take 400.
        resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, resource.RLIM_INFINITY))
    yield from measure_point(point)


def test_running_out_of_memory_is_recorded_and_the_next_point_is_measured():
    settings = {"kind": "measured", "context_length": 16, "phases": ("full_step",)}
    points = [MemoryPoint(size="small", **settings), MemoryPoint(size="nano", **settings)]
    with closing(launch(_measure_with_little_memory, points, world_size=1, threads=1, timeout_s=120)) as events:
        seen = list(events)
    ends = [event for event in seen if not isinstance(event, Row)]
    assert [end.status for end in ends] == ["oom", "ok"], [end.reason for end in ends]


def test_a_counted_point_needs_no_memory_and_a_measured_one_what_is_predicted():
    assert needed_bytes(MemoryPoint(kind="counted", size="10B", context_length=2048, phases=("full_step",))) == 0
    point = MemoryPoint(kind="measured", size="10B", context_length=128, phases=("full_step",))
    assert needed_bytes(point) > 100 * GIB
    assert "available" in STUDY.skip_reason(point, describe_machine())


@pytest.mark.parametrize("kind", ["measured", "checkpoint", "block"])
def test_what_is_predicted_is_of_the_device_of_the_point(kind):
    sizes = {"size": "nano", "context_length": 512, "precision": "bfloat16", "phases": ("full_step",)}
    cpu, cuda = (MemoryPoint(kind=kind, device=device, **sizes) for device in ("cpu", "cuda"))
    on_cpu, on_cuda = (predicted(point, "full_step")["predicted_bytes"] for point in (cpu, cuda))
    assert on_cuda > on_cpu  # the softmax in float32
    assert needed_bytes(cuda) > needed_bytes(cpu)


def test_a_gpu_that_is_not_there_is_a_reason():
    machine = describe_machine().model_copy(update={"gpus": []})
    point = MemoryPoint(kind="measured", size="nano", context_length=16, phases=("full_step",), device="cuda")
    assert "needs a CUDA device" in STUDY.skip_reason(point, machine)


@pytest.mark.parametrize("profile", ["smoke", "quick", "standard", "paper"])
def test_no_point_is_planned_twice(profile):
    points = STUDY.points(STUDY.profiles[profile], describe_machine())
    assert len({point.id for point in points}) == len(points)


def test_segment_lengths_divide_the_layers():
    assert segment_lengths(12) == (0, 1, 2, 3, 4, 6, 12)


def test_a_peak_needs_no_allocation():
    assert peak_between([], 0, 0).n_bytes == 0


class _Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 32, 3)
        self.output = nn.Linear(32 * 36, 10)

    def forward(self, images):
        return self.output(torch.relu(self.convolution(images)).flatten(1))


IMAGES = torch.zeros(16, 1, 8, 8)  # as data that a cell has loaded


def _mine():
    return _Own(), IMAGES, torch.randint(10, (16,)), nn.functional.cross_entropy


def _wrong_shape():
    return nn.Linear(3, 10), IMAGES, torch.randint(10, (16,)), nn.functional.cross_entropy


WIDE = TransformerShape(d_model=64, d_ff=128, n_layers=1, n_heads=2, vocabulary=100)


def test_a_readers_own_models_are_counted_measured_drawn_and_named_and_a_mistake_costs_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(study_module, "_checkpointing", lambda *_: [])  # of a named size only
    own = {"mine": _mine, "wide": WIDE, "wrong_shape": _wrong_shape}
    config = STUDY.profiles["smoke"].model_copy(update={"precisions": ["float32"]})
    run = measure(STUDY, config, profile="smoke", models=own, directory=tmp_path)
    coverage = run.coverage()
    failed = coverage[coverage["status"] != "ok"]
    assert set(failed["size"]) == {"wrong_shape"}
    assert failed["reason"].str.contains(r"(?:multiplied|reduction dim).* line \d+ of test_memory_worker.py").all()
    frame = run.frame()
    both = tables.counted_against_measured(frame).set_index(["size", "context_length"])
    for model in (("mine", 0), ("wide", 16), ("wide", 32)):
        assert both.loc[[model], "counted_over_measured"].between(0.95, 1.05).all()
    assert both["predicted_over_measured"].notna()["wide"].all()
    assert both["predicted_over_measured"].isna()["mine"].all()
    counted = tables.peaks(frame, method="counted", phase="full_step", size="mine")
    assert counted["parameters_bytes"].tolist() == [4 * (32 * 9 + 32 + 32 * 36 * 10 + 10)]
    lines = tables.allocations(frame).query("size == 'mine'").set_index("operator")["line"]
    assert lines["relu"].startswith("test_memory_worker.py:")
    drawn = tables.by_context(frame, *tables.drawn_sizes(frame))
    plot = figures.bars(tables.its_own(drawn), x="size", y="peak_bytes", hue="phase", facet="precision")
    assert set(plot.data["size"]) == {"mine"}
    assert set(tables.in_tokens(drawn)["size"]) == {"nano", "wide"}
    assert "mine" in set(tables.parts_of_peaks(frame)["size_and_context"])
    assert {"mine", "wide"} <= set(tables.fits(frame)["size"])
    findings = STUDY.findings(frame, coverage)
    assert all(name in findings["peak_by_context"].why for name in ("mine", "wide"))
    assert "mine" in findings["where_it_goes"].why + findings["where_it_goes"].headline
    assert "mini" in findings["largest_model"].headline
    assert tables.big_size(frame) == ["nano"]


def test_a_model_that_a_cell_has_made_is_counted_without_touching_it():
    held = _Own()
    with registered_models(
        {"held": lambda: (held, IMAGES, torch.zeros(16, dtype=torch.int64), nn.functional.cross_entropy)}
    ):
        (row,) = _rows("counted", "held", 0, batch=0, phases=("full_step",))
    assert row["parameters_bytes"] == sum(parameter.nbytes for parameter in held.parameters())
    assert all(parameter.grad is None for parameter in held.parameters())
