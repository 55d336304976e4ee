"""The command `labkit advise`: its options, the answer on a screen, and the same as a page."""

import sys
from collections.abc import Iterable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.advise.request import Options, flag, make_request, read_options
from labkit.lab.commands.console import print_json
from labkit.lab.config import ParameterError
from labkit.lab.project import is_full_disk

if TYPE_CHECKING:
    from labkit.lab.advise.report import Report, Section
    from labkit.scaling.prediction import Prediction


def advise(
    *,
    output: str | None = None,
    apply: bool = False,
    explain: bool = False,
    as_json: bool = False,
    **texts: str | None,
) -> None:
    """Recommend layouts for a training on many GPUs; with --apply, a configuration for this machine."""
    page, predictions = None if output is None else Path(output), list["Prediction"]()
    try:
        options = read_options(texts)
        lines = [_apply(options, page, explain)] if apply else list(_advise(options, explain, page, predictions))
    except (ValueError, OSError) as error:
        if is_full_disk(error):
            raise  # it names the file
        raise ParameterError(str(error)) from None
    if as_json:
        print_json("advise", prediction_numbers(predictions), answer=lines)
    else:
        print("\n".join(lines))


def _parameters() -> Iterator[Parameter]:
    """An option of the command line for each field of `Options`, all text, and those of the command itself."""
    for name, field in Options.model_fields.items():
        yield _parameter(name, str | None, None, str(field.description))
    yield _parameter("output", str | None, None, "Also write a page, one HTML file.")
    yield _parameter("apply", bool, False, "Print this machine's best configuration as Python.", "--apply")
    yield _parameter("explain", bool, False, "Why is my run slower than this?", "--explain")
    yield _parameter("as_json", bool, False, "Print one JSON document (docs/for-scripts.md).", "--json")


def _parameter(name: str, kind: Any, default: Any, help_text: str, *names: str) -> Parameter:
    option = typer.Option(*names, help=help_text, show_default=False)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


advise.__signature__ = Signature(list(_parameters()))  # type: ignore[attr-defined]


def _advise(options: Options, explain: bool, page: Path | None, predictions: list["Prediction"]) -> Iterator[str]:
    """The lines to print, after every refusal, and after the page is written; adds what was predicted."""
    from labkit.lab.advise.report import report_advice, report_diagnosis
    from labkit.scaling import advice, slowdown_causes
    from labkit.scaling.published import nearest

    if explain != bool(options.named("tokens_per_second", "mfu")):
        raise ValueError("expected --tokens-per-second or --mfu (in percent) with --explain, and only with it")
    question = make_request(options)
    request = question.request
    if page is not None:
        _check(page)
    if explain:
        mfu = None if options.mfu is None else options.mfu / 100
        speed = options.tokens_per_second
        causes = slowdown_causes.explain(request, tokens_per_s=speed, mfu=mfu, unspecified=question.unspecified)
        predictions.append(causes.expected)
        report = report_diagnosis(question, causes, nearest(request.run(causes.expected.layout)))
    else:
        best = advice.advise(request)
        predictions.extend(best.best or [best.first])
        report = report_advice(question, best, nearest(request.run(best.first.layout)))
    yield from report.lines()
    if page is not None:
        from labkit.lab.project import path_from_here

        _write_page(report, page)
        yield f"page: {path_from_here(page)}"


def _apply(options: Options, page: Path | None, explain: bool) -> str:
    """This machine's joined configuration as Python, from its newest runs."""
    from labkit.lab.recommended import recommended_code

    other = [name for name in options.named() if name not in ("model", "sequence")]
    other += ["output"] * (page is not None) + ["explain"] * explain
    if other:
        raise ValueError(f"expected --apply without {flag(other[0])}: it prints Python for this machine")
    return recommended_code(options.model, options.sequence)


def prediction_numbers(predictions: Iterable["Prediction"]) -> Iterator[dict[str, Any]]:
    """Yield the step time of each layout as JSON has it, with memory and MFU."""
    from labkit.lab.commands.console import number
    from labkit.scaling.advice import describe_layout

    for one in predictions:
        low, high = one.interval_90
        facts: dict[str, Any] = {"peak_gib": one.peak_gib, "mfu": one.mfu, "out_of_memory": one.out_of_memory}
        validity = "; ".join(one.warnings) or "ok"
        yield number(describe_layout(one.layout), one.step_s, "s", low=low, high=high, validity=validity, **facts)


def _check(page: Path) -> None:
    from labkit.lab.project import check_writable

    if page.is_dir():
        raise ValueError(f"--output names the file of the page, and {page} is a folder")
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"expected --output to name an .html file, got {str(page)[-80:]!r}")
    check_writable(page.parent)


def _write_page(report: "Report", page: Path) -> None:
    """Write the page, with all rows of every table and the steps as figures."""
    import shlex

    import pandas as pd

    from labkit.lab.advise.notebook import draw_steps
    from labkit.lab.pages import cards
    from labkit.lab.pages.html import render
    from labkit.lab.project import write_file

    def show(section: "Section") -> dict[str, Any]:
        table = cards.table(pd.DataFrame(section.rows, columns=list(section.headings))).data
        alt = "The parts of a step in seconds."
        figure = cards.figure(draw_steps(section.steps), alt, "steps").on_page if section.steps else ""
        return {"title": section.title, "mark": section.mark, "table": table, "figure": figure}

    command = shlex.join(["labkit", *sys.argv[1:]])
    sections = [show(section) for section in report.sections]
    write_file(page, render("advice_page.html.j2", command=command, report=report, sections=sections))
