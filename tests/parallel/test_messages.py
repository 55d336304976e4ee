"""JSON and checkpoints among ranks: whole or not at all, nothing executed on reading. And spawned
processes."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.launch import run_ranks
from labkit.parallel.messages import cpu_group, gather_json
from labkit.studies.shared.checkpoints import load_checkpoint, save_checkpoint
from tests.parallel.shared_ranks import on_ranks

CHECKOUT = Path(__file__).parents[2]
BLOCKS = [
    block.split("```")[0]
    for block in (CHECKOUT / "docs" / "pieces.md").read_text().split("```python\n")[1:]
]


@on_ranks(2)
def test_all_ranks_get_what_rank_0_wrote(tmp_path):
    path = tmp_path / "new" / "checkpoint.pt"
    rank = dist.get_rank()
    rows = [[{"a": 1.5, "b": None}], []]
    tensor = torch.arange(3.0, dtype=torch.float64)
    assert load_checkpoint(path) is None
    save_checkpoint(path if rank == 0 else None, {"tensor": tensor + rank, "rows": rows})
    after = load_checkpoint(path if rank == 0 else None)  # the others need not see the disk
    assert torch.equal(after["tensor"], tensor)
    assert after["tensor"].dtype == torch.float64
    assert after["rows"] == rows
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]
    assert gather_json({"of": "ü" * 100 * rank}) == [{"of": ""}, {"of": "ü" * 100}]


@on_ranks(1)
def test_a_write_that_is_interrupted_leaves_the_checkpoint_before_it(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"epoch": 1})

    def half(state, file):
        file.write(b"half of it")
        raise OSError("disk full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(path, {"epoch": 2})
    assert load_checkpoint(path) == {"epoch": 1}
    assert path.with_name("checkpoint.pt.partial").read_bytes() == b"half of it"


class _Executed:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


@on_ranks(1)
def test_a_checkpoint_cannot_execute_anything(tmp_path):
    paths = [tmp_path / "pickled.pt", tmp_path / "saved.pt"]
    proof = tmp_path / "executed"
    paths[0].write_bytes(pickle.dumps(_Executed(proof)))
    torch.save({"it": _Executed(proof)}, paths[1])
    for path in paths:
        with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
            load_checkpoint(path)
    assert not proof.exists()


def _run_blocks(texts):
    for text in texts:
        exec(text, {"__name__": "__main__"})


@on_ranks(2)
def test_ranks_in_other_numbers_of_groups_are_refused():
    """They would wait for each other's CPU group under different names."""
    nccl = dist.new_group()  # gloo, which is taken for NCCL below
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        with pytest.raises(ValueError, match=r"groups, got \[\d+, \d+\]"):
            cpu_group(nccl)


def test_model_parallel_examples_of_the_docs_run():
    imports = re.compile(r"from labkit\.parallel\.(tensor|pipeline|context) import")
    examples = [block for block in BLOCKS if imports.search(block)]
    assert len(examples) == 6
    run_ranks(_run_blocks, examples, world_size=2)


# Forked, not spawned: one process imports torch, not three.
FORKED = """
import torch.multiprocessing as mp
mp.spawn = lambda *args, **options: mp.start_processes(*args, **options, start_method="fork")
"""


@pytest.mark.slow
def test_wrappers_average_in_processes_that_labkit_did_not_start(tmp_path):
    """The example of the docs, as it stands."""
    (example,) = (block for block in BLOCKS if "multiprocessing.spawn(" in block)
    (tmp_path / "spawned.py").write_text(FORKED + example)
    environment = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "spawned.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} [[0.5, 0.5, 0.5, 0.5]] [0.5]" for rank in (0, 1)
    ], done.stderr
