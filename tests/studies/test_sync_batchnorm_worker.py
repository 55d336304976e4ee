"""What ranks measure of the SyncBatchNorm lab: gate first, and a wrong layer gets no time."""

import re
from contextlib import closing
from functools import cache

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from labkit.lab import capacity, figures
from labkit.lab.runs.measure import measure
from labkit.machine import describe_machine
from labkit.parallel import sync_batchnorm
from labkit.parallel.launch import Row, launch, run_ranks
from labkit.studies.sync_batchnorm import alternatives, tables
from labkit.studies.sync_batchnorm.alternatives import (
    ALL_REDUCES,
    ALONE,
    ALTERNATIVES,
    COLLECTIVES,
    LAYERS,
    LOCAL,
    OWN,
    TORCH,
    TWO_COLLECTIVES,
    WHOLE,
    Bare,
    Batch,
    Layer,
)
from labkit.studies.sync_batchnorm.study import STUDY
from labkit.studies.sync_batchnorm.worker import LAYER, PHASES, SyncBatchNormPoint, measure_point
from tests.parallel.sync_batchnorm_cases import collectives_of

SMALL = SyncBatchNormPoint(
    world_size=2,
    backend="gloo",
    sweep=LAYER,
    batch=9,
    features=6,
    alternatives=ALTERNATIVES,
    calls=2,
    warmup=1,
    repeats=3,
)


def _rows(measure, point):
    with closing(launch(measure, [point], world_size=point.world_size, timeout_s=60)) as events:
        seen = list(events)
    assert seen[-1].status == "ok", seen[-1].reason
    return [(event.rank, event.values) for event in seen if isinstance(event, Row)]


@cache
def _small():
    return _rows(measure_point, SMALL)


def test_every_alternative_is_checked_and_timed_by_phase_on_every_rank():
    timed = [(rank, row) for rank, row in _small() if "seconds" in row]
    measured = {(rank, row["alternative"], row["phase"]) for rank, row in timed}
    everywhere = [name for name in ALTERNATIVES if name not in (TORCH, WHOLE)]
    expected = {(rank, name, phase) for rank in (0, 1) for name in everywhere for phase in PHASES}
    assert measured == expected | {(0, WHOLE, phase) for phase in PHASES}
    for _, row in timed:
        assert row["check"] == "ok"
        assert row["error"] < 1e-5
        assert len(row["seconds"]) == 3
        assert min(row["seconds"]) > 0


def test_what_torch_says_of_a_cpu_is_recorded():
    refused = {row["alternative"]: row["refused"] for _, row in _small() if "refused" in row}
    assert list(refused) == [TORCH]
    assert "GPU" in refused[TORCH]


def test_memory_is_the_input_and_a_few_numbers_a_feature():
    ranks, rows = zip(*[(rank, row) for rank, row in _small() if "saved_bytes" in row], strict=True)
    assert set(ranks) == {0}
    found = {row["alternative"]: row for row in rows}
    assert set(found) == set(LAYERS) - {TORCH}
    for name, row in found.items():
        n = 9 if name == WHOLE else 4
        assert row["saved_bytes"] - row["beside_input_bytes"] == 4 * n * 6
        assert row["beside_input_bytes"] <= 5 * 4 * 6 + 8
        assert row["peak_bytes"] >= 4 * 4 * n * 6  # input, output and both gradients
    assert found[OWN]["beside_input_bytes"] <= 4 * 4 * 6 + 8


def test_operators_and_bytes_sent_are_counted_by_phase():
    rows = {(row["alternative"], row["phase"]): row for _, row in _small() if "seconds" in row}
    for name in (OWN, ALONE, LOCAL):
        forward, backward, both = (rows[name, phase]["operators"] for phase in PHASES)
        assert both == forward + backward
    assert rows[OWN, "both"]["operators"] > 5 * rows[LOCAL, "both"]["operators"]
    assert [rows[COLLECTIVES, phase]["sent_bytes"] for phase in PHASES] == [8 * 13, 4 * 12, 8 * 13 + 4 * 12]


def test_collectives_are_one_two_none_and_the_layers_own_alone():
    for found in run_ranks(_kinds_of_collectives, world_size=2, timeout_s=60):
        forward, backward = found[OWN]
        assert (len(forward), len(backward)) == (1, 1)
        assert found[TWO_COLLECTIVES] == [2 * forward, backward]
        assert found[ALONE] == [[], []]
        assert found[COLLECTIVES] == found[OWN], "what is timed alone is what the layer runs"
        assert found[ALL_REDUCES] == [["allreduce_"], ["allreduce_"]]
        assert found["sent"] == found["bare"], "in the same types and sizes"


def _kinds_of_collectives():
    batch = Batch.of_rank(8, 5, seed=0, device="cpu")
    Bare(COLLECTIVES, 5, "cpu").forward()  # the first one finds out how the ranks exchange memory
    found = {}
    for name in (OWN, TWO_COLLECTIVES, ALONE, COLLECTIVES, ALL_REDUCES):
        one = Layer(name, batch) if name in LAYERS else Bare(name, 5, "cpu")
        (_, forward), (_, backward) = collectives_of(one.forward), collectives_of(one.backward)
        found[name] = (forward, backward)
    bare = Bare(COLLECTIVES, 5, "cpu")
    found["bare"] = [[tensor.numel(), str(tensor.dtype)] for tensor in (bare.statistics, bare.sums)]
    return found | {"sent": _sent_by_the_layer(batch)}


def _send_through(gather, add):
    """Put other functions in the place of the layer's collectives, for the rest of this rank's life."""
    for module in (sync_batchnorm, alternatives):
        module._gather, module._sum_over_ranks = gather, add


def _sent_by_the_layer(batch):
    sent = []

    def gather(statistics, group):
        sent.append([statistics.numel(), str(statistics.dtype)])
        return statistics.view(1, -1)

    def add(sums, group):
        sent.append([sums.numel(), str(sums.dtype)])

    _send_through(gather, add)
    layer = Layer(OWN, batch)
    layer.forward()
    layer.backward()
    return sent


def _forgets_the_other_ranks(point):
    """labkit's layer without any collective, under its own name."""
    _send_through(alternatives._gather_nothing, alternatives._sum_nothing)
    yield from measure_point(point)


def _forgets_the_backward_pass(point):
    _send_through(sync_batchnorm._gather, alternatives._sum_nothing)
    yield from measure_point(point)


@pytest.mark.parametrize("broken", [_forgets_the_other_ranks, _forgets_the_backward_pass])
def test_a_layer_that_forgets_the_other_ranks_gets_no_time(broken):
    rows = _rows(broken, SMALL)
    for name in (OWN, TWO_COLLECTIVES, COLLECTIVES):
        found = [row for _, row in rows if row["alternative"] == name]
        assert len(found) == 2, "one row a rank, and no more"
        assert all(row["check"].startswith("wrong: ") and "seconds" not in row for row in found)
    assert any("seconds" in row for _, row in rows if row["alternative"] == LOCAL)


def test_a_whole_batch_that_normalizes_by_local_rows_is_wrong():
    def errors():
        batch = Batch.of_rank(8, 5, seed=0, device="cpu")
        layer = Layer(LOCAL, batch)
        right = alternatives.check_layer(layer, batch)[0]
        layer.name = OWN  # held against the whole batch
        return right, alternatives.check_layer(layer, batch)[0]

    for right, wrong in run_ranks(errors, world_size=2, timeout_s=60):
        assert right < alternatives.TOLERANCE < 0.1 < wrong


def _errors_without_a_rank():
    """Of the layer and of the bare collectives, by phase, without what each rank sends; and with everything."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gather, add = sync_batchnorm._gather, sync_batchnorm._sum_over_ranks
    batch = Batch.of_rank(2 * ranks, 3, seed=0, device="cpu")

    def errors():
        return [
            alternatives.check_layer(Layer(OWN, batch), batch)[0],
            alternatives.bare_gate(Bare(COLLECTIVES, 3, "cpu")),
        ]

    found = {"nobody": errors()}
    for left_out in range(ranks):

        def gather_without(statistics, group, left_out=left_out):
            rows = gather(statistics, group)
            return torch.cat([rows[:left_out], rows[left_out + 1 :]])

        def add_without(sums, group, left_out=left_out):
            add(sums.zero_() if rank == left_out else sums, group)

        _send_through(gather_without, add)
        found[f"forward {left_out}"] = errors()
        _send_through(gather, add_without)
        found[f"backward {left_out}"] = errors()
    return found


def test_each_rank_left_out_of_a_layer_or_a_bare_collective_is_seen():
    """Of five ranks, one of which has the mean of all, and some no gradient in what is timed."""
    for found in run_ranks(_errors_without_a_rank, world_size=5, timeout_s=60):
        right = found.pop("nobody")
        assert right[0] < alternatives.TOLERANCE / 10
        assert right[1] == "ok"
        assert len(found) == 10
        for layer, bare in found.values():
            assert layer > 10 * alternatives.TOLERANCE
            assert bare.startswith("wrong: rank ")


def test_the_whole_batch_is_the_same_on_every_rank_and_rows_are_shared_out():
    def batches():
        batch = Batch.of_rank(7, 2, seed=3, device="cpu")
        return batch.whole.tolist(), batch.mine.start, batch.mine.stop, float(batch.gradient.sum())

    first, second, third = run_ranks(batches, world_size=3, timeout_s=60)
    assert first[0] == second[0] == third[0]
    assert [one[1:3] for one in (first, second, third)] == [[0, 2], [2, 4], [4, 7]]
    assert first[3] == 3 * 2  # ones for half of seven rows
    assert torch.tensor(first[0])[4:].mean() > torch.tensor(first[0])[:2].mean()


def test_what_does_not_fit_is_skipped_with_the_reason(monkeypatch):
    machine = describe_machine().model_copy(update={"gpus": []})
    points = STUDY.points(STUDY.profiles["smoke"], machine)
    assert all(STUDY.skip_reason(point, machine) is None for point in points)
    config = STUDY.profiles["smoke"].model_copy(update={"world_sizes": [64]})
    reasons = [STUDY.skip_reason(point, machine) for point in STUDY.points(config, machine)]
    assert set(reasons) == {"plain BatchNorm needs two rows a rank, and there are fewer"}
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 2**20)
    assert STUDY.skip_reason(points[1], machine).endswith("1 MiB available")
    config = config.model_copy(update={"device": "cuda"})
    assert "CUDA" in STUDY.skip_reason(STUDY.points(config, machine)[0], machine)


@pytest.mark.parametrize("wrong", [{"world_sizes": [1]}, {"calls": 0}, {"batches": [2]}])
def test_impossible_parameters_are_refused(wrong):
    config = STUDY.profiles["smoke"]
    with pytest.raises(ValidationError):
        type(config).model_validate(config.model_dump() | wrong)


def test_a_readers_own_layer_is_gated_timed_drawn_and_named(tmp_path):
    def forgets_the_others(features):
        return nn.BatchNorm1d(features)

    def mistaken(features):
        return nn.BatchNorm1d(features).nothing_of_the_kind

    own = {"mine": sync_batchnorm.SyncBatchNorm, "forgets_the_others": forgets_the_others, "mistaken": mistaken}
    small = {"batches": [8], "features": [4], "alternatives": [OWN, LOCAL]}
    config = STUDY.profiles["smoke"].model_copy(update=small)
    run = measure(STUDY, config, profile="smoke", alternatives=own, directory=tmp_path)
    assert not set(own) & set(LAYERS)
    frame = run.frame()
    gates = frame[frame["sweep"] == LAYER].groupby("alternative")["check"].first()
    where = r"; rank 0, [a-z_ ]+(, row \d)?, feature \d: expected \S+, got \S+$"
    assert gates["forgets_the_others"].startswith("wrong: error")
    assert re.search(where, gates["forgets_the_others"])
    assert re.match(r"failed: AttributeError: .*, line \d+", gates["mistaken"])
    table = tables.times(frame, phase="both")
    assert set(table["alternative"]) == {OWN, LOCAL, "mine"}
    figures.lines(table, x="features", y="seconds", hue="alternative", hue_order=ALTERNATIVES, facet="panel")
    findings = STUDY.findings(frame, run.coverage())
    assert "mine" in {effect.subject for effect in findings["against_torch"].effects}
    assert "forgets the others" in findings["price"].caveat
