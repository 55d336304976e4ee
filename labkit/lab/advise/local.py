"""Recommendations for this machine, in sentences and as Python to paste."""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from labkit.costs.transformer import SIZES
from labkit.lab.advise.report import Report, Section
from labkit.lab.metric import Metric
from labkit.lab.recommended import (
    DEFAULT,
    RANK_FIELDS,
    TOPICS,
    Configuration,
    Recommendation,
    join,
    newest_runs,
    recommend,
)
from labkit.lab.runs.store import Run
from labkit.lab.units import join_words
from labkit.machine import describe_machine

MEASURED = "measured here"
MODEL, SEQUENCE = "small", 128
ALLOWED = ("model", "sequence")
TUNED_STEP = "tuned_step"
JOINED = Metric("seconds", "implementation", ("model", "world_size"))
NAMES: Mapping[str, str] = {"compiled": "torch.compile", "wrapper": "data-parallel wrapper"}


def check_model(name: str | None) -> str:
    """The size to ask about. ValueError for one that this machine's labs do not train."""
    if name is not None and name not in SIZES:
        raise ValueError(
            f"expected --gpu and --gpus with --model {name[:40]}; on this machine --model is one of {', '.join(SIZES)}"
        )
    return name or MODEL


def report(model: str, context_length: int) -> Report:
    """Recommendations of the newest runs of this machine, and their gain together where it was measured."""
    runs = newest_runs(labs={TUNED_STEP, *(topic.lab for topic in TOPICS)})
    recommendations = recommend(model, context_length, runs)
    gains = list(_gains(runs, context_length))
    changed = [_name(one.topic) for one in recommendations if one.value != getattr(DEFAULT, one.topic)]
    verdict = f"Change {len(changed)} of {len(recommendations)} defaults." if changed else "Keep the defaults."
    headline = (
        f"Each of {join_words(changed)} was faster alone."
        if changed
        else "No run of this machine shows a faster alternative."
    )
    headings = ("", "use", "time", "reason")
    sections = [Section("Recommendations of its labs", MEASURED, headings, list(_rows(recommendations)))]
    if gains:
        headings = ("model", "ranks", "time of the joined over the default's", "verdict")
        sections.append(Section("All of it together against the default, in turns", MEASURED, headings, gains))
    notes = list(_notes(recommendations, has_gains=bool(gains)))
    return Report(verdict, headline, f"{describe_machine().label}; {model}", sections, notes)


def python_of(model: str, context_length: int) -> str:
    """The joined configuration as a script's lines: attention, compile, wrapper, autocast, optimizer."""
    return code(join(recommend(model, context_length, newest_runs())), model, context_length)


def code(chosen: Configuration, model: str, context_length: int) -> str:
    """Lines that build the model under this configuration and make one step; on one rank without the wrapper's."""
    lines = [
        "import torch",
        "import torch.distributed as dist",
        "",
        "from labkit.nn.attention_implementations import attention_named",
        "from labkit.nn.transformer import Transformer, language_model_loss, shape_named",
        "from labkit.parallel.data_parallel.implementations import wrap",
        "",
        f'attend = attention_named("{chosen.attention}").attend',
        f'model = Transformer(shape_named("{model}"), context_length={context_length}, attention=attend)',
        *(["model.compile(dynamic=False)"] if chosen.compiled else []),
        f'wrapped = wrap("{chosen.wrapper}", model) if dist.is_initialized() else model',
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
        "",
        "",
        "def train_step(inputs, targets):",
        *_loss_lines(chosen.precision),
        "    loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad(set_to_none=True)",
        "    return loss.detach()",
    ]
    return "\n".join(lines)


def _loss_lines(precision: str) -> list[str]:
    if precision == "float32":
        return ["    loss = language_model_loss(wrapped(inputs), targets)"]
    return [
        f"    with torch.autocast(inputs.device.type, dtype=torch.{precision}):",
        "        loss = language_model_loss(wrapped(inputs), targets)",
    ]


def _name(topic: str) -> str:
    return NAMES.get(topic, topic)


def _value(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _rows(recommendations: Sequence[Recommendation]) -> Iterator[tuple[str, ...]]:
    for one in recommendations:
        is_default = one.value == getattr(DEFAULT, one.topic)
        interval = "" if is_default else f"{100 * one.ratio:.0f}% [{100 * one.low:.0f}, {100 * one.high:.0f}]"
        yield _name(one.topic), _value(one.value), interval, f"{one.lab}: {one.reason}"


def _gains(runs: Mapping[str, Run], context_length: int) -> Iterator[tuple[str, ...]]:
    """The newest comparisons of a joined configuration with the default, and what it had that is not advised now."""
    if TUNED_STEP not in runs:
        return
    frame = runs[TUNED_STEP].frame()
    for row in JOINED.ratios_to("default", frame).to_dict("records"):
        model, ranks = str(row["model"]), int(row["world_size"])
        rows = frame[(frame["model"] == model) & (frame["world_size"] == ranks)]
        other = list(_differences(rows.iloc[0], recommend(model, context_length, runs), ranks))
        ratio = f"{100 * row['ratio']:.0f}% [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
        yield model, str(ranks), ratio, f"{row['verdict']}{f' with {join_words(other)}' if other else ''}"


def _differences(row: "pd.Series[object]", recommendations: Sequence[Recommendation], ranks: int) -> Iterator[str]:
    for one in recommendations:
        if row[one.topic] != one.value and (ranks > 1 or one.topic not in RANK_FIELDS):
            yield f"{_name(one.topic)} {_value(row[one.topic])}"


def _notes(recommendations: Sequence[Recommendation], *, has_gains: bool) -> Iterator[str]:
    if not has_gains:
        yield f"Not measured together yet: labkit report {TUNED_STEP}"
    missing = sorted({one.lab for one in recommendations if one.reason.endswith("was not measured here")})
    if missing:
        yield f"Not measured here: labkit report {' '.join(missing)}"
    yield "As Python to paste: labkit advise --apply. On many GPUs: --gpus 64 --gpu h100."
