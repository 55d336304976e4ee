"""Recommendations for this machine, in sentences and as Python to paste."""

from collections.abc import Iterator, Mapping

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


def make_report(model: str, context_length: int) -> Report:
    """Recommendations of the newest runs of this machine, and their gain together where it was measured."""
    runs = newest_runs(labs={TUNED_STEP, *(topic.lab for topic in TOPICS)})
    recommendations = recommend(model, context_length, runs)
    changed = [_name(one.topic) for one in recommendations if one.value != getattr(DEFAULT, one.topic)]
    verdict = f"Change {len(changed)} of {len(recommendations)} defaults." if changed else "Keep the defaults."
    headline = "No run of this machine shows a faster alternative."
    if changed:
        headline = f"Each of {join_words(changed)} was faster alone."
    rows = [_row(one) for one in recommendations]
    sections = [Section("Recommendations of its labs", MEASURED, ("topic", "use", "time", "reason"), rows)]
    notes = ["As Python to paste: labkit advise --apply. On many GPUs: --gpus 64 --gpu h100."]
    if gains := list(_gains(runs, context_length)):
        headings = ("model", "ranks", "time relative to the default", "verdict")
        sections.append(Section("All of it together against the default, in turns", MEASURED, headings, gains))
    else:
        notes.insert(0, f"Not measured together yet: labkit report {TUNED_STEP}")
    if missing := sorted({one.lab for one in recommendations} - runs.keys()):
        notes.insert(0, f"Not measured here: labkit report {' '.join(missing)}")
    return Report(verdict, headline, f"{describe_machine().label}; {model}", sections, notes)


def recommended_code(model: str, context_length: int) -> str:
    """The joined configuration as a script's lines: attention, compile, wrapper, autocast, optimizer."""
    return write_code(join(recommend(model, context_length, newest_runs())), model, context_length)


def write_code(chosen: Configuration, model: str, context_length: int) -> str:
    """Lines that build the model under this configuration and make one step; on one rank without the wrapper's."""
    lines = [
        "import torch",
        "import torch.distributed as dist",
        "",
        "from labkit.nn.attention_implementations import attention_named",
        "from labkit.nn.transformer import Transformer, language_model_loss, shape_named",
        "from labkit.parallel.data_parallel import wrap",
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


def _row(one: Recommendation) -> tuple[str, ...]:
    value = {True: "yes", False: "no"}.get(one.value, str(one.value)) if isinstance(one.value, bool) else str(one.value)
    time = "" if one.value == getattr(DEFAULT, one.topic) else _percent(one.ratio, one.low, one.high)
    return _name(one.topic), value, time, f"{one.lab}: {one.reason}"


def _percent(ratio: float, low: float, high: float) -> str:
    return f"{100 * ratio:.0f}% [{100 * low:.0f}, {100 * high:.0f}]"


def _gains(runs: Mapping[str, Run], context_length: int) -> Iterator[tuple[str, ...]]:
    """The newest comparisons of a joined configuration with the default, if it is the one that is advised now."""
    if TUNED_STEP not in runs:
        return
    frame = runs[TUNED_STEP].frame()
    for row in JOINED.ratios_to("default", frame).to_dict("records"):
        model, ranks = str(row["model"]), int(row["world_size"])
        measured = frame[(frame["model"] == model) & (frame["world_size"] == ranks)].iloc[0]
        advised = recommend(model, context_length, runs)
        compared = [one for one in advised if ranks > 1 or one.topic not in RANK_FIELDS]
        if all(measured[one.topic] == one.value for one in compared):
            yield model, str(ranks), _percent(row["ratio"], row["low"], row["high"]), str(row["verdict"])
