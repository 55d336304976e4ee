"""Random trainings equal one process, or all ranks refuse them (`random_trainings`)."""

import pytest

from tests.parallel import random_trainings
from tests.parallel.shared_ranks import run_check

QUICK = (16, 19, 20, 24, 37, 46, 57, 62, 148, 152, 417)
"""57 has a mishap, which is refused. The others have all pairs of axes but those of context with
tensor and with FSDP; tensor beside data and beside FSDP with and without sequence parallelism."""
OTHERS = [seed for seed in range(100) if seed not in QUICK]
SEEDS = [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in OTHERS)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_training_equals_one_process_or_is_refused(seed: int) -> None:
    case = random_trainings.draw(seed)
    size = random_trainings.world_size(case.axes)
    by_rank = run_check(random_trainings.check, {"seed": seed}, size)
    wrong = [text for texts in by_rank.values() for text in texts]
    wrong = [text for text in wrong if not text.startswith(random_trainings.REFUSED)]
    assert wrong == [], str(case)
