"""The command `labkit advise`: options, all taken as text so that a wrong one is refused in one line, and output."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.lab.config import ParameterError

if TYPE_CHECKING:
    from labkit.lab.advise.report import Report


def _option(help_text: str, *names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help_text, show_default=False)


Text = str | None


def advise(
    model: Annotated[Text, _option("A name (llama-3-8b, qwen-2.5-7b, gpt-3-175b, mini) or a config.json.")] = None,
    gpus: Annotated[Text, _option("How many GPUs.")] = None,
    gpu: Annotated[Text, _option("Which: h100, a100-40gb, h200, b200, mi300x, 4090, ...")] = None,
    gpus_per_node: Annotated[Text, _option("GPUs that share a node; default 8.")] = None,
    network_gbps: Annotated[Text, _option("All links of a node, in one direction.")] = None,
    tokens_per_step: Annotated[Text, _option("Of all GPUs together; default 4M.")] = None,
    sequence: Annotated[Text, _option("Tokens of a sequence; default 4096.")] = None,
    precision: Annotated[Text, _option("bf16, fp16 or fp8; default bf16.")] = None,
    memory_reserve: Annotated[Text, _option("Memory of each GPU to leave free, as 8GiB.")] = None,
    tokens: Annotated[Text, _option("To train on, as 15T; default 20 per parameter.")] = None,
    framework: Annotated[Text, _option("A profile: nanotron, nemo, torchtitan, mosaic, megatron, ...")] = None,
    calibrate: Annotated[
        Text, _option("A CSV of three own runs or more, as labkit predict takes it, with step_s.")
    ] = None,
    output: Annotated[Text, _option("Also write a page, one HTML file.")] = None,
    apply: Annotated[bool, _option("For this machine: print the configuration as Python.", "--apply")] = False,
    explain: Annotated[bool, _option("Why is my run slower than this?", "--explain")] = False,
    tokens_per_second: Annotated[Text, _option("With --explain: measured, of all GPUs.")] = None,
    mfu: Annotated[Text, _option("With --explain: measured, in percent.")] = None,
    tp: Annotated[Text, _option("Tensor-parallel ranks; what is not named is searched.")] = None,
    pp: Annotated[Text, _option("Pipeline stages.")] = None,
    vp: Annotated[Text, _option("Chunks per stage.")] = None,
    cp: Annotated[Text, _option("Context-parallel ranks.")] = None,
    dp: Annotated[Text, _option("Data-parallel ranks.")] = None,
    shard: Annotated[Text, _option("none, zero1, zero2, zero3 or hsdp.")] = None,
    micro_batch: Annotated[Text, _option("Sequences at once on a rank.")] = None,
    recompute: Annotated[Text, _option("none, selective or full.")] = None,
    layers: Annotated[Text, _option("Instead of --model, with --hidden and --heads.")] = None,
    hidden: Annotated[Text, _option("Width.")] = None,
    heads: Annotated[Text, _option("Attention heads.")] = None,
    kv_heads: Annotated[Text, _option("Heads of keys and values; default --heads.")] = None,
    ffn: Annotated[Text, _option("Width of the feed-forward part; default 8/3 of --hidden.")] = None,
    vocab: Annotated[Text, _option("Vocabulary; default 32000.")] = None,
) -> None:
    """Recommend layouts for a training on many GPUs; without --gpus, a configuration for this machine."""
    options = {name: value for name, value in locals().items() if name not in ("output", "explain", "apply")}
    page = None if output is None else Path(output)
    try:
        if gpu is None and gpus is None and not explain:
            lines = list(_answer_locally(options, apply, page))
        elif apply:
            raise ValueError("expected --apply without --gpu, --gpus and --explain: it is about this machine")
        else:
            lines = list(_answer(options, explain, page))
    except (ValueError, OSError) as error:
        raise ParameterError(str(error)) from None
    print("\n".join(lines))


def _answer(options: dict[str, Text], explain: bool, page: Path | None) -> Iterator[str]:
    """The lines to print, after every refusal, and after the page is written."""
    from labkit.lab.advise import diagnosis, report
    from labkit.lab.advise.request import read_measurement, read_request
    from labkit.scaling.advice import advise as find_advice
    from labkit.scaling.published import nearest
    from labkit.scaling.slowdown_causes import explain as find_causes

    if not explain and (options["tokens_per_second"] or options["mfu"]):
        raise ValueError("expected --explain with --tokens-per-second or --mfu")
    request = read_request(options)
    if page is not None:
        _check(page)
    if explain:
        tokens_per_s, mfu = read_measurement(options)
        found = find_causes(request.request, tokens_per_s=tokens_per_s, mfu=mfu, unspecified=request.unspecified)
        rows = nearest(request.request.run(found.expected.layout))
        yield from _lines(diagnosis.make_report(request, found, rows), page)
    else:
        advice = find_advice(request.request)
        rows = nearest(request.request.run(advice.first.layout))
        yield from _lines(report.make_report(request, advice, rows), page)


def _answer_locally(options: dict[str, Text], apply: bool, page: Path | None) -> Iterator[str]:
    """The recommendations for this machine, or the same as Python."""
    from labkit.lab.advise import local
    from labkit.lab.advise.request import parse_int

    for name, value in options.items():
        if value is not None and name not in local.ALLOWED:
            raise ValueError(f"expected --gpu and --gpus with --{name.replace('_', '-')}; without, it is this machine")
    model, sequence = local.check_model(options["model"]), parse_int(options, "sequence") or local.SEQUENCE
    if apply:
        if page is not None:
            raise ValueError("expected --apply without --output: it prints Python")
        yield local.python_of(model, sequence)
        return
    if page is not None:
        _check(page)
    yield from _lines(local.report(model, sequence), page)


def _lines(report: "Report", page: Path | None) -> Iterator[str]:
    """The report on a screen; also written as a page if there is one."""
    import shlex

    from labkit.lab.advise import screen
    from labkit.lab.project import path_from_here

    yield from screen.lines(report)
    if page is not None:
        from labkit.lab.advise.page import write_page

        write_page(report, shlex.join(["labkit", *sys.argv[1:]]), page)
        yield f"page: {path_from_here(page)}"


def _check(page: Path) -> None:
    from labkit.lab.project import check_writable

    if page.is_dir():
        raise ValueError(f"--output names the file of the page, and {page} is a folder")
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"expected --output to name an .html file, got {str(page)[-80:]!r}")
    check_writable(page.parent)
