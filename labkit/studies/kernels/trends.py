"""Whether the published observations of a profiled Transformer hold in a run, on all its models together."""

from collections.abc import Iterator

import pandas as pd

from labkit.lab.trends import Trend
from labkit.studies.kernels import analysis
from labkit.studies.kernels.analysis import FORWARD
from labkit.studies.kernels.worker import INFERENCE


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The observations of `end_to_end.csv` and `profile_kernels.csv` that this run has the rows to check."""
    return [
        *_less_by_the_profiler(frame),
        *_a_product_leads(frame),
        *_elementwise_take_their_share(frame),
        *_less_matmul_in_a_step(frame),
        *_softmax_beyond_the_products(frame),
    ]


def _less_by_the_profiler(frame: pd.DataFrame) -> Iterator[Trend]:
    """The same forward pass takes 87.9 ms by the host's timer, and its kernels 63.9 ms by the profiler."""
    table = analysis.against_clock(frame)
    table = table[(table["mode"] == INFERENCE) & (table["measure"] == "events_s")]
    if not table.empty:
        given = analysis.published_clocks().set_index("measure")["seconds"]
        ratio = given[analysis.MEASURES["events_s"]] / given[analysis.MEASURES["clock_s"]]
        claim = f"A forward pass is shorter by the profiler's events (published: {ratio:.2f} of the clock's)"
        yield Trend.judged(claim, list(table["verdict"] == "faster"), list(table["verdict"] == "slower"))


def _a_product_leads(frame: pd.DataFrame) -> Iterator[Trend]:
    """The kernel with the largest share of the forward pass multiplies matrices."""
    table = analysis.operators(frame)
    shown, contradicted = [], []
    for _, group in table[table["mode"] == FORWARD].groupby(["device", "model"]):
        is_product = group["family"] == "matmul"
        product, other = _largest(group[is_product]), _largest(group[~is_product])
        if product is not None and other is not None:
            shown.append(bool(product["low"] > other["high"]))
            contradicted.append(bool(product["high"] < other["low"]))
    if shown:
        yield Trend.judged("A matrix product is the largest single operator of a forward pass", shown, contradicted)


def _largest(table: pd.DataFrame) -> pd.Series | None:
    return None if table.empty else table.loc[table["self_s"].idxmax()]


def _elementwise_take_their_share(frame: pd.DataFrame) -> Iterator[Trend]:
    """Elementwise kernels take at least 15 % of the forward pass."""
    table, least = analysis.shares(frame), analysis.published()["elementwise_share_of_forward"]
    table = table[(table["mode"] == FORWARD) & (table["family"] == "elementwise")]
    if not table.empty:
        claim = f"Elementwise operators take at least {least:.0f} % of a forward pass"
        shown, contradicted = table["low"] * 100 >= least, table["high"] * 100 < least
        yield Trend.judged(claim, list(shown), list(contradicted))


def _less_matmul_in_a_step(frame: pd.DataFrame) -> Iterator[Trend]:
    """Matrix products take 66.3 % of a forward pass alone and 54.5 % of a full step."""
    table = analysis.step_against_inference(frame)
    if not table.empty:
        claim = "Matrix products have a smaller share of a full step than of inference"
        yield Trend.judged(claim, list(table["verdict"] == "faster"), list(table["verdict"] == "slower"))


def _softmax_beyond_the_products(frame: pd.DataFrame) -> Iterator[Trend]:
    """The softmax takes 316 microseconds, the product of queries and keys 146; the products are about equal."""
    table = analysis.softmax_against_products(frame)
    table = table[(table["mode"] == INFERENCE) & (table["part"] == "softmax")]
    if not table.empty:
        given = analysis.published()
        ratio = given["attention_softmax_mean"] / given["attention_score_matmul_mean"]
        claim = f"The softmax takes more time than both products (published: {ratio:.1f} times the scores alone)"
        yield Trend.judged(claim, list(table["verdict"] == "slower"), list(table["verdict"] == "faster"))
