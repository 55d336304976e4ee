"""Random trainings equal one process, or all ranks refuse them (`random_trainings`)."""

import pytest

from tests.parallel import random_trainings
from tests.parallel.shared_ranks import run_check

QUICK = (4, 16, 20, 24, 36, 62)
"""The first of these is refused, and between them they have each axis and many pairs of two."""
SEEDS = [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in range(100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_training_equals_one_process_or_is_refused(seed: int) -> None:
    case = random_trainings.draw(seed)
    size = random_trainings.world_size(case.axes)
    by_rank = run_check(random_trainings.check, {"seed": seed}, size)
    wrong = [text for texts in by_rank.values() for text in texts]
    assert [text for text in wrong if random_trainings.REFUSED not in text] == [], str(case)
