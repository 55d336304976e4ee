"""The options of `labkit advise`, all taken as text, so that a wrong one is refused in one line; and what it prints."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from labkit.lab.config import ParameterError


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
    """What to use: the best layouts of a training on many GPUs; without --gpus, what this machine's runs recommend."""
    given = {name: value for name, value in locals().items() if name not in ("output", "explain", "apply")}
    page = None if output is None else Path(output)
    try:
        if gpu is None and gpus is None and not explain:
            lines = list(_answer_here(given, apply, page))
        elif apply:
            raise ValueError("expected --apply without --gpu, --gpus and --explain: it is about this machine")
        else:
            lines = list(_answer(given, explain, page))
    except (ValueError, OSError) as error:
        raise ParameterError(str(error)) from None
    print("\n".join(lines))


def _answer(given: dict[str, Text], explain: bool, page: Path | None) -> Iterator[str]:
    """The lines to print, after everything that may be refused was, and the page is written."""
    from labkit.lab.advise import explained, report, screen
    from labkit.lab.advise.request import measured, read_request
    from labkit.lab.project import reference_directory
    from labkit.scaling.advice import advise as find_advice
    from labkit.scaling.explanation import explain as find_explanation
    from labkit.scaling.published import load_published, nearest

    if not explain and (given["tokens_per_second"] or given["mfu"]):
        raise ValueError("expected --explain with --tokens-per-second or --mfu")
    asked = read_request(given)
    if page is not None:
        _check(page)
    published = load_published(reference_directory() / "scaling")
    if explain:
        tokens_per_s, mfu = measured(given)
        found = find_explanation(asked.request, tokens_per_s=tokens_per_s, mfu=mfu, unnamed=asked.unnamed)
        rows = nearest(published, asked.request.run(found.expected.layout))
        made = explained.report(asked, found, rows)
    else:
        advice = find_advice(asked.request)
        rows = nearest(published, asked.request.run(advice.first.layout))
        made = report.report(asked, advice, rows)
    yield from screen.lines(made)
    if page is not None:
        yield _written(made, page)


def _answer_here(given: dict[str, Text], apply: bool, page: Path | None) -> Iterator[str]:
    """What to use on this machine, or the same as Python."""
    from labkit.lab.advise import here, screen
    from labkit.lab.advise.request import whole

    for name, value in given.items():
        if value is not None and name not in here.ALLOWED:
            raise ValueError(f"expected --gpu and --gpus with --{name.replace('_', '-')}; without, it is this machine")
    model, sequence = here.check_model(given["model"]), whole(given, "sequence") or here.SEQUENCE
    if apply:
        if page is not None:
            raise ValueError("expected --apply without --output: it prints Python")
        yield here.python_of(model, sequence)
        return
    if page is not None:
        _check(page)
    made = here.report(model, sequence)
    yield from screen.lines(made)
    if page is not None:
        yield _written(made, page)


def _check(page: Path) -> None:
    from labkit.lab.project import check_writable

    if page.is_dir():
        raise ValueError(f"--output names the file of the page, and {page} is a folder")
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"expected --output to name an .html file, got {str(page)[-80:]!r}")
    check_writable(page.parent)


def _written(made: object, page: Path) -> str:
    import shlex

    from labkit.lab.advise.page import write_page
    from labkit.lab.project import path_from_here

    write_page(made, shlex.join(["labkit", *sys.argv[1:]]), page)  # type: ignore[arg-type]
    return f"page: {path_from_here(page)}"
