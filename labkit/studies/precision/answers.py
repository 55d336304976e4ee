"""What a precision run says: one answer to each question, nothing the intervals do not show."""

import pandas as pd

from labkit.lab.answers import Answer, Question, answer_each
from labkit.lab.evidence import no_times, ratio_text, ratios_text, significant, verdict_of
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_share, join_words
from labkit.studies.precision import analysis, trends
from labkit.studies.precision.numerics import ACCUMULATIONS
from labkit.studies.precision.worker import BOTH, FULL

ACCUMULATION = Question(
    "accumulation",
    "What does adding 0.01 a thousand times come to in fp32, fp16, bf16, and with an fp32 sum of 16-bit terms?",
)
DTYPES = Question(
    "dtypes", "Under autocast, which dtype do parameters, activations, norm, logits, loss and gradients have?"
)
NORM = Question("layer_norm", "Which step of a layer norm loses digits or overflows in fp16 and in bf16?", "precision")
SPEED = Question(
    "autocast_speed",
    "Is bf16 autocast faster than fp32, and is there a trend with the size of the model?",
    "precision",
)
PUBLISHED = Question("published_trends", "Do the published results hold on this machine?")
QUESTIONS = (ACCUMULATION, DTYPES, NORM, SPEED, PUBLISHED)

MOST_SIZES = 3  # of models that a sentence names one by one
PLURALS = ("parameters", "logits", "gradients")


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        ACCUMULATION: accumulation,
        DTYPES: dtypes,
        NORM: layer_norm,
        SPEED: autocast_speed,
        PUBLISHED: published_trends,
    }
    return answer_each(finders, frame, coverage)


def accumulation(frame: pd.DataFrame) -> Answer | None:
    table = analysis.final_sums(frame)
    if table.empty:
        return None
    device = analysis.first_device(table)
    rows = {row["variant"]: row for row in table[table["device"] == device].to_dict("records")}
    sums = join_words([f"{row['sum']:.8g} in {_spoken(name)}" for name, row in rows.items()])
    first = next(iter(rows.values()))
    sentences = [f"{first['additions']} additions should come to {first['exact_sum']:g}; they come to {sums}."]
    for low, mixed in (("fp16", "fp16_into_fp32"), ("bf16", "bf16_into_fp32")):
        if low in rows and mixed in rows:
            sentences.append(_sources(low, rows[low], rows[mixed]))
    sentences += _standstills(frame, device)
    differing = table.groupby("variant")["sum"].nunique()
    if table["device"].nunique() > 1:
        others = [_spoken(str(name)) for name in differing[differing > 1].index]
        sentences.append(f"Devices differ in {join_words(others)}." if others else "All devices give the same sums.")
    return Answer(ACCUMULATION, "measured", " ".join(sentences), figure="accumulation")


def _spoken(variant: str) -> str:
    how = ACCUMULATIONS.get(variant)
    if how is None or how.sum_dtype == how.term_dtype:
        return variant
    cast = " cast to fp32 first" if how.cast else ""
    return f"an fp32 sum of {variant.split('_')[0]} terms{cast}"


def _sources(low: str, alone: dict[str, float], mixed: dict[str, float]) -> str:
    """Where the error comes from, and what of it an fp32 sum leaves."""
    return (
        f"In {low}, {_signed(alone['term_error'])} of the error is the term, which {low} does not hold exactly, and "
        f"{_signed(alone['sum_error'])} is the rounding of the sum; in an fp32 sum it is {_signed(mixed['sum_error'])}."
    )


def _signed(value: float) -> str:
    return f"{value:+.3g}" if value else "0"


def _standstills(frame: pd.DataFrame, device: str) -> list[str]:
    """Sums that no longer move although terms are added."""
    table = analysis.accumulation(frame)
    table = table[table["device"] == device]
    found = []
    for variant, group in table.groupby("variant", sort=False):
        last = group["sum"].iloc[-1]
        since = group.loc[group["sum"] == last, "additions"].min()
        if since < group["additions"].max():
            found.append(
                f"The sum in {_spoken(str(variant))} stands still at {last:g}, from at most {since} additions on."
            )
    return found


def dtypes(frame: pd.DataFrame) -> Answer | None:
    table = analysis.dtypes(frame)
    mixed = table[table["autocast"] != FULL]
    if mixed.empty:
        return None
    quantities = [name for name in table.columns if name not in ("device", "model", "autocast")]
    sentences = [_in_all_models(mixed, quantities)]
    for (autocast, device), group in mixed.groupby(["autocast", "device"]):
        differing = [name for name in quantities if group[name].nunique() > 1]
        same = _by_dtype(group.iloc[0].to_dict(), [name for name in quantities if name not in differing])
        sentences.append(f"Under autocast to {autocast} on {device}: {same}.")
        for name in differing:
            by_model = [f"{row[name]} in the {row['model']}" for row in group.to_dict("records")]
            sentences.append(f"There, {name} {'differ' if name in PLURALS else 'differs'}: {join_words(by_model)}.")
    sentences += _devices_that_differ(mixed, quantities)
    return Answer(DTYPES, "measured", " ".join(sentences))


def _in_all_models(table: pd.DataFrame, quantities: list[str]) -> str:
    """Which quantities every model keeps in float32 under every autocast, on every device."""
    kept = [name for name in quantities if set(table[name].dropna()) == {FULL}]
    if not kept:
        return "No quantity stays in float32 everywhere."
    return f"{join_words(kept).capitalize()} stay in float32 in every model."


def _by_dtype(row: dict[str, str], quantities: list[str]) -> str:
    """ "float32 for parameters and loss, bfloat16 for logits"."""
    groups: dict[str, list[str]] = {}
    for quantity in quantities:
        if isinstance(row[quantity], str):
            groups.setdefault(row[quantity], []).append(quantity)
    return ", ".join(f"{dtype} for {join_words(names)}" for dtype, names in groups.items())


def _devices_that_differ(table: pd.DataFrame, quantities: list[str]) -> list[str]:
    found = []
    for (model, autocast), group in table.groupby(["model", "autocast"]):
        differing = [name for name in quantities if group[name].nunique() > 1]
        if differing:
            found.append(f"Devices differ for {model} under {autocast}: {join_words(differing)}.")
    return found


def layer_norm(frame: pd.DataFrame) -> Answer | None:
    table = analysis.norm_in_its_dtype(frame)
    if table.empty:
        return None
    sentences = []
    for dtype, of_dtype in table.groupby("precision"):
        told = [*_breakdowns(of_dtype), *_largest_loss(of_dtype)]
        sentences.append(f"{dtype}: {'; '.join(told)}.")
    advice = _norm_recommendation(frame)
    return Answer(NORM, "measured", " ".join(sentences), "layer_norm", advice, advice is not None)


def _breakdowns(table: pd.DataFrame) -> list[str]:
    """The first step that overflows, and the first in which most values underflow, for each kind of inputs."""
    found = []
    for inputs, steps in table.groupby("inputs", sort=False):
        over, under = steps[steps["overflowed"] > 0], steps[steps["underflowed"] > 0.5]
        if not over.empty:
            row = over.iloc[0]
            found.append(
                f"the {row['step']} overflow{_s(row)} for inputs {inputs} ({format_share(row['overflowed'])} of values)"
            )
        elif not under.empty:
            row = under.iloc[0]
            share = format_share(row["underflowed"])
            found.append(f"the {row['step']} underflow{_s(row)} for inputs {inputs} ({share} become zero)")
    return found or ["no step overflows, and none underflows"]


def _s(row: pd.Series) -> str:
    """The verb's ending: the variance overflows, the squares overflow."""
    return "" if row["step"] == "squares" else "s"


def _largest_loss(table: pd.DataFrame) -> list[str]:
    """The step at which most correct digits go, among inputs that do not overflow."""
    steps = []
    for _, group in table.groupby("inputs", sort=False):
        if not (group["overflowed"] > 0).any():
            steps.append(group.assign(lost=-group["digits"].diff(), before=group["digits"].shift()))
    if not steps or pd.concat(steps)["lost"].isna().all():
        return []
    every = pd.concat(steps, ignore_index=True)
    row = every.loc[every["lost"].idxmax()]
    if row["lost"] <= 0:
        return ["no step has fewer correct digits than the one before"]
    why = " (the step itself is exact: it uncovers the rounding before it)" if row["own_error"] == 0 else ""
    told = f"from {row['before']:.1f} to {row['digits']:.1f}{why}"
    return [f"most digits go in the step {row['step']} for inputs {row['inputs']}, {told}"]


def _norm_recommendation(frame: pd.DataFrame) -> str | None:
    table = analysis.norm_outputs(frame).dropna()
    parts = []
    for dtype, group in table.groupby("precision"):
        own, wide = group["in_its_dtype"].min(), group["in_float32"].min()
        if wide > own:
            parts.append(f"{wide:.1f} instead of {own:.1f} correct digits of the output in {dtype}")
    if not parts:
        return None
    return f"compute norms in float32: at worst that keeps {join_words(parts)}."


def autocast_speed(frame: pd.DataFrame) -> Answer | None:
    table = analysis.ratios(frame)
    if table.empty:
        wrong = analysis.errors(frame)
        wrong = wrong[wrong["gate"] != "ok"]
        names = join_words(sorted(set(wrong["alternative"])))
        return Answer(SPEED, "not measured", f"{no_times(wrong['gate'])}, from {names}.") if names else None
    faster, slower = significant(table)
    sentences = []
    for (device, alternative, mode), group in table.groupby(["device", "alternative", "mode"]):
        told = group if len(group) <= MOST_SIZES else group.iloc[[0, -1]]  # the table has them all
        sizes = [f"{row['model']} {ratio_text(row)}" for _, row in told.iterrows()]
        where = f"{mode} on {device}, {alternative} over float32"
        sentences.append(f"{where[0].upper()}{where[1:]}: {', '.join(sizes)}. {_trend(group)}")
    sentences.insert(
        0,
        f"Beyond chance, autocast is faster in {len(faster)} and slower in {len(slower)} of {len(table)} comparisons.",
    )
    wrong = analysis.errors(frame).query("gate != 'ok'")
    if not wrong.empty:
        sentences.append(f"{no_times(wrong['gate'])} in some settings: see the table of errors.")
    text, verdict, more = " ".join(sentences), verdict_of(faster, slower), ("time_by_size",)
    steps = table[table["mode"] == BOTH]
    is_shown = any(len(some) for some in significant(steps))
    evidence = ratios_text(steps, lambda row: f"{row['alternative']}, {row['model']} on {row['device']}")
    return Answer(SPEED, verdict, text, "ratio_by_size", _precision_advice(steps), is_shown, evidence, more)


def _trend(group: pd.DataFrame) -> str:
    """From the smallest to the largest size: the intervals lie apart, or no trend is shown."""
    small, large = group.iloc[0], group.iloc[-1]
    if len(group) < 2:
        return "One size shows no trend."
    where = f"at the largest size, {large['model']}, than at the smallest, {small['model']}"
    if large["high"] < small["low"]:
        told = f"The ratio is shown to be smaller {where}"
        return f"{told}, and {_is_gain(large)}."
    if large["low"] > small["high"]:
        return f"The ratio is shown to be larger {where}."
    return "No trend with size is shown."


def _is_gain(large: pd.Series) -> str:
    """Whether a ratio that falls with size ends below 1, where time is saved."""
    if large["high"] < 1:
        return "time is saved there"
    return "time is lost there all the same" if large["low"] > 1 else "it is not shown that time is saved there"


def _precision_advice(steps: pd.DataFrame) -> str:
    """Which precision to train in, by what is shown of forward and backward together."""
    faster, slower = significant(steps)
    if faster.empty and slower.empty:
        return "no difference is shown beyond chance: stay with float32, which has more digits."
    parts = []
    if not faster.empty:
        gain = f"{faster['ratio'].min():.2f} to {faster['ratio'].max():.2f} of the time"
        parts.append(f"train under autocast to {_places(faster)} ({gain})")
    if not slower.empty:
        loss = f"{slower['ratio'].min():.2f} to {slower['ratio'].max():.2f} times as long"
        parts.append(f"stay with float32 rather than {_places(slower)} ({loss})")
    open_ones = len(steps) - len(faster) - len(slower)
    rest = f"; in {open_ones} of {len(steps)} comparisons no difference is shown beyond chance" if open_ones else ""
    return "; ".join(parts) + rest + "."


def _places(table: pd.DataFrame) -> str:
    """ "bfloat16 for nano and mini on cpu"."""
    return join_words(
        [
            f"{alternative} for {join_words(list(dict.fromkeys(group['model'])))} on {device}"
            for (alternative, device), group in table.groupby(["alternative", "device"])
        ]
    )


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, trends.published_trends(frame), "time_by_size")
