"""Checkpoints: whole or not at all, from rank 0 to all ranks, nothing executed on reading."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.launch import RankError, run_ranks
from labkit.parallel.ranks import checkpoint, messages


def _save_and_load(path):
    rank = dist.get_rank()
    before = checkpoint.load(path)
    state = {"tensor": torch.arange(3.0, dtype=torch.float64) + rank, "rows": [[{"a": 1.5, "b": None}], []]}
    checkpoint.save(path if rank == 0 else None, state)
    found = checkpoint.load(path if rank == 0 else None)  # the others need not see the disk
    told = messages.gather_json({"of": "ü" * 100 * rank}), messages.broadcast_json(rank or {"from": 0})
    return before, found["tensor"].tolist(), str(found["tensor"].dtype), found["rows"], *told


def test_all_ranks_get_what_rank_0_wrote(tmp_path):
    path = tmp_path / "new" / "checkpoint.pt"
    rows = [[{"a": 1.5, "b": None}], []]
    told = [[{"of": ""}, {"of": "ü" * 100}], {"from": 0}]
    assert run_ranks(_save_and_load, path, world_size=2) == [[None, [0.0, 1.0, 2.0], "torch.float64", rows, *told]] * 2
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]


def _shards(folder):
    rank = dist.get_rank()
    assert checkpoint.load_shards(folder) is None
    for number in (3, 12):
        checkpoint.save_shards(folder, number, {"tensor": torch.full((2,), 10.0 * number + rank)})
    number, found = checkpoint.load_shards(folder)
    return number, found["tensor"].tolist()


def _other_ranks(folder):
    with pytest.raises(ValueError, match="of 1 ranks, got one of 2"):
        checkpoint.load_shards(folder)


def test_each_rank_gets_its_own_shard_of_the_newest_checkpoint(tmp_path):
    folder = tmp_path / "new"
    assert run_ranks(_shards, folder, world_size=2) == [[12, [120.0, 120.0]], [12, [121.0, 121.0]]]
    assert sorted(path.name for path in folder.rglob("*")) == ["0.pt", "1.pt", "12"]
    run_ranks(_other_ranks, folder, world_size=1)


def _interrupted_save(path):
    checkpoint.save(path, {"epoch": 1})

    class DiskFull(OSError):
        pass

    def half(state, file):
        file.write(b"half of it")
        raise DiskFull

    torch.save, whole = half, torch.save
    try:
        checkpoint.save(path, {"epoch": 2})
    except DiskFull:
        torch.save = whole
        return checkpoint.load(path)


def test_a_write_that_is_interrupted_leaves_the_checkpoint_before_it(tmp_path):
    path = tmp_path / "checkpoint.pt"
    assert run_ranks(_interrupted_save, path, world_size=1) == [{"epoch": 1}]
    assert path.with_name("checkpoint.pt.partial").read_bytes() == b"half of it"


class _Executed:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def test_a_checkpoint_cannot_execute_anything(tmp_path):
    path, proof = tmp_path / "checkpoint.pt", tmp_path / "executed"
    path.write_bytes(pickle.dumps(_Executed(proof)))
    with pytest.raises(RankError, match=r"weights_only|Weights only"):
        run_ranks(checkpoint.load, path, world_size=1)
    torch.save({"it": _Executed(proof)}, path)
    with pytest.raises(RankError, match=r"weights_only|Weights only"):
        run_ranks(checkpoint.load, path, world_size=1)
    assert not proof.exists()
