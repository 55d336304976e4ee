"""The limits lab: every limit is gated and timed, and what is said follows the rates of a made-up machine."""

import json
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
import torch.distributed as dist

from labkit.costs.calibration import ALL_REDUCE, BURST, DOUBLING, MESSAGE, ROW
from labkit.lab.calibration import _is_enough, calibration_of, calibration_told, newest_calibration
from labkit.lab.runs.measure import measure
from labkit.lab.runs.store import Run
from labkit.machine import Gpu, describe_machine
from labkit.parallel.launch import run_ranks
from labkit.studies.limits import exchange, tables, worker
from labkit.studies.limits.study import STUDY
from tests.studies.answering import check_headline

FLOPS_PER_S, BYTES_PER_S, CALL_S = 1e11, 1e10, 1e-6
BEGIN_S = 5e-5
MIB = 2**20


def _rows(sweep, repeats=12, **row):
    base = {"sweep": sweep, "device": "cpu", "dtype": "float32", "rank": 0, "check": "ok", "world_size": 1}
    return [base | row | {"repeat": i} for i in range(repeats)]


def _frame(*, add=1.0, threads=2.0, cache=5.0):
    """A machine with these rates: an addition takes `add` times a copy's traffic, `threads` times as fast with all."""
    rows = []
    for size in (16, 64, 256, 1024):
        flops = 2 * size**3
        rows += _rows("products", shape=f"square {size}", dimensions=str(size), flops=flops, bytes=12 * size**2,
                      seconds=CALL_S + flops / FLOPS_PER_S)  # fmt: skip
    for n_bytes in (64, 2**16, 2**28):
        for operation, arrays, factor in (("copy", 2, 1.0), ("add", 3, add), ("new", 3, add)):
            rate = BYTES_PER_S * (cache if n_bytes < MIB else 1)
            rows += _rows("memory", n_bytes=n_bytes, operation=operation, bytes=arrays * n_bytes,
                          seconds=CALL_S + factor * arrays * n_bytes / rate)  # fmt: skip
    for operation, flops, moved in (("scores", 1e9, 1e6), ("softmax", 1e6, 1e8), ("scalar", 1, 4)):
        limit = max(flops / FLOPS_PER_S, moved / BYTES_PER_S, CALL_S)
        rows += _rows("operators", model="mini", batch=4, context_length=128, operator=operation, flops=flops,
                      bytes=moved, seconds=1.2 * limit)  # fmt: skip
    for number, seconds in ((1, 1.0), (2, 1 / threads)):
        rows += _rows("threads", operation="product", threads=number, seconds=seconds)
    for operators in (4, 32, 128):
        rows += _rows("autograd", operators=operators, seconds=BEGIN_S + 3e-6 * operators)
    flops, of_one = 2 * 1024**3, CALL_S + 2 * 1024**3 / FLOPS_PER_S
    rows += [
        row | {"world_size": 2}
        for row in _rows("products", shape="square 1024", dimensions="1024", flops=flops, bytes=1, seconds=2 * of_one)
    ]
    for way, alpha, beta in (("gloo", 1e-4, 1e-9), ("shared memory", 1e-5, 1e-10)):
        for n_bytes in (1000, MIB, 16 * MIB):
            message = alpha + beta * n_bytes
            steps = {
                ALL_REDUCE: message,
                MESSAGE: CALL_S + message,
                ROW: CALL_S + 4 * message,
                BURST: CALL_S + message,
                DOUBLING: CALL_S + message,
            }
            for what, seconds in steps.items():
                rows += _rows("exchange", way=way, what=what, n_bytes=n_bytes, world_size=2, seconds=seconds)
    return pd.DataFrame(rows)


def _findings(frame):
    return STUDY.findings(frame, pd.DataFrame())


def test_the_rates_of_a_machine_are_found_again():
    flops_per_s, bytes_per_s, per_call = tables.limits(_frame())
    assert flops_per_s == pytest.approx(FLOPS_PER_S, rel=0.02)
    assert bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.02)
    assert per_call == pytest.approx(CALL_S, rel=0.02)
    found = tables.exchanges(_frame()).set_index(["way", "what"])
    assert len(found) == 6
    assert found.loc["gloo", "alpha_s"].tolist() == pytest.approx([1e-4] * 3, rel=0.05)
    assert found.loc["shared memory", "bytes_per_s"].tolist() == pytest.approx([1e10] * 3, rel=0.05)
    assert found.loc[("gloo", MESSAGE), "call_s"] == pytest.approx(CALL_S, rel=0.05)


def test_each_operator_is_held_against_the_limit_that_binds_it():
    table = tables.operators(_frame()).set_index("operator")
    assert table["bound"].to_dict() == {"scores": "arithmetic", "softmax": "memory", "scalar": "the call"}
    assert table["measured_over_predicted"].tolist() == pytest.approx([1.2] * 3, rel=0.02)


def test_where_steps_run_on_a_gpu_its_memory_and_calls_are_told():
    cpu = _frame()
    on_gpu = cpu["sweep"].isin(["operators", "memory"]) | ((cpu["sweep"] == "products") & (cpu["world_size"] == 1))
    gpu = cpu[on_gpu].assign(device="cuda", seconds=cpu["seconds"].where(cpu["bytes"] > 2**20, 7 * cpu["seconds"]) / 2)
    frame = pd.concat([cpu[cpu["sweep"] != "operators"], gpu], ignore_index=True)
    assert tables.call_s(frame) == pytest.approx(7 / 2 * CALL_S, rel=0.02)
    findings = _findings(frame)
    assert "float32 products reach 200 GFLOP/s" in findings["products"].headline
    assert findings["calls"].headline.startswith("A call costs 3.5")
    assert findings["memory"].headline.startswith("Memory: the longest additions move 20 GB/s")
    assert set(findings["memory"].table["device"]) == {"cpu", "cuda"}
    assert findings["memory"].why is None
    copies = _rows("memory", device="cuda", n_bytes=10**9, operation="from the GPU, pinned", bytes=1e9, seconds=0.04)
    frame = pd.concat([frame, pd.DataFrame(copies)], ignore_index=True)
    assert "move at most 25 GB/s from the GPU, pinned" in _findings(frame)["memory"].why
    assert tables.limits(frame) == tables.limits(pd.concat([cpu[cpu["sweep"] != "operators"], gpu]))


def test_findings_follow_the_rates():
    findings = _findings(_frame())
    assert findings["products"].headline.startswith("Arithmetic, from 64 rows on")
    assert findings["memory"].headline.startswith("Memory: the longest additions move 10 GB/s")
    assert findings["threads"].headline == "Yes: work with two threads is 2 times faster than with one."
    assert "as many products as one" in findings["threads"].also
    assert "64 KiB" not in findings["calls"].headline
    assert "takes 50 µs to begin, and 3 µs for each operator" in findings["calls"].why
    assert _findings(_frame(add=4.0))["memory"].headline.startswith("Not memory alone")
    assert _findings(_frame(threads=1.0))["threads"].verdict == "no clear difference"
    assert _findings(_frame(threads=0.5))["threads"].verdict == "no"
    unlike = [row for n, s in ((1, 1.0), (2, 1.0)) for row in _rows("threads", operation="copy", threads=n, seconds=s)]
    slower_in_one = _findings(pd.concat([_frame(threads=0.5), pd.DataFrame(unlike)], ignore_index=True))["threads"]
    assert slower_in_one.verdict == "no"
    check_headline(slower_in_one.headline)


def test_every_number_of_threads_is_told_and_the_best_one_named():
    many = _rows("threads", operation="product", threads=16, seconds=0.8)
    finding = _findings(pd.concat([_frame(threads=4.0), pd.DataFrame(many)], ignore_index=True))["threads"]
    assert "work with two threads is 4 times faster than with one" in finding.headline
    assert finding.table["threads"].tolist() == [2, 16]


def test_gpus_of_several_ranks_exchange_by_nccl():
    machine = describe_machine()
    card = Gpu(name="made up", memory_bytes=2**34, compute_capability="9.0", dense_bf16_peak_tflops=None)
    config = STUDY.profiles["quick"].model_copy(update={"ranks": [2, 4]})
    for gpus, ranks in (([], []), ([card], []), ([card] * 2, [2]), ([card] * 4, [2, 4])):
        points = STUDY.points(config, machine.model_copy(update={"gpus": gpus}))
        by_nccl = [point for point in points if point.backend == "nccl"]
        assert [(point.sweep, point.device, point.world_size) for point in by_nccl] == [
            ("exchange", "cuda", number) for number in ranks
        ]


def test_the_regime_of_a_step_is_the_limit_that_takes_longest():
    table = tables.regimes(_frame()).set_index("model")
    parts = table[["arithmetic_s", "memory_s", "calls_s"]]
    assert (parts.idxmax(axis=1).str.removesuffix("_s") == table["regime"]).all()
    assert table.loc["10B", "regime"] == "arithmetic"
    assert (parts.loc["10B"] > parts.loc["nano"]).all()


def test_every_limit_is_measured_and_right_and_makes_the_calibration(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.lab.calibration.runs_directory", lambda: tmp_path)
    config = STUDY.profiles["smoke"].model_copy(
        update={"repeats": 2, "warmup": 0, "ranks": [2], "copy_sizes_bytes": [64, 2**20], "matmul_sizes": [32, 512]}
    )
    run = measure(STUDY, config, profile="quick", directory=tmp_path / "limits")
    assert set(run.coverage()["status"]) <= {"ok", "skipped"}
    frame = run.frame()
    assert set(frame["check"].dropna()) == {"ok"}
    assert {"products", "memory", "operators", "threads", "autograd", "exchange"} <= set(frame["sweep"])
    assert (frame["seconds"] > 0).all()
    assert len(tables.operators(frame)) == 10
    found = calibration_of(run)
    assert replace(newest_calibration(run.header.machine), is_disturbed=False) == found
    assert {one.ranks for one in found.rates if one.device == "cpu" and one.autograd} == {1, 2}
    assert {one.way for one in found.transports} >= {"gloo"}
    for other in ({"host": "another"}, {"instructions": "AVX1024"}):
        assert newest_calibration(run.header.machine.model_copy(update=other)) is None
    assert newest_calibration(run.header.machine, within=timedelta(0)) is None
    _a_later_run_is_passed_over_if_it_is_too_small_or_disturbed(run, found)


def _a_later_run_is_passed_over_if_it_is_too_small_or_disturbed(run, found):
    header, *lines = run.path.read_text().splitlines()
    machine, later = run.header.machine, run.path.with_name(f"{run.path.stem}x.jsonl")
    quiet = {"average": 0.0, "other_measurements": 0, "busy_cores": 0.0, "stolen_cores": 0.0}

    def write(path, load, **changed):
        records = map(json.loads, lines)
        ends = [line | {"load": load, "beats": []} if line["kind"] == "end" else line for line in records]
        path.write_text("".join(json.dumps(line) + "\n" for line in [json.loads(header) | changed, *ends]))

    write(run.path, quiet)
    planned = json.loads(header)["planned"]
    no_exchange = {point: fields for point, fields in planned.items() if fields["sweep"] != "exchange"}
    in_full = {point: fields | {"dtype": "float32"} for point, fields in planned.items()}
    small = {
        point: fields | ({"sizes": [32]} if fields["sweep"] == "products" else {}) for point, fields in planned.items()
    }
    for changed in ({"profile": "smoke"}, {"planned": in_full}, {"planned": small}):
        write(later, quiet, **changed)
        assert newest_calibration(machine) == found
    assert not _is_enough(Run(run.path, run.header.model_copy(update={"planned": no_exchange}), [], {}), machine)
    write(later, quiet | {"other_measurements": 1})
    assert newest_calibration(machine) == found
    write(run.path, quiet | {"other_measurements": 1})
    newest = newest_calibration(machine)  # all were disturbed
    assert (newest.run, newest.is_disturbed, found.is_disturbed) == (later.stem, True, False)
    told = calibration_told(
        Run(run.path, run.header.model_copy(update={"calibration": newest, "lab": "kernels"}), [], {})
    )
    assert "slower or busy" in told


@pytest.mark.parametrize(("noise", "smallest"), [(0.001, 3.0), (0.2, None)])
def test_the_smallest_difference_is_what_an_operator_differs_from_itself_by(noise, smallest):
    rng = np.random.default_rng(0)
    rows = [
        row | {"seconds": 1e-3 * np.exp(rng.normal(0, noise))}
        for turn in ("first", "second")
        for row in _rows("itself", 20, operation="product", repetition=turn)
    ]
    found = _findings(pd.DataFrame(rows))["smallest_difference"]
    (percent,) = found.table["smallest_percent"]
    assert percent == pytest.approx(smallest) if smallest else 5 < percent < 30
    assert found.caveat is None
    assert f"{percent:.0f} %" in found.headline
    twice = pd.DataFrame(rows).assign(seconds=lambda frame: np.where(frame["repetition"] == "first", 2e-3, 1e-3))
    assert "product" in _findings(twice)["smallest_difference"].caveat


def _without_each_rank(point):
    """Gates of a point's all-reduces without what a rank adds to them, each rank in turn."""
    own, torchs, found = exchange.all_reduce, dist.all_reduce, []

    def lossy(whole, left_out):
        def reduce(tensor, *arguments, **options):
            return whole(tensor.zero_() if dist.get_rank() == left_out else tensor, *arguments, **options)

        return reduce

    for left_out in range(dist.get_world_size()):
        exchange.all_reduce, dist.all_reduce = lossy(own, left_out), lossy(torchs, left_out)
        try:
            found.append([row["check"] for row in worker.measure_point(point)])
        finally:
            exchange.all_reduce, dist.all_reduce = own, torchs
    return found


def test_each_rank_left_out_of_an_all_reduce_is_seen_and_gets_no_time():
    points = STUDY.points(STUDY.profiles["smoke"], describe_machine())
    point = next(point for point in points if point.sweep == "exchange")
    for found in run_ranks(_without_each_rank, point, world_size=point.world_size):
        assert len(found) == point.world_size
        assert all(gate.startswith("wrong: rank ") for gates in found for gate in gates)


def test_where_the_largest_product_falls_behind_the_best_size_is_told():
    frame = _frame()
    is_largest = (frame["shape"] == "square 1024") & (frame["world_size"] == 1)
    frame.loc[is_largest, "seconds"] *= 3
    headline = _findings(frame)["products"].headline
    assert headline.startswith("Arithmetic, at 256 rows: ")
    assert "nan" not in headline


def test_products_end_where_the_next_would_take_longer_than_there_is_time_for(monkeypatch):
    """As those in 16 bits do on a CPU without instructions for them."""
    monkeypatch.setattr(
        worker, "time_interleaved", lambda calls, **_: {"": [1.0 if calls[""].args[0].shape[0] > 16 else 0.0]}
    )
    point = worker.LimitPoint(sweep="products", dtype="float64", sizes=(16, 512, 1024, 2048), repeats=2, rounds_s=3.0)
    rows = list(worker.measure_point(point))
    timed = {row["shape"]: row["flops"] for row in rows if "seconds" in row}
    assert timed == {"square 16": 2 * 16**3, "square 512": 2 * 512**3, "tall": 2 * 512**3, "batched": 2 * 512**3}
    assert {row["shape"] for row in rows if "not_measured" in row} == {"square 1024", "square 2048"}
    there = pd.DataFrame([row | {"sweep": "products", "dtype": "float64", "device": "cpu"} for row in rows])
    caveat = _findings(pd.concat([_frame(), there], ignore_index=True))["products"].caveat
    assert "square 1024 in float64" in caveat
