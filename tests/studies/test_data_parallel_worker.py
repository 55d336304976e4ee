"""The worker of the data-parallel lab on two ranks, with small models."""

import re
from collections import Counter
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from labkit.studies.data_parallel.study import STUDY
from labkit.studies.gradient_buckets import worker as gradient_buckets
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel

from labkit.bench.trace import Profile
from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.lab import capacity, figures
from labkit.lab.runs.measure import measure
from labkit.lab.units import format_bytes
from labkit.machine import Gpu, describe_machine
from labkit.nn.workloads import RESNET50_PARAMETERS, workload_named
from labkit.parallel.data_parallel import BucketedDDP, NaiveDDP
from labkit.parallel.data_parallel.implementations import IMPLEMENTATIONS, OVER_SHARED_MEMORY
from labkit.parallel.launch import PointEnd, Row, launch
from labkit.parallel.transport import build
from labkit.parallel.transport.base import SharedMemoryUnavailable
from labkit.studies.data_parallel import alternatives, tables, timeline, worker
from labkit.studies.data_parallel import study as study_module
from labkit.studies.data_parallel.worker import LOCAL, DataParallelPoint, measure_point
from labkit.studies.shared.gradient_check import local_means
from tests.studies import tiny


def _point(sweep, alternatives, **options):
    fields = {"workload": tiny.NAME, "batch": 1, "context_length": 8, "warmup": 1, "repeats": 2, "world_size": 2}
    return DataParallelPoint(sweep=sweep, alternatives=tuple(alternatives), backend="gloo", **(fields | options))


POINTS = {
    "implementations": _point("implementations", [LOCAL, *IMPLEMENTATIONS]),
    "buckets": _point("buckets", ["torch", "torch@0.5", "bucketed@0.5"], bucket_mb=0.5),
    # of a size at which collectives overlap, and which fills several buckets
    "timeline": _point("timeline", ["torch", "naive", "flat", "overlapped", "bucketed@0.5"], workload="nano"),
    "memory": _point("memory", ["torch", "flat", "bucketed"], workload="nano"),
    "accumulation": _point("accumulation", ["torch", "bucketed"], micro_batches=2),
}


@cache
def _all_measured():
    """Rows of rank 0 and the end of each task, by name: one group of ranks goes through them all, as the lab does."""
    tasks = {name: (measure_point, point) for name, point in POINTS.items()} | SPOILED
    rows, ends = {name: [] for name in tasks}, {}
    for item in launch(_carry_out, tasks.values(), world_size=2, timeout_s=120):
        name = list(tasks)[item.index]
        if isinstance(item, PointEnd):
            ends[name] = item
        elif item.rank == 0:
            rows[name].append(item.values)
    return rows, ends


def _carry_out(task):
    yield from tiny.with_tiny(*task)


def _measured(name):
    rows, ends = _all_measured()
    assert ends[name].status == "ok", ends[name].failure
    return rows[name]


def test_every_implementation_is_gated_and_timed_in_phases():
    rows = _measured("implementations")
    assert {row["check"] for row in rows} == {"ok"}
    assert all(len(row["seconds"]) == 2 for row in rows)
    by_name = {
        name: [row["phase"] for row in rows if row["implementation"] == name] for name in (LOCAL, *IMPLEMENTATIONS)
    }
    for name, phases in by_name.items():
        waiting = [] if name in (LOCAL, "torch") else ["waiting"]
        assert phases == ["forward", "backward", "optimizer", *waiting]


def _wrong_wrapper(point):
    """A wrapper that averages nothing must not be timed."""
    with patch.object(NaiveDDP, "_finish", lambda self, missing: None):
        yield from measure_point(point)


def test_a_wrapper_whose_gradients_are_not_the_mean_gets_no_time():
    rows = _measured("wrong wrapper")
    (wrong,) = [row for row in rows if row["implementation"] == "naive"]
    assert re.match(r"wrong: rank 0, \S+, element \d+: expected \S+, got \S+$", wrong["check"])
    assert "seconds" not in wrong
    assert any(row["implementation"] == "flat" and row["check"] == "ok" for row in rows)


def _no_wrapper_averages(point):
    def wrap(name, model, **options):
        if name != "torch":
            return wrap_rightly(name, model, **options)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
        return wrapped

    wrap_rightly = alternatives.wrap
    with patch.object(alternatives, "wrap", wrap), patch.object(BucketedDDP, "_begin_full", lambda self: None):
        yield from measure_point(point)


ALL_WRONG = {
    _point("buckets", ["torch", "torch@0.5", "bucketed", "bucketed@0.5"], bucket_mb=0.5): 4,
    _point("accumulation", ["torch", "bucketed"], micro_batches=2): 4,
    _point("memory", ["torch", "bucketed"]): 2,
    _point("timeline", ["bucketed"]): 1,
}
"""Points, and how many rows each has."""


@pytest.mark.parametrize(("point", "n_rows"), ALL_WRONG.items(), ids=lambda value: getattr(value, "sweep", ""))
def test_points_whose_alternatives_are_all_wrong_have_rows_that_say_so(point, n_rows):
    rows = _measured(f"all wrong: {point.sweep}")
    assert len(rows) == n_rows
    for row in rows:
        assert row["check"].startswith("wrong")
        assert not {"seconds", "peak_bytes", "lane"} & set(row)


def test_alternatives_carry_their_bucket_size():
    rows = _measured("buckets")
    sizes = {(row["implementation"], row["of_bucket_mb"]) for row in rows}
    assert sizes == {("torch", None), ("torch", 0.5), ("bucketed", 0.5)}


def _layouts(point):
    """Sizes of the buckets after a step, of torch's wrapper and of labkit's, with and without a size."""
    workload = workload_named("nano", batch=1, context_length=8)
    for name in point.alternatives:
        alternative = alternatives.Alternative(name, workload, "cpu")
        for _ in range(3):  # torch's puts gradients into buckets anew after the first, and then says so
            alternative.run()
        if hasattr(alternative.model, "bucket_bytes"):
            sizes = alternative.model.bucket_bytes
        else:
            text = alternative.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
            sizes = [int(size) for size in text.split(",")]
        yield {"name": name, "sizes": sizes}


def test_buckets_of_one_size_are_the_same_buckets_on_both_sides():
    sizes = {row["name"]: row["sizes"] for row in _measured("layouts")}
    assert sizes["bucketed@2"] == sizes["torch@2"]
    assert sizes["bucketed"] == sizes["torch"]
    assert sizes["bucketed@25"] == sizes["torch@25"]
    assert len(sizes["torch"]) > len(sizes["torch@25"])  # the default's first bucket is smaller


def test_collectives_run_during_backward_for_overlapping_wrappers_and_not_for_the_others():
    """By the profiler's trace, as the page shows it."""
    rows = _measured("timeline")
    during = {}
    for row in rows:
        if row.get("lane") == "all-reduce":
            during.setdefault(row["implementation"], []).append(row["during_s"] > 0)
    assert {name: any(some) for name, some in during.items() if name != "torch"} == {
        "naive": False,
        "flat": False,
        "overlapped": True,
        "bucketed": True,
    }
    assert {name: len(some) for name, some in during.items() if name not in ("bucketed", "torch")} == {
        "naive": 39,
        "flat": 1,
        "overlapped": 39,
    }
    lanes = [row["lane"] for row in rows if row["implementation"] == "naive" and "lane" in row]
    assert set(lanes) == {"forward", "backward", "all-reduce", "optimizer"}


def test_what_averaging_adds_to_a_step_is_counted():
    """Every wrapper averages the same bytes; only `flat` copies all of them together and back; the profiler agrees."""
    rows = _measured("timeline")
    counted = {row["implementation"]: row for row in rows if "collectives" in row}
    seen = Counter(row["implementation"] for row in rows if row.get("lane") == "all-reduce")
    assert {name: row["collectives"] for name, row in counted.items()} == dict(seen)
    (n_bytes,) = {row["collective_bytes"] for row in counted.values()}
    assert n_bytes == 4 * n_parameters(SIZES["nano"])
    times = {name: round(row["added_bytes"] / n_bytes, 2) for name, row in counted.items()}
    divided = 2  # read and written once, in place or into the bucket
    assert times == dict.fromkeys(times, divided) | {"flat": divided + 2 * 2}  # copied together, and copied back


def test_bucketed_needs_no_more_memory_than_torchs_gradient_views():
    rows = _measured("memory")
    peak = {row["implementation"]: row["peak_bytes"] for row in rows}
    assert peak["bucketed"] <= 1.01 * peak["torch"]
    assert peak["flat"] > peak["bucketed"]


def _last_to_let_go(point):
    """Another thread is the last to hold a tensor of the very first step, as one of gloo's may be."""
    held, run = [True], alternatives.Alternative.run

    def step(alternative):
        run(alternative)
        if held == [True]:
            held[:] = [torch.empty(2**24)]
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()

    with patch.object(alternatives.Alternative, "run", step):
        yield from measure_point(point)


def test_what_another_thread_frees_is_no_part_of_a_peak():
    usual, held = ({r["implementation"]: r["peak_bytes"] for r in _measured(n)} for n in ("memory", "last to let go"))
    assert held["flat"] == pytest.approx(usual["flat"], rel=0.01)


def test_accumulation_compares_every_with_last():
    rows = _measured("accumulation")
    assert [(row["implementation"], row["synchronized"]) for row in rows] == [
        (name, kind) for name in ("torch", "bucketed") for kind in ("every", "last")
    ]


@contextmanager
def _forgetting(self):
    yield
    self.zero_grad()


def _forgets_micro_batches(point):
    """Under no_sync, what was accumulated is lost."""
    with patch.object(BucketedDDP, "no_sync", _forgetting):
        yield from measure_point(point)


def test_an_accumulated_step_that_is_not_the_mean_gets_no_time():
    rows = _measured("forgotten micro-batches")
    (wrong,) = [row for row in rows if row["check"] != "ok"]
    assert (wrong["implementation"], wrong["synchronized"]) == ("bucketed", "last")
    assert re.match(r"wrong: rank 0, \S+, element \d+: expected \S+, got \S+$", wrong["check"])
    assert "seconds" not in wrong


@pytest.mark.parametrize(
    ("module", "point"),
    [
        (worker, _point("memory", ["torch"], device="cuda", world_size=4)),
        (
            gradient_buckets,
            gradient_buckets.BucketsPoint(
                workload="nano", batch=1, sequence=8, backend="gloo", device="cuda", world_size=4
            ),
        ),
    ],
    ids=["data_parallel", "gradient_buckets"],
)
def test_ranks_that_share_gpus_work_on_their_own_one(monkeypatch, module, point):
    """Clocks put their marks into the current device's stream."""

    class Reached(Exception):
        pass

    def set_device(device):
        raise Reached(device)

    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(Reached, match="cuda:1"):
        list(module.measure_point(point))


def test_on_a_gpu_backward_ends_before_what_the_wrapper_launches_when_it_finishes():
    """Microseconds of a made-up step of naive: backward's kernel, then a copy and a collective."""

    def event(name, cat, ts, dur, **args):
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}

    def kernel(name, launched, ts, dur):
        return [
            event("cudaLaunchKernel", "cuda_runtime", launched, 1, correlation=launched),
            event(name, "kernel", ts, dur, correlation=launched),
        ]

    events = [
        event("forward", "user_annotation", 0, 10),
        event("backward", "user_annotation", 10, 50),
        event(timeline.FINISH, "user_annotation", 30, 30),
        event("optimizer", "user_annotation", 60, 10),
        *kernel("gemm", 1, 2, 10),
        *kernel("gemm", 11, 12, 20),
        *kernel("vectorized_elementwise_kernel", 31, 35, 5),
        *kernel("ncclDevKernel_AllReduce_Sum_f32", 32, 40, 40),
        *kernel("vectorized_elementwise_kernel", 33, 80, 5),
        *kernel("multi_tensor_apply_kernel", 61, 85, 5),
    ]
    trace = {"traceEvents": events}
    boxes = timeline._boxes(Profile(trace, 1e-4))
    (backward,), (collective,) = boxes["backward"], boxes["all-reduce"]
    assert backward[1] - backward[0] == pytest.approx(20e-6)
    assert collective[0] - backward[1] == pytest.approx(8e-6)


def _gpu_events(*others):
    def event(name, category, start, duration, **arguments):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": arguments}

    events = [event(name, "user_annotation", start, 10) for name, start in (("forward", 10), ("backward", 20))]
    for index, start in enumerate((11, 21, 31)):
        events.append(event("cudaLaunchKernel", "cuda_runtime", start, 1, correlation=index))
        events.append(event("gemm", "kernel", start + 1, 2, correlation=index))
    events.append(event("optimizer", "user_annotation", 30, 10))
    return {"traceEvents": events + [event(*other) for other in others]}


def test_on_a_shared_gpu_gloos_collectives_are_seen_and_a_barrier_is_none_of_them():
    trace = _gpu_events(
        ("ncclDevKernel_AllReduce_Sum_f32", "kernel", 5, 2),
        ("gloo:all_reduce", "cpu_op", 22, 4),
        ("aten::mm", "cpu_op", 11, 1),
    )
    boxes = timeline._boxes(Profile(trace, 1e-4))
    ((start, end),) = boxes["all-reduce"]
    assert end - start == pytest.approx(4e-6)
    assert start - boxes["forward"][0][0] == pytest.approx(10e-6)


def test_a_timeline_without_collectives_says_so(monkeypatch):
    trace = _gpu_events()
    monkeypatch.setattr(timeline, "profile_call", lambda *_, **__: Profile(trace, 1e-4))
    monkeypatch.setattr(timeline, "_run", lambda step: None)
    first, *boxes = timeline.timeline_rows(SimpleNamespace(implementation="torch"), "cpu", 1)
    assert "none of the collectives" in first["not_measured"]
    assert [row["lane"] for row in boxes] == ["forward", "backward", "optimizer"]


def test_the_timeline_is_of_the_step_of_median_length_and_of_no_freak(monkeypatch):
    steps = iter([3.0, 144.0, 1.0, 2.0, 5.0])

    def boxes(profile):
        end = profile.seconds
        return {"forward": [(0.0, 1.0)], "backward": [(1.0, 1.0)], "all-reduce": [], "optimizer": [(1.0, end)]}

    monkeypatch.setattr(timeline, "profile_call", lambda *_, **__: Profile({}, next(steps)))
    monkeypatch.setattr(timeline, "_boxes", boxes)
    monkeypatch.setattr(timeline, "_run", lambda step: None)
    rows = list(timeline.timeline_rows(SimpleNamespace(implementation="torch"), "cpu", 5))
    assert rows[-1]["lane"] == "optimizer"
    assert rows[-1]["start_s"] + rows[-1]["duration_s"] == 3.0


def test_a_point_whose_alternatives_are_all_wrong_keeps_their_reasons(monkeypatch):
    wrong = [{"implementation": "torch", "check": "wrong: error 1e+00"}]
    monkeypatch.setattr(worker, "_right_ones", lambda *_: ({}, {"torch": wrong[0]}))
    point = STUDY.points(STUDY.profiles["smoke"], describe_machine())[0]
    assert list(worker._phases(point, None, "cpu")) == wrong


def test_points_take_nccl_with_a_gpu_a_rank_and_gloo_where_ranks_share_one():
    machine = describe_machine()
    gpu = {"name": "Some GPU", "memory_bytes": 2**36, "compute_capability": "9.0", "dense_bf16_peak_tflops": None}
    config = STUDY.profiles["smoke"]
    for n_gpus, backend, device in ((0, "gloo", "cpu"), (1, "gloo", "cuda"), (2, "nccl", "cuda")):
        there = machine.model_validate(machine.model_dump() | {"gpus": [gpu] * n_gpus})
        assert {(p.backend, p.device) for p in STUDY.points(config, there)} == {(backend, device)}


def test_copies_of_a_workload_are_equal_and_apart():
    workload = workload_named("nano", batch=1, context_length=8).copied()
    one, other = (dict(workload.build().named_parameters()) for _ in range(2))
    assert all(torch.equal(value, other[name]) and value is not other[name] for name, value in one.items())
    with torch.no_grad():
        next(iter(one.values())).add_(1)
    assert not torch.equal(next(iter(one.values())), next(iter(other.values())))
    assert torch.equal(next(iter(dict(workload.build().named_parameters()).values())), next(iter(other.values())))


def test_copies_that_do_not_fit_are_skipped_with_what_they_need(monkeypatch):
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 2**30)
    machine = describe_machine().model_copy(update={"gpus": []})
    only = {which: ["resnet50"] for which in ("workloads", "accumulation_workloads")}
    config = STUDY.profiles["quick"].model_copy(update=only)
    points = STUDY.points(config, machine)
    reasons = [STUDY.skip_reason(point, machine) for point in points]
    assert reasons[0] == "10 copies need 6.1 GiB, 1 GiB available"
    (accumulating,) = [point for point in points if point.sweep == "accumulation"]
    needed = 2 * (study_module.RANK_BYTES + 5 * 3 * 4 * RESNET50_PARAMETERS)  # two of each, and the gate's
    assert STUDY.skip_reason(accumulating, machine) == f"5 copies need {format_bytes(needed)}, 1 GiB available"


def test_the_published_grid_fits_on_two_gpus_of_80_gb():
    gpu = {"name": "Some GPU", "memory_bytes": 80 * 10**9, "compute_capability": "9.0", "dense_bf16_peak_tflops": None}
    machine = describe_machine()
    machine = machine.model_validate(machine.model_dump() | {"gpus": [gpu] * 2})
    points = STUDY.points(STUDY.profiles["paper"], machine)
    assert {STUDY.skip_reason(point, machine) for point in points} == {None}


def test_a_subset_of_implementations_makes_only_points_that_compare_something():
    config, machine = STUDY.profiles["smoke"], describe_machine()
    points = STUDY.points(config.model_copy(update={"implementations": ["naive"]}), machine)
    assert [point.sweep for point in points] == ["implementations", "timeline", "memory"]
    points = STUDY.points(config.model_copy(update={"implementations": ["bucketed"]}), machine)
    (swept,) = [point for point in points if point.sweep == "buckets"]
    assert swept.alternatives == ("bucketed", "bucketed@1.0")


def test_a_point_refuses_a_device_that_is_not_there():
    machine = describe_machine().model_copy(update={"gpus": []})
    assert STUDY.skip_reason(_point("memory", ["torch"], device="cuda"), machine) == (
        "needs a CUDA device, and there is none"
    )


@pytest.mark.parametrize(("text", "name", "size"), [("torch@5", "torch", 5.0), ("naive", "naive", None)])
def test_names_of_alternatives(text, name, size):
    assert alternatives.split_name(text) == (name, size)


def _measure_without_shared_memory(point):
    def refuse(patience_s):
        raise SharedMemoryUnavailable("none here")

    build.load = refuse
    yield from measure_point(point)


def test_wrappers_over_shared_memory_say_why_where_there_is_none():
    point = _point("implementations", [LOCAL, "naive", *OVER_SHARED_MEMORY])
    tasks = [(_measure_without_shared_memory, point)]
    events = launch(_carry_out, tasks, world_size=2, timeout_s=120)  # ranks ask once
    rows = [event.values for event in events if isinstance(event, Row) and event.rank == 0]
    refused = [row for row in rows if "seconds" not in row]
    assert {row["implementation"] for row in refused} == set(OVER_SHARED_MEMORY)
    assert all("none here" in row["not_measured"] for row in refused)
    assert {row["implementation"] for row in rows if row not in refused} == {LOCAL, "naive"}


def test_shared_memory_is_not_planned_for_gpus():
    gpu = Gpu(name="H100", memory_bytes=80 * 2**30, compute_capability="9.0", dense_bf16_peak_tflops=None)
    machine = describe_machine().model_copy(update={"gpus": [gpu, gpu]})
    planned = {name for point in STUDY.points(STUDY.profiles["quick"], machine) for name in point.alternatives}
    assert planned
    assert not planned & set(OVER_SHARED_MEMORY)


class _Summed(nn.Module):
    """A reader's wrapper: gradients are averaged one by one after backward, but for those that it forgets."""

    def __init__(self, module, forgotten=()):
        super().__init__()
        self.module = module
        self.forgotten = forgotten

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for name, parameter in self.module.named_parameters():
            if name not in self.forgotten:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def test_a_readers_own_wrapper_is_gated_timed_drawn_and_named(tmp_path):
    def forgets_the_norm(module):
        return _Summed(module, ("norm.gain",))

    def mistaken(module):
        return module.nothing_of_the_kind

    # the one that fails comes first: a point begins anew without it
    own = {"mistaken": mistaken, "summed": _Summed, "forgets_the_norm": forgets_the_norm}
    given = {"implementations": ["torch", "naive"], "bucket_workloads": [], "accumulation_workloads": []}
    config = STUDY.profiles["smoke"].model_copy(update=given | {"workloads": [tiny.NAME]})
    run = measure(STUDY, config, profile="smoke", alternatives=own, models=tiny.MODELS, directory=tmp_path)
    assert not set(own) & set(IMPLEMENTATIONS)
    frame = run.frame()
    gates = frame.dropna(subset="check").groupby(["sweep", "implementation"])["check"].first().unstack(0)
    for sweep in ("implementations", "timeline", "memory"):
        assert gates[sweep]["summed"] == "ok"
        assert re.match(r"wrong: rank 0, norm.gain, element \d+: expected", gates[sweep]["forgets_the_norm"])
        assert re.match(r"failed: AttributeError: .*, line \d+", gates[sweep]["mistaken"])
    backward = tables.phases(frame).query("phase == 'backward'")
    assert set(backward["implementation"]) == {LOCAL, "torch", "naive", "summed"}
    figures.bars(backward, x="implementation", y="seconds", x_order=tables.ORDER, hue="workload")
    finding = STUDY.findings(frame, run.coverage())["fastest"]
    assert "summed" in {effect.subject for effect in finding.effects}
    assert "forgets the norm" in finding.caveat or "forgets_the_norm" in finding.caveat
    assert "summed" in set(tables.exposed(frame)["implementation"])


def _perceptron(*widths):
    layers = [layer for n_in, n_out in pairwise(widths) for layer in (nn.Linear(n_in, n_out), nn.Dropout(0.1))]
    return nn.Sequential(*layers), torch.randn(4, widths[0]), torch.randn(4, widths[-1]), nn.functional.mse_loss


def test_a_readers_own_models_are_gated_timed_drawn_and_named_and_a_mistake_costs_no_other(tmp_path):
    def wrong_shape():
        model, _, targets, loss = _perceptron(8, 4, 2)
        return model, torch.randn(4, 9), targets, loss

    def has_a_spare_layer():
        model, *others = _perceptron(8, 2)
        model.spare = nn.Linear(3, 3)
        model.forward = model[0].forward
        return model, *others

    wide = TransformerShape(d_model=8, d_ff=16, n_layers=1, n_heads=2, vocabulary=50)
    own = {"mine": lambda: _perceptron(8, 16, 2), "wide": wide, "wrong_shape": wrong_shape, "spare": has_a_spare_layer}
    given = {"implementations": ["torch", "naive"], "bucket_workloads": [], "accumulation_workloads": []}
    given |= {"workloads": ["wide", "nano"]}  # timeline and memory are those of the first
    config = STUDY.profiles["smoke"].model_copy(update=given)
    run = measure(STUDY, config, profile="smoke", models=own, directory=tmp_path)
    reasons = run.coverage().dropna(subset="reason").set_index("workload")["reason"]
    assert re.search(r"shapes cannot be multiplied .*line \d+ of test_data_parallel_worker.py", reasons["wrong_shape"])
    assert re.search(r"a gradient for every parameter .*got none for spare.weight", reasons["spare"])
    assert set(reasons.index) == {"wrong_shape", "spare"}
    frame = run.frame()
    assert set(frame["check"].dropna()) == {"ok"}
    backward = tables.phases(frame).query("phase == 'backward'")
    assert set(backward["workload"]) == {"nano", "mine", "wide"}
    plot = figures.bars(backward, x="implementation", y="seconds", x_order=tables.ORDER, hue="workload")
    assert "mine" in [text.get_text() for text in plot.figure.legends[0].get_texts()]
    finding = STUDY.findings(frame, run.coverage())["fastest"]
    assert {"mine", "wide"} <= set(finding.table["workload"])
    assert frame.loc[frame["workload"] == "mine", "is_own_model"].all()


def _heads_of_its_own(point):
    """The second rank leaves one of three heads unused."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1) for _ in range(3)])
    used = model if dist.get_rank() == 0 else [model[0], model[2]]
    try:
        local_means(dict(model.named_parameters()), lambda: sum(head(torch.ones(2)) for head in used).backward())
    except ValueError as error:
        yield {"refused": str(error)}


def test_ranks_that_leave_different_parameters_unused_are_refused_together():
    (row,) = _measured("heads of its own")
    assert row["refused"] == "expected the same gradients on every rank; they differ at 1.weight: one (here)"


SPOILED = {
    "wrong wrapper": (_wrong_wrapper, _point("implementations", [LOCAL, "naive", "flat"])),
    "layouts": (
        _layouts,
        _point("buckets", ["torch", "bucketed", "torch@2", "bucketed@2", "torch@25", "bucketed@25"], workload="nano"),
    ),
    "last to let go": (_last_to_let_go, _point("memory", ["flat"], workload="nano")),
    "heads of its own": (_heads_of_its_own, POINTS["implementations"]),
    "forgotten micro-batches": (_forgets_micro_batches, POINTS["accumulation"]),
    **{f"all wrong: {point.sweep}": (_no_wrapper_averages, point) for point in ALL_WRONG},
}
"""What ranks do besides measuring: a function and its point, by name."""
