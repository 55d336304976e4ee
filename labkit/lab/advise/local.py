"""Recommendations for this machine, in sentences and as Python to paste."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.costs.memory import peak_bytes
from labkit.costs.transformer import SIZES
from labkit.lab.advise.machine import (
    DEFAULT,
    JOINED,
    OF_RANKS,
    Configuration,
    Recommendation,
    compute_share,
    configuration,
    expected_ratio,
    newest_runs,
    recommendations,
)
from labkit.lab.advise.report import PREDICTED, Report, Section
from labkit.lab.capacity import skip_reason
from labkit.lab.rows import select
from labkit.lab.runs.store import Run
from labkit.lab.units import join_words
from labkit.machine import describe_machine

MEASURED = "measured here"
MODEL, SEQUENCE, BATCH, RANKS = "small", 128, 2, 2
RANK_BYTES = 200 * 2**20
"""Of a process that has imported torch."""
_HOW = f"On {RANKS} ranks, batch {BATCH}, sequences of {SEQUENCE}; the parts were measured one by one."
ALLOWED = ("model", "sequence")
TOPICS: Mapping[str, str] = {
    "precision": "precision",
    "attention": "attention",
    "compiled": "torch.compile",
    "wrapper": "data-parallel wrapper",
    "bucket_mb": "bucket size (MiB)",
}


def check_model(name: str | None) -> str:
    """The size to ask about. ValueError for one that this machine's labs do not train."""
    if name is not None and name not in SIZES:
        raise ValueError(
            f"expected --gpu and --gpus with --model {name[:40]}; on this machine --model is one of {', '.join(SIZES)}"
        )
    return name or MODEL


def report(model: str, context_length: int) -> Report:
    """What the newest runs of this machine recommend together, and what that gained where it was measured."""
    runs = newest_runs()
    found = recommendations(model, context_length, runs)
    ratio = expected_ratio(found, compute_share=compute_share(model, runs))
    gains = list(_gains(runs, context_length))
    verdict, headline = _verdict(found, ratio)
    sections = [Section("What its labs recommend", MEASURED, ("", "use", "time", "because"), list(_rows(found)))]
    if gains:
        headings = ("model", "ranks", "time of the joined over the default's", "verdict")
        sections.append(Section("All of it together against the default, in turns", MEASURED, headings, gains))
    return Report(verdict, headline, f"{describe_machine().label}; {model}", sections, list(_notes(found, gains)))


def by_size() -> tuple[str, Section] | None:
    """What the newest runs here recommend, in a sentence, and a line for each size that two ranks can train.

    None where no run recommends anything.
    """
    runs = newest_runs()
    if not runs:
        return None
    gains = [row for row in _gains(runs, SEQUENCE) if row[1] == str(RANKS)]
    measured = {model: f"{ratio}, {verdict}" for model, _, ratio, verdict in gains}
    rows, told, before = [], "", ""
    for model in _trainable():
        found = recommendations(model, SEQUENCE, runs)
        ratio = expected_ratio(found, compute_share=compute_share(model, runs))
        told = _verdict(found, ratio)[0]
        changed = _changes(found)
        shown = "the same" if changed == before else changed
        rows.append((model, shown, f"{100 * ratio:.0f} %", measured.get(model, "not yet")))
        before = changed
    if not rows:
        return None
    if slower := [model for model, *_, verdict in gains if verdict.startswith("slower")]:
        keep = "Keep the defaults{}: what is faster alone was slower together."
        everywhere = len(slower) == len(gains)
        told = keep.format("") if everywhere else f"{told} {keep.format(f' with {join_words(slower)}')}"
    shares = (f"{ratio} of the default's time with {model} ({verdict})" for model, _, ratio, verdict in gains)
    if together := "; ".join(shares):
        told += f" Measured together: {together}."
    headings = ("model", "other than the default", f"share of the default's step, {PREDICTED}", MEASURED)
    return told, Section("Training on this machine", MEASURED, headings, rows, note=_HOW)


def _trainable() -> Iterator[str]:
    """Sizes of which this machine can hold a whole step on two ranks, from small to large."""
    machine = describe_machine()
    for name, shape in SIZES.items():
        step = RANK_BYTES + peak_bytes(shape, BATCH, SEQUENCE, phase="full_step")
        if skip_reason(machine, machine.device("auto"), RANKS * step, ranks=RANKS) is None:
            yield name


def _changes(found: Sequence[Recommendation]) -> str:
    changed = [f"{TOPICS[one.topic]} {_value(one.value)}" for one in found if one.value != getattr(DEFAULT, one.topic)]
    return ", ".join(changed) or "nothing"


def _value(value: Any) -> str:
    """In words; no bucket size is None in a configuration, and nan in a frame."""
    is_default = value is None or value != value
    return "the default" if is_default else {True: "yes", False: "no"}.get(value, str(value))


def python_of(model: str, context_length: int) -> str:
    """The joined configuration as a script's lines: attention, compile, wrapper, autocast, optimizer."""
    return code(configuration(recommendations(model, context_length, newest_runs())), model, context_length)


def code(chosen: Configuration, model: str, context_length: int) -> str:
    """Lines that build the model under this configuration and make one step; on one rank without the wrapper's."""
    bucket = "" if chosen.bucket_mb is None else f", bucket_mb={chosen.bucket_mb:g}"
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
        f'wrapped = wrap("{chosen.wrapper}", model{bucket}) if dist.is_initialized() else model',
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)",
        "",
        "",
        "def train_step(inputs, targets):",
        *_step(chosen.precision),
        "    loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad(set_to_none=True)",
        "    return loss.detach()",
    ]
    return "\n".join(lines)


def _step(precision: str) -> list[str]:
    if precision == "float32":
        return ["    loss = language_model_loss(wrapped(inputs), targets)"]
    return [
        f"    with torch.autocast(inputs.device.type, dtype=torch.{precision}):",
        "        loss = language_model_loss(wrapped(inputs), targets)",
    ]


def _verdict(found: Sequence[Recommendation], ratio: float) -> tuple[str, str]:
    changed = [TOPICS[one.topic] for one in found if one.value != getattr(DEFAULT, one.topic)]
    if not changed:
        return "Keep the defaults.", "No run of this machine shows anything else to be faster."
    headline = f"Together they should leave {100 * ratio:.0f} % of a step's time on two ranks ({PREDICTED})."
    alone = f"{'each ' if len(changed) > 1 else ''}faster alone where it was measured"
    return f"Change {len(changed)} of {len(found)} defaults, {alone}.", headline


def _rows(found: Sequence[Recommendation]) -> Iterator[tuple[str, ...]]:
    for one in found:
        is_default = one.value == getattr(DEFAULT, one.topic)
        interval = "" if is_default else f"{100 * one.ratio:.0f} % [{100 * one.low:.0f}, {100 * one.high:.0f}]"
        yield TOPICS[one.topic], _value(one.value), interval, f"{one.lab}: {one.why}"


def _gains(runs: Mapping[str, Run], context_length: int) -> Iterator[tuple[str, ...]]:
    """What the lab of this machine measured last, and of what, where that is not what is recommended now."""
    if "this_machine" not in runs:
        return
    frame = runs["this_machine"].frame()
    for row in JOINED.over(frame, "default").to_dict("records"):
        model, ranks = str(row["model"]), int(row["world_size"])
        ratio = f"{100 * row['ratio']:.0f} % [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
        of_row = select(frame, list(TOPICS), model=model, world_size=ranks, implementation="joined").iloc[0]
        then = [
            f"{TOPICS[one.topic]} {_value(of_row[one.topic])}"
            for one in recommendations(model, context_length, runs)
            if not _is_same(of_row[one.topic], one.value) and (ranks > 1 or one.topic not in OF_RANKS)
        ]
        yield model, str(ranks), ratio, f"{row['verdict']}{f' with {join_words(then)}' if then else ''}"


def _is_same(measured: object, recommended: object) -> bool:
    """No bucket size is None now, and nan in a frame."""
    return measured == recommended or (recommended is None and measured != measured)


def _notes(found: Sequence[Recommendation], gains: Sequence[Sequence[str]]) -> Iterator[str]:
    if not gains:
        yield "Not measured together yet: labkit report this_machine"
    missing = sorted({one.lab for one in found if one.why.startswith("not measured here")})
    if missing:
        yield f"Not measured here: labkit report {' '.join(missing)}"
    yield "As Python to paste: labkit advise --apply. On many GPUs: --gpus 64 --gpu h100."
