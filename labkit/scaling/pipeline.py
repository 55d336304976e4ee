"""Pipelines: layers per stage, and the time that m micro-batches take through all stages.

The step of 1F1B, and of GPipe, is m times the slowest stage plus once through all others; vp chunks per stage divide
that by vp (arXiv:2104.04473, section 2.2).
"""

import numpy as np

from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs

GREEDY = ("nanotron",)
"""Frameworks that fill one stage after the other by cost. Others give every stage equally many layers."""


def layers_per_stage(runs: Runs) -> Numbers:
    """Layers of each stage, (n, stages); 0 beyond a row's pp.

    nanotron's `build_and_set_rank`: a layer costs 4h^2 + 3hf, the head Vh, the embedding nothing; a stage takes layers
    until the costs so far reach its share. Published memory peaks confirm it to four digits. Other frameworks split
    evenly, or count embedding and loss as layers (`layout.counts_ends_as_layers`).
    """
    stages = int(runs.pp.max())
    index = np.arange(stages)[None, :]
    pp, layers = runs.pp[:, None], runs.layers[:, None]
    cost = (4 * runs.hidden**2 + 3 * runs.hidden * runs.ffn)[:, None]
    total = layers * cost + (runs.vocab * runs.hidden)[:, None]
    filled = total * (index + 1) / pp / cost
    tie = np.where(runs.has("old_pipeline"), 1e-9, -1e-9)[:, None]  # reaching its share filled a stage only later
    greedy = np.minimum(np.ceil(filled + tie), layers)
    chunks, ends = pp * runs.vp[:, None], 2 * (index + 1) / pp
    with_ends = (pp > 1) & (layers % chunks != 0) & ((layers + 2) % chunks == 0)
    even = np.floor(layers * (index + 1) / pp + np.where(with_ends, ends, 0)) - with_ends
    through = np.where(np.isin(runs.framework, GREEDY)[:, None], greedy, even)
    through = np.where(index >= pp - 1, layers, through)
    return np.diff(through, axis=1, prepend=0.0)


def schedule_s(runs: Runs, stage_s: Numbers) -> tuple[Numbers, Numbers]:
    """Seconds of all micro-batches in the slowest stage, and of the bubble; `stage_s` per micro-batch, (n, stages)."""
    slowest = stage_s.max(axis=1)
    return runs.micro_batches * slowest, (stage_s.sum(axis=1) - slowest) / runs.vp
