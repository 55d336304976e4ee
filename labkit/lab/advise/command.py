"""The command `labkit advise`: its options, the answer on a screen, and the same as a page."""

import shlex
import sys
from collections.abc import Iterable, Iterator
from inspect import Parameter, Signature
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


def advise(
    *,
    output: str | None = None,
    apply: bool = False,
    explain: bool = False,
    as_json: bool = False,
    **texts: str | None,
) -> None:
    """Recommend layouts for a training on many GPUs; with --apply, a configuration for this
    machine."""
    page = None if output is None else Path(output)
    predictions = list["Prediction"]()
    try:
        options = read_options(texts)
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


def _parameter(name: str, help_text: str | None, *names: str) -> Parameter:
    """Make an option of the command line: text, or a flag of these names."""
    kind, default = (bool, False) if names else (str | None, None)
    option = typer.Option(*names, help=help_text, show_default=False)
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


advise.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        *(_parameter(name, field.description) for name, field in Options.model_fields.items()),
        _parameter("output", "Also write a page, one HTML file."),
        _parameter("apply", "Print this machine's best configuration as Python.", "--apply"),
        _parameter("explain", "Say why a run may be slower than predicted.", "--explain"),
        _parameter("as_json", "Print one JSON document (docs/for-scripts.md).", "--json"),
    ]
)


def _advise(
    options: Options, explain: bool, page: Path | None
) -> tuple["Report", list["Prediction"]]:
    """Answer the question, after every refusal."""
    from labkit.lab.advise.report import report_advice, report_diagnosis
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
        rows = nearest(request.run(causes.expected.layout))
        return report_diagnosis(question, causes, rows), [causes.expected]
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
