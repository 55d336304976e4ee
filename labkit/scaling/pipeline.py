"""Pipelines: which stage has how many layers, and how long m micro-batches take through all stages.

The step of 1F1B, and of GPipe, is m times the slowest stage plus once through all others; vp chunks a stage divide
that by vp (arXiv:2104.04473, section 2.2).
"""

import numpy as np

from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs

GREEDY = ("nanotron",)
"""Frameworks that fill one stage after the other by cost. Others give every stage as many layers."""


def layers_per_stage(runs: Runs) -> Numbers:
    """(n, stages) layers of each stage; 0 beyond a row's pp.

    nanotron's `build_and_set_rank`: a layer costs 4h^2 + 3hf, the head Vh, the embedding nothing; a stage takes layers
    until the costs so far reach its share. Published peaks of memory confirm it to four digits.
    """
    stages = int(runs.pp.max())
    index = np.arange(stages)[None, :]
    pp, layers = runs.pp[:, None], runs.layers[:, None]
    cost = (4 * runs.hidden**2 + 3 * runs.hidden * runs.ffn)[:, None]
    total = layers * cost + (runs.vocab * runs.hidden)[:, None]
    filled = total * (index + 1) / pp / cost
    tie = np.where(runs.has("old_pipeline"), 1e-9, -1e-9)[:, None]  # reaching its share filled a stage only later
    greedy = np.minimum(np.ceil(filled + tie), layers)
    even = np.floor(layers * (index + 1) / pp)
    through = np.where(np.isin(runs.framework, GREEDY)[:, None], greedy, even)
    through = np.where(index >= pp - 1, layers, through)
    return np.diff(through, axis=1, prepend=0.0)


def schedule_s(runs: Runs, stage_s: Numbers) -> tuple[Numbers, Numbers]:
    """Seconds of a step's micro-batches in the slowest stage, and of the bubble; stage_s (n, stages) a micro-batch."""
    slowest = stage_s.max(axis=1)
    return runs.micro_batches * slowest, (stage_s.sum(axis=1) - slowest) / runs.vp
