"""Whether the published trends of `ddp_bucketed_xl_2gpu.csv` hold in a run."""

from collections.abc import Iterator

import pandas as pd

from labkit.lab.evidence import span_text
from labkit.lab.trends import Trend
from labkit.studies.gradient_buckets import analysis

LEAST, MOST = 1 / 1.04, 1.04  # published: the step moves by less than 4 %


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    return [*_size_hardly_matters(frame), *_more_work_waits_less(frame), *_few_large_ones_wait_longer(frame)]


def _size_hardly_matters(frame: pd.DataFrame) -> Iterator[Trend]:
    """Published: at every batch and length, the slowest of four bucket sizes is less than 4 % above the fastest."""
    ratios = analysis.pairs(frame)
    if not ratios.empty:
        seen = span_text(analysis.spread(frame)["spread_percent"], "{:.1f}".format)
        claim = f"The bucket size moves a step by less than 4 % ({seen} % between medians here)"
        near = (ratios["low"] > LEAST) & (ratios["high"] < MOST)
        yield Trend.judged(claim, near, (ratios["high"] < LEAST) | (ratios["low"] > MOST))


def _more_work_waits_less(frame: pd.DataFrame) -> Iterator[Trend]:
    """Published: the share falls with every longer sequence and with the larger batch, at every bucket size."""
    table = analysis.with_more_work(frame)
    for grows, words in (("sequence", "longer sequences"), ("batch", "larger batches")):
        some = table[table["grows"] == grows]
        if not some.empty:
            claim = f"With {words} a step waits for a smaller share of its time ({span_text(some['ratio'])} of it here)"
            yield Trend.judged(claim, some["verdict"] == "faster", some["verdict"] == "slower")


def _few_large_ones_wait_longer(frame: pd.DataFrame) -> Iterator[Trend]:
    """Published: buckets of 1000 MB wait longer than those of 100 MB. A question only if there are several of them."""
    several = analysis.by_bucket(frame, "waiting_s").query("bucket_mb == 1000 and buckets > 1")
    ratios = analysis.pairs(frame, "waiting_s").query("bucket_mb == 1000 and smaller_mb == 100")
    ratios = ratios.merge(several[analysis.SETTING])
    if not ratios.empty:
        claim = f"Buckets of 1000 MiB are waited for longer than those of 100 MiB ({span_text(ratios['ratio'])} here)"
        yield Trend.judged(claim, ratios["verdict"] == "slower", ratios["verdict"] == "faster")
