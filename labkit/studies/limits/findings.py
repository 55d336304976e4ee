"""What the limits lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.costs.calibration import ALL_REDUCE
from labkit.lab.calibration import autograd
from labkit.lab.comparing import TIME, contest
from labkit.lab.findings import SMALLEST_DIFFERENCE, Finding, Questions, troubles
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_flops, format_rate, format_seconds, join_words, span
from labkit.studies.limits import tables
from labkit.studies.limits.exchange import SHARED_MEMORY
from labkit.studies.limits.tables import NEAR

QUESTIONS = Questions()
MOST_STRETCHES = 3  # that a headline has room for
ALIKE = 0.05  # up to here two rates are called the same
LIKE_A_COPY = 0.7  # of the bytes per second of a copy


@QUESTIONS.ask("products", "What limits a matrix product here, and from which size on?")
def products(frame: pd.DataFrame) -> Finding | None:
    table = tables.of_steps(frame, tables.products(frame))
    square = select(table, dtype="float32", kind="square").sort_values("size")
    if square.empty:
        return None
    best = square["flops_per_s"].max()
    slow = square[square["flops_per_s"] < NEAR * best]["size"].max()  # the last that is not near the best
    near = square[~(square["size"] <= slow)]["size"].min()
    reached, rest = f"float32 products reach {format_flops(best)}/s", ""
    where = f"from {near:.0f} rows on"
    if near != near:  # the largest fell behind
        fastest = square.loc[square["flops_per_s"].idxmax(), "size"]
        where, rest = f"at {fastest:.0f} rows", "; larger ones are slower again"
    headline = f"Arithmetic, {where}: {reached}{rest}."
    others = select(table, kind="square").groupby("dtype", sort=False)["flops_per_s"].max().drop("float32")
    also = [f"{format_flops(rate)}/s in {dtype}" for dtype, rate in others.items()]
    columns = ["device", "dtype", "kind", "dimensions", "seconds", "low", "high", "flops_per_s", "of_best_percent"]
    shown = tables.products(frame)[columns]
    asked = select(frame, ["shape", "dtype"], sweep="products")
    caveat = troubles(asked.assign(shape=asked["shape"] + " in " + asked["dtype"]), "shape")
    return Finding(
        "measured",
        headline,
        shown,
        caveat,
        where=f"square products of {span(square['size'], '{:.0f}'.format)} rows",
        also=f"The best do {join_words(also)}." if also else None,
    )


@QUESTIONS.ask("memory", "What limits an elementwise operator?")
def memory(frame: pd.DataFrame) -> Finding | None:
    table = tables.of_steps(frame, tables.memory(frame))
    adds = select(table, operation="add")
    if adds.empty:
        return None
    longest, fastest = adds.iloc[-1], adds.loc[adds["bytes_per_s"].idxmax()]
    copies = select(table, operation="copy", n_bytes=longest["n_bytes"])["bytes_per_s"]
    is_memory = len(copies) > 0 and longest["bytes_per_s"] >= LIKE_A_COPY * copies.iloc[0]
    moved = f"the longest additions move {format_rate(longest['bytes_per_s'])}"
    headline = (
        f"Memory: {moved}, about what a copy does." if is_memory else f"Not memory alone: {moved}, less than a copy."
    )
    why, new = None, select(table, operation="new", n_bytes=longest["n_bytes"])["bytes_per_s"]
    also = f"Additions that make their result anew move {format_rate(new.iloc[0])}." if len(new) else None
    if fastest["n_bytes"] < longest["n_bytes"]:
        cached, far = format_bytes(fastest["n_bytes"]), format_bytes(longest["n_bytes"])
        rate = format_rate(fastest["bytes_per_s"])
        why = f"Arrays of {cached}, which stay in a cache, move {rate}; those of {far} come from memory."
    if moving := tables.transfers(table):
        rates = [f"{format_rate(rate)} {operation}" for operation, rate in moving.items()]
        why = f"{why or ''} Copies between the CPU's memory and the GPU's move at most {join_words(rates)}.".lstrip()
    shown = tables.memory(frame)[["device", "operation", "n_bytes", "seconds", "low", "high", "bytes_per_s"]]
    where = f"{format_bytes(longest['n_bytes'])}, bytes read and written together"
    return Finding("measured", headline, shown, why=why, where=where, also=also)


@QUESTIONS.ask("calls", "When does the call of an operator cost more than its work?")
def calls(frame: pd.DataFrame) -> Finding | None:
    adds = select(tables.of_steps(frame, tables.memory(frame)), operation="add").sort_values("n_bytes")
    if len(adds) < 2:
        return None
    cost = tables.call_s(frame)
    cheap = adds[adds["seconds"] <= 2 * cost]["n_bytes"].max()
    headline = f"A call costs {format_seconds(cost)}: more than its work for arrays of up to {format_bytes(cheap)}."
    found, why = autograd(select(frame, ["device"], world_size=1, device="cpu")), None
    if found is not None:
        begin, each = format_seconds(found.begin_s), format_seconds(found.operator_s)
        why = f"A forward and backward pass on the CPU takes {begin} to begin, and {each} for each operator."
    where = "torch.add into an array that exists"
    return Finding("measured", headline, adds[["n_bytes", "seconds", "low", "high"]], why=why, where=where)


@QUESTIONS.ask("threads", "Do more threads make an operator faster?")
def threads(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.threads(frame)
    gain = tables.second_rank(frame)
    found = contest(ratios, "threads", "with one", names=_with_threads, axis=("operation",))
    if found is None or not gain:
        return found
    amount = "as many products as" if abs(gain - 1) < ALIKE else f"{gain:.1f} times the products of"
    also = f"Two ranks with half of the threads each do {amount} one with all."
    return replace(found, also=also)


def _with_threads(number: str) -> str:
    """Two in words, for a headline that has two other numbers."""
    return f"work with {'two' if str(number) == '2' else number} threads"


@QUESTIONS.ask("exchange", "What does an all-reduce between two ranks cost: the shortest, and each byte of a long one?")
def exchange(frame: pd.DataFrame) -> Finding | None:
    table = tables.exchanges(frame)
    whole = select(table, what=ALL_REDUCE, world_size=table["world_size"].min()).to_dict("records")
    if not whole:
        return None
    ways = [f"{'through' if row['way'] == SHARED_MEMORY else 'over'} {row['way']}" for row in whole]
    alphas = [f"{format_seconds(row['alpha_s'])} {way}" for row, way in zip(whole, ways, strict=True)]
    rates = [f"{format_rate(row['bytes_per_s'])} {way}" for row, way in zip(whole, ways, strict=True)]
    caveat = troubles(select(frame, ["way"], sweep="exchange"), "way")
    where = f"{whole[0]['world_size']} ranks; a time per call and a time per byte, fitted to all sizes"
    headline, also = f"The shortest takes {join_words(alphas)}.", f"Long ones move {join_words(rates)}."
    return Finding("measured", headline, table, caveat, where=where, also=also)


@QUESTIONS.ask(SMALLEST_DIFFERENCE, "What is the smallest difference that this machine can show today?")
def smallest_difference(frame: pd.DataFrame) -> Finding | None:
    table = tables.against_itself(frame).dropna(subset="smallest_percent")
    if table.empty:
        return None
    least, most = (
        table.loc[place] for place in (table["smallest_percent"].idxmin(), table["smallest_percent"].idxmax())
    )
    headline = f"{least['smallest_percent']:.2g} % between {least['operation']}s"
    if most["operation"] != least["operation"]:
        headline += f", {most['smallest_percent']:.2g} % between {most['operation']}s"
    differing = table.loc[table["verdict"] != "no difference shown", "operation"]
    caveat = (
        f"Differs measurably from itself: {join_words(differing)}. Doubt other differences of today."
        if len(differing)
        else None
    )
    return Finding("measured", f"{headline}: what is smaller goes unseen.", TIME.marked(table), caveat)


@QUESTIONS.ask("roofline", "Which operators of a Transformer step are bound by arithmetic, and which by memory?")
def roofline(frame: pd.DataFrame) -> Finding | None:
    table = tables.operators(frame)
    if table.empty:
        return None
    count = table["bound"].value_counts()
    headline = f"By their counts, {count.iloc[0]} of {len(table)} operators are bound by {count.index[0]}."
    over = span(select(table, bound=count.index[0])["measured_over_predicted"], "{:.1f}".format)
    also = f"These take {over} times what that limit allows."
    where = scope_of(table, ["model", "batch", "context_length", "device"])
    columns = ["operator", "bound", "intensity", "flops_per_s", "seconds", "predicted_s", "measured_over_predicted"]
    return Finding("measured", headline, table[columns].sort_values("intensity"), where=where, also=also)


@QUESTIONS.ask("regimes", "Which limit binds a training step of each named model?")
def regimes(frame: pd.DataFrame) -> Finding | None:
    table = tables.regimes(frame)
    if table.empty:
        return None
    stretches = (table["regime"] != table["regime"].shift()).cumsum()  # neighbors in size with one regime
    parts = [
        f"{of_one['regime'].iloc[0]} binds {' to '.join(dict.fromkeys(of_one['model'].iloc[[0, -1]]))}"
        for _, of_one in table.groupby(stretches)
    ]
    told = "; ".join(parts[:MOST_STRETCHES]) if len(parts) > 1 else f"{table['regime'].iloc[0]} binds every named model"
    headline = f"{told[0].upper()}{told[1:]}."
    where = "4 sequences of 128 tokens, float32; by formulas, from the rates above"
    return Finding("predicted", headline, table, where=where)
