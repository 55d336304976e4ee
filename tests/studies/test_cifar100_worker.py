"""The worker of the CIFAR-100 lab on ranks: data from rank 0, the gate, rows by epoch, checkpoints."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from labkit.bench.check import verdict
from labkit.bench.clock import turn_order
from labkit.lab.config import ParameterError, resolve_config
from labkit.lab.runs.measure import measure, resume
from labkit.lab.runs.store import RunFileError
from labkit.machine import describe_machine
from labkit.nn import datasets
from labkit.parallel import sync_batchnorm
from labkit.parallel.data_parallel.reducer import TorchReducer
from labkit.parallel.launch import PointEnd, Row, launch, run_ranks
from labkit.studies.cifar100 import study as study_module
from labkit.studies.cifar100 import worker as worker_module
from labkit.studies.cifar100.data import CIFAR100, DIGITS, hand_out
from labkit.studies.cifar100.study import STUDY
from labkit.studies.cifar100.training import OWN_LOCAL, OWN_SYNC, TORCH_LOCAL, TORCH_SYNC, Recipe
from labkit.studies.cifar100.worker import EPOCH, MEMORY, TOLERANCE, TrainingPoint, train_point
from tests.nn.cifar_archive import records, write_archive

ON_CPU = (OWN_SYNC, OWN_LOCAL, TORCH_LOCAL)
SMALL = TrainingPoint(
    world_size=2,
    backend="gloo",
    dataset=CIFAR100,
    source="made up",
    implementations=ON_CPU,
    epochs=2,
    batch=4,
    accumulation=2,
    learning_rate=0.01,
    momentum=0.5,
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return write_archive(tmp_path_factory.mktemp("archive") / "small.tar.gz")


def _rows(point, worker=train_point):
    rows = []
    for item in launch(worker, [point], world_size=point.world_size, timeout_s=120):
        if isinstance(item, PointEnd):
            assert item.status == "ok", item.reason
        elif isinstance(item, Row):
            rows.append(item.values | {"rank": item.rank})
    return rows


def _synchronizes_nothing(point):
    from labkit.parallel.data_parallel import BucketedDDP

    BucketedDDP.finish_gradient_synchronization = lambda self: self._forget_pass()
    BucketedDDP._gradient_ready = lambda self, index: None
    yield from train_point(point)


def test_every_implementation_is_checked_and_trained_in_turns(archive):
    rows = _rows(replace(SMALL, archive=str(archive)))
    assert {row["check"] for row in rows} == {"ok"}
    for rank in (0, 1):
        mine = [row for row in rows if row["rank"] == rank]
        assert {row["implementation"] for row in mine if row["phase"] == MEMORY} == set(ON_CPU)
        assert all(row["peak_bytes"] > 3 * 4 * 825_988 for row in mine if row["phase"] == MEMORY)
        turns = [(row["epoch"], row["implementation"]) for row in mine if row["phase"] == EPOCH]
        point_id = replace(SMALL, archive=str(archive)).id
        assert turns == [(epoch, name) for epoch in (1, 2) for name in turn_order(ON_CPU, epoch, seed=point_id)]
    trained = [row for row in rows if row["phase"] == EPOCH]
    assert all(row["error"] < 1e-9 and row["epoch_s"] > 0 for row in trained)
    told = [row for row in trained if "accuracy" in row]
    assert {row["rank"] for row in told} == {0}  # only rank 0 logs
    assert all(
        (row["trained"], row["validated"], row["classes"], row["micro_batches"]) == (48, 10, 100, 6) for row in told
    )
    losses = {(row["implementation"], row["epoch"]): row["train_loss"] for row in told}
    assert losses[OWN_LOCAL, 2] == pytest.approx(losses[TORCH_LOCAL, 2], rel=1e-5)
    assert losses[OWN_SYNC, 2] != pytest.approx(losses[OWN_LOCAL, 2], rel=1e-5)


def _taken_up_after_two_epochs(point, checkpoints):
    for row in train_point(point, checkpoints):
        if row.get("epoch") == 2:
            break
    yield from train_point(point, checkpoints)


def test_the_first_epoch_and_the_first_after_a_resume_are_marked_as_warm_up(archive, tmp_path):
    point = replace(SMALL, archive=str(archive), implementations=(OWN_LOCAL,), epochs=4, train_images=8)
    rows = _rows(point, partial(_taken_up_after_two_epochs, checkpoints=tmp_path))
    told = [(row["rank"], row["epoch"], row["warm_up"]) for row in rows if row["phase"] == EPOCH]
    assert sorted(told) == [
        (rank, epoch, first) for rank in (0, 1) for epoch, first in ((1, True), (2, False), (3, True), (4, False))
    ]


def test_a_wrapper_with_wrong_weights_is_not_trained(archive):
    rows = _rows(replace(SMALL, archive=str(archive), implementations=(OWN_LOCAL, TORCH_LOCAL)), _synchronizes_nothing)
    wrong = [row for row in rows if row["check"] != "ok"]
    assert {row["implementation"] for row in wrong} == {OWN_LOCAL}
    assert all(row["error"] > 1e-3 and "epoch_s" not in row for row in wrong)
    assert all(row["check"] == verdict(row["error"], TOLERANCE) for row in wrong)
    assert {row["implementation"] for row in rows if "epoch_s" in row} == {TORCH_LOCAL}


def _errors_without_a_rank():
    """What the gate says of the first updates without what each rank sends, by what is sent; and with everything."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = hand_out(DIGITS, None, 64, "cpu")
    recipe = Recipe(classes=data.classes, batch=4, accumulation=2, learning_rate=0.01, momentum=0.5)
    gather, add, start = sync_batchnorm._gather, sync_batchnorm._sum_over_ranks, TorchReducer.start

    def error():
        sent.clear()
        return worker_module.first_updates_error(OWN_SYNC, recipe, data, 0)

    sent = []
    found = {"everything": error()}
    for left_out in range(ranks):

        def gather_without(statistics, group, left_out=left_out):
            rows = gather(statistics, group)
            return torch.cat([rows[:left_out], rows[left_out + 1 :]])

        def add_without(sums, group, left_out=left_out):
            add(sums.zero_() if rank == left_out else sums, group)

        def start_without(self, vector, op, left_out=left_out):
            sent.append(vector)
            return start(self, vector.zero_() if rank == left_out else vector, op)

        for name, place, missing, whole in (
            ("_gather", sync_batchnorm, gather_without, gather),
            ("_sum_over_ranks", sync_batchnorm, add_without, add),
            ("start", TorchReducer, start_without, start),
        ):
            setattr(place, name, missing)
            try:
                found[f"{name} {left_out}"] = error()
            finally:
                setattr(place, name, whole)
            assert sent or name != "start"
    return found


def test_the_gate_sees_each_rank_that_is_left_out():
    for found in run_ranks(_errors_without_a_rank, world_size=3, timeout_s=120):
        assert found.pop("everything") < TOLERANCE / 100
        assert len(found) == 9
        assert min(found.values()) > 100 * TOLERANCE


def _handed_out(dataset, archive, most):
    data = hand_out(dataset, archive, most, "cpu")
    labels = [part[1].tolist() for part in (data.training, data.validation)]
    sums = [float(part[0].double().sum()) for part in (data.training, data.validation)]
    return [*labels, *sums, data.classes, data.validated, dist.get_rank()]


def test_ranks_share_the_training_set_and_get_shards_for_validation(archive):
    train, test = records(48), records(10, seed=1)
    ranks = run_ranks(_handed_out, CIFAR100, str(archive), 40, world_size=3)
    for trained, _, of_trained, _, classes, validated, _ in ranks:
        assert trained == train[:40, 1].tolist()
        assert of_trained == train[:40, 2:].sum(dtype=float)
        assert (classes, validated) == (100, 10)
    assert [len(shard) for _, shard, *_ in ranks] == [4, 4, 2]
    assert [label for _, shard, *_ in ranks for label in shard] == test[:, 1].tolist()
    assert sum(of_shard for _, _, _, of_shard, *_ in ranks) == test[:, 2:].sum(dtype=float)


def test_digits_are_handed_out_without_an_archive():
    (rank,) = run_ranks(_handed_out, DIGITS, None, None, world_size=1)
    assert (len(rank[0]), len(rank[1]), rank[4]) == (1437, 360, 10)


def _config(**changes):
    return resolve_config(STUDY.name, STUDY.profiles, "smoke", changes)


def test_a_point_a_seed_and_an_archive_means_cifar100(archive):
    machine = describe_machine().model_copy(update={"gpus": []})
    points = STUDY.points(_config(archive=str(archive), seeds=[3, 3, 5]), machine)
    assert [(p.seed, p.dataset, p.implementations, p.backend) for p in points] == [
        (seed, CIFAR100, ON_CPU, "gloo") for seed in (3, 5)
    ]
    assert points[0].md5 == datasets.file_md5(archive)
    assert points[0].source == "an archive in the format of CIFAR-100, not the official one"
    assert "not CIFAR-100" in STUDY.points(_config(), machine)[0].source
    assert "the official archive" in STUDY.points(STUDY.profiles["paper"], machine)[0].source
    with pytest.raises(ParameterError, match="refuses CPU tensors"):
        STUDY.points(_config(implementations=[TORCH_SYNC]), machine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"archive": "/nowhere.tar.gz"}, "there is no such file, or it may not be read, got '/nowhere.tar.gz'"),
        ({"dataset": "mnist"}, "expected one of digits, cifar100"),
        ({"train_images": 3}, "two a rank or more"),
        ({"batch": 1}, "greater than or equal to 2"),
        ({"momentum": 1.0}, "less than 1"),
    ],
)
def test_impossible_parameters_are_refused(changes, message):
    with pytest.raises(ParameterError, match=message):
        _config(**changes)


def test_a_damaged_archive_stops_before_anything_is_measured(archive, tmp_path):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(ParameterError, match=f"{cut}: cut short"):
        measure(STUDY, _config(archive=str(cut)), profile="smoke", directory=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Makes a run that was stopped before its first point, and fetched nothing."""

    def stop(path):
        raise KeyboardInterrupt

    def begin(**changes):
        with monkeypatch.context() as patched:
            patched.setattr(type(STUDY), "prepare", lambda *_: None)
            with pytest.raises(KeyboardInterrupt):
                measure(STUDY, _config(**changes), profile="smoke", directory=tmp_path / "runs", on_start=stop)
        (path,) = (tmp_path / "runs").glob("*.jsonl")
        return path

    return begin


def test_a_run_that_cannot_go_on_fetches_no_archive(begun, monkeypatch):
    monkeypatch.setattr(study_module, "fetch_cifar100", lambda *_: pytest.fail("fetched"))
    path = begun(dataset="cifar100")
    path.write_text(path.read_text().replace('"momentum":0.5', '"momentum":0.25', 1))  # in the config, not in the plan
    with pytest.raises(RunFileError, match=r"momentum was 0\.5 and is 0\.25"):
        resume(STUDY, path)


def test_a_run_whose_archive_is_cut_short_meanwhile_says_so(begun, archive, tmp_path):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes())
    path = begun(archive=str(cut))
    cut.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(ParameterError, match=f"{cut}: cut short"):
        resume(STUDY, path)


def test_without_a_network_points_are_skipped_with_what_to_do(tmp_path, monkeypatch):
    def no_network(directory, say):
        raise ConnectionError("https://somewhere cannot be had: no route")

    monkeypatch.setattr(study_module, "fetch_cifar100", no_network)
    run = measure(STUDY, _config(dataset="cifar100"), profile="smoke", directory=tmp_path)
    coverage = run.coverage()
    assert set(coverage["status"]) == {"skipped"}
    assert "no route; name an archive that is here with --set archive=PATH" in coverage["reason"][0]
    assert {found.verdict for found in STUDY.findings(run.frame(), coverage).values()} == {"not measured"}


def test_digits_try_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(study_module, "fetch_cifar100", lambda *_: pytest.fail("tried the network"))
    assert STUDY.prepare(_config(), lambda text: None) is None
