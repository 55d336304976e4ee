"""The command `labkit advise`: its options, the answer on a screen, and the same as a page."""

import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.advise.request import Options, flag, make_request, read_options
from labkit.lab.commands.console import number, print_json
from labkit.lab.config import ParameterError
from labkit.lab.project import check_page, is_full_disk, path_from_here, write_file

if TYPE_CHECKING:
    from labkit.lab.advise.text import Report, Section
    from labkit.scaling.prediction import Prediction


def _option(help_text: str) -> Any:
    return typer.Option(help=help_text, show_default=False)


Text = str | None
"""An option as it is written; `read_options` reads 4M, 15T and 8GiB, and says what is wrong."""


def advise(
    context: typer.Context,
    *,
    model: Annotated[
        Text, _option("A name (llama-3-8b, qwen-2.5-7b, gpt-3-175b, mini) or a config.json.")
    ] = None,
    gpus: Annotated[Text, _option("Number of GPUs.")] = None,
    gpu: Annotated[Text, _option("GPU: h100, a100-40gb, h200, b200, mi300x, 4090, ...")] = None,
    gpus_per_node: Annotated[Text, _option("GPUs that share a node; default 8.")] = None,
    network_gbps: Annotated[
        Text, _option("Gbit/s of all links of a node, in one direction.")
    ] = None,
    measured_bus_bandwidth: Annotated[
        Text, _option("GB/s of an all-reduce over all nodes, as nccl-tests print it (busbw).")
    ] = None,
    tokens_per_step: Annotated[
        Text, _option("Tokens per step of all GPUs together; default 4M.")
    ] = None,
    sequence: Annotated[Text, _option("Tokens per sequence; default 4096.")] = None,
    precision: Annotated[Text, _option("bf16, fp16 or fp8; default bf16.")] = None,
    memory_reserve: Annotated[
        Text, _option("Memory of each GPU to leave free, such as 8GiB.")
    ] = None,
    tokens: Annotated[
        Text, _option("Tokens to train on, such as 15T; default 20 per parameter.")
    ] = None,
    framework: Annotated[
        Text, _option("Framework: nemo, megatron-bridge, torchtitan, fsdp2, nanotron, mosaic, ...")
    ] = None,
    calibrate: Annotated[Text, _option("A CSV of three or more of your runs, with step_s.")] = None,
    tokens_per_second: Annotated[
        Text, _option("With --explain: measured rate of all GPUs.")
    ] = None,
    mfu: Annotated[Text, _option("With --explain: measured MFU in percent.")] = None,
    tp: Annotated[
        Text, _option("Tensor-parallel ranks. This and the following are searched unless set.")
    ] = None,
    pp: Annotated[Text, _option("Pipeline stages.")] = None,
    vp: Annotated[Text, _option("Chunks per stage.")] = None,
    cp: Annotated[Text, _option("Context-parallel ranks.")] = None,
    dp: Annotated[Text, _option("Data-parallel ranks.")] = None,
    shard: Annotated[Text, _option("Sharding: none, zero1, zero2, zero3 or hsdp.")] = None,
    micro_batch: Annotated[Text, _option("Sequences per micro-batch of a rank.")] = None,
    recompute: Annotated[Text, _option("none, selective or full.")] = None,
    lora: Annotated[bool, typer.Option("--lora", hidden=True)] = False,
    output: Annotated[Text, _option("Also write a page, one HTML file.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Print this machine's best configuration as Python.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why a run may be slower than predicted.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")
    ] = False,
) -> None:
    """Recommend layouts for a training on many GPUs; with --apply, a configuration for this
    machine."""
    page = None if output is None else Path(output)
    predictions = list["Prediction"]()
    try:
        if lora:
            raise ValueError(
                "LoRA is not modeled: the nearest is training all parameters, which takes as long"
                " per step or longer, and more memory; leave --lora out"
            )
        options = read_options({name: context.params[name] for name in Options.model_fields})
        if apply:
            lines = [_apply(options, page, explain)]
        else:
            report, predictions = _advise(options, explain, page)
            lines = [*report.lines()]
            if page is not None:
                _write_page(report, page)
                lines.append(f"page: {path_from_here(page)}")
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        if is_full_disk(error):
            raise  # it names the file
        raise ParameterError(str(error)) from None
    if as_json:
        print_json("advise", prediction_numbers(predictions), answer=lines)
    else:
        print("\n".join(lines))


def _advise(
    options: Options, explain: bool, page: Path | None
) -> tuple["Report", list["Prediction"]]:
    """Answer the question, after every refusal."""
    from labkit.lab.advise.diagnosis import report_diagnosis
    from labkit.lab.advise.report import report_advice
    from labkit.scaling import advice, slowdown_causes
    from labkit.scaling.published import nearest

    if explain != bool(options.named("tokens_per_second", "mfu")):
        raise ValueError(
            "expected --tokens-per-second or --mfu (in percent) with --explain, and only with it"
        )
    question = make_request(options)
    request = question.request
    if page is not None:
        check_page(page)
    if explain:
        mfu = None if options.mfu is None else options.mfu / 100
        speed = options.tokens_per_second
        causes = slowdown_causes.explain(
            request, tokens_per_s=speed, mfu=mfu, unspecified=question.unspecified
        )
        return report_diagnosis(question, causes), [causes.expected]
    best = advice.advise(request)
    report = report_advice(question, best, nearest(request.run(best.first.layout)))
    return report, list(best.best or [best.first])


def _apply(options: Options, page: Path | None, explain: bool) -> str:
    """Return this machine's combined configuration as Python, from its newest runs."""
    from labkit.lab.recommended import recommended_code

    other = [name for name in options.named() if name not in ("model", "sequence")]
    other += ["output"] * (page is not None) + ["explain"] * explain
    if other:
        raise ValueError(
            f"expected --apply without {flag(other[0])}: it prints Python for this machine"
        )
    return recommended_code(options.model, options.sequence)


def prediction_numbers(predictions: Iterable["Prediction"]) -> Iterator[dict[str, Any]]:
    """Yield the step time of each layout as JSON has it, with memory and MFU."""
    for one in predictions:
        low, high = one.interval_90
        facts: dict[str, Any] = {
            "peak_gib": one.peak_gib,
            "mfu": one.mfu,
            "out_of_memory": one.out_of_memory,
        }
        validity = "; ".join(one.warnings) or "ok"
        yield number(
            str(one.layout), one.step_s, "s", low=low, high=high, validity=validity, **facts
        )


def _write_page(report: "Report", page: Path) -> None:
    """Write the page, with all rows of every table and the steps as figures."""
    import pandas as pd

    from labkit.lab.advise.notebook import draw_steps
    from labkit.lab.pages import cards
    from labkit.lab.pages.html import render

    def show(section: "Section") -> dict[str, Any]:
        table = cards.table(pd.DataFrame(section.rows, columns=list(section.headings))).data
        alt = "The parts of a step in seconds."
        figure = (
            cards.figure(draw_steps(section.steps), alt, "steps").on_page if section.steps else ""
        )
        return {"title": section.title, "mark": section.mark, "table": table, "figure": figure}

    command = shlex.join(["labkit", *sys.argv[1:]])
    sections = [show(section) for section in report.sections]
    write_file(
        page, render("advice_page.html.j2", command=command, report=report, sections=sections)
    )
