"""A rank killed in the middle of a step in shards, of saving or of loading: the training goes on bit for bit."""

import pytest

from labkit.parallel.launch import Row, launch
from tests.faults.sharding_worker import LOAD, SAVE, SHARDS, STEP, WHOLE, ZERO2, Attempt, train
from tests.parallel.waiting import is_gone, wait_until


@pytest.mark.faults
@pytest.mark.parametrize("way", [WHOLE, SHARDS, ZERO2])
def test_a_rank_killed_while_it_trains_in_shards(tmp_path, way):
    attempts = [Attempt(tmp_path / "whole", way, None)]
    for moment in (STEP, SAVE):
        attempts += [Attempt(tmp_path / moment, way, killed) for killed in (moment, LOAD, None)]
    pids, digests, ends = [], {}, []
    for item in launch(train, attempts, world_size=2):
        if isinstance(item, Row):
            if "pid" in item.values:
                pids.append(item.values["pid"])
            else:
                digests.setdefault(item.index, set()).add(item.values["digest"])
        else:
            ends.append(item)
    assert [end.status for end in ends] == ["failed" if attempt.killed else "ok" for attempt in attempts]
    assert all("SIGKILL" in end.reason for end in ends if end.status != "ok")
    ended = [digests[number] for number, attempt in enumerate(attempts) if not attempt.killed]
    assert len(ended[0]) == 1  # the same on both ranks
    assert all(found == ended[0] for found in ended)
    assert wait_until(lambda: all(map(is_gone, pids)))
