"""The command `labkit advise`: its options, and the answer on a screen."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.advise.request import Options, make_request, read_options
from labkit.lab.commands.console import Json, number, print_json
from labkit.lab.config import ParameterError

if TYPE_CHECKING:
    from labkit.scaling.prediction import Prediction


def _option(help_text: str) -> Any:
    return typer.Option(help=help_text, show_default=False)


# Options are text here: `read_options` reads 4M and 15T, and names what is wrong with others,
# for notebooks as well.
Text = str | None


def advise(
    context: typer.Context,
    *,
    model: Annotated[Text, _option("Name (llama-3-8b, gpt-3-175b, mini) or config.json.")] = None,
    gpus: Annotated[Text, _option("Number of GPUs.")] = None,
    gpu: Annotated[Text, _option("GPU: h100, a100-40gb, h200, b200, mi300x, 4090, ...")] = None,
    gpus_per_node: Annotated[Text, _option("GPUs that share a node; default 8.")] = None,
    network_gbps: Annotated[Text, _option("Gbit/s of all links of a node, one direction.")] = None,
    measured_bus_bandwidth: Annotated[Text, _option("Measured GB/s, nccl-tests' busbw.")] = None,
    tokens_per_step: Annotated[Text, _option("Tokens per step of all GPUs; default 4M.")] = None,
    sequence: Annotated[Text, _option("Tokens per sequence; default 4096.")] = None,
    precision: Annotated[Text, _option("bf16, fp16 or fp8; default bf16.")] = None,
    tokens: Annotated[Text, _option("Tokens to train on; default 20 per parameter.")] = None,
    framework: Annotated[Text, _option("nemo, torchtitan, fsdp2, nanotron, mosaic, ...")] = None,
    calibrate: Annotated[Text, _option("A CSV of three or more of your runs, with step_s.")] = None,
    tokens_per_second: Annotated[Text, _option("With --explain: rate of all GPUs.")] = None,
    mfu: Annotated[Text, _option("With --explain: measured MFU in percent.")] = None,
    tp: Annotated[Text, _option("Tensor-parallel ranks; all below: searched if not set.")] = None,
    pp: Annotated[Text, _option("Pipeline stages.")] = None,
    vp: Annotated[Text, _option("Chunks per stage.")] = None,
    cp: Annotated[Text, _option("Context-parallel ranks.")] = None,
    dp: Annotated[Text, _option("Data-parallel ranks.")] = None,
    shard: Annotated[Text, _option("Sharding: none, zero1, zero2, zero3 or hsdp.")] = None,
    micro_batch: Annotated[Text, _option("Sequences per micro-batch of a rank.")] = None,
    recompute: Annotated[Text, _option("none, selective or full.")] = None,
    lora: Annotated[bool, typer.Option("--lora", hidden=True)] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Print this machine's best configuration as Python.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why a run may be slower than predicted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Recommend layouts for many GPUs; with --apply, the best configuration for this machine."""
    predictions = list["Prediction"]()
    try:
        # A hidden option, because people ask for it: typer would only say that there is none.
        if lora:
            raise ValueError(
                "LoRA is not modeled: the nearest is training all parameters, which takes as long"
                " per step or longer, and more memory; leave --lora out"
            )
        options = read_options({name: context.params[name] for name in Options.model_fields})
        if apply:
            lines = [_apply(options, explain)]
        else:
            lines, predictions = _advise(options, explain)
    except (ValueError, OSError) as error:
        raise ParameterError(str(error)) from None
    if as_json:
        print_json("advise", map(_number, predictions), answer=lines)
    else:
        print("\n".join(lines))


def _advise(options: Options, explain: bool) -> tuple[list[str], list["Prediction"]]:
    """Return the answer and the layouts whose numbers JSON has. ValueError for bad options."""
    from labkit.advise.advice import advise as find_advice
    from labkit.advise.explain import explain as diagnose
    from labkit.advise.report import report_advice, report_diagnosis

    if len(options.named("tokens_per_second", "mfu")) != int(explain):
        raise ValueError(
            "expected one of --tokens-per-second and --mfu (in percent) with --explain, and only"
            " with it"
        )
    request = make_request(options)
    if explain:
        diagnosis = diagnose(request, options)
        return [*report_diagnosis(diagnosis)], [diagnosis.expected]
    advice = find_advice(request)
    # JSON has numbers also where nothing fits: how much memory the leanest layout needs.
    return [*report_advice(advice)], list(advice.best or [advice.first])


def _apply(options: Options, explain: bool) -> str:
    """Return this machine's combined configuration as Python, from its newest runs."""
    from labkit.lab.recommended import recommended_code

    # The others are about a cluster, of which this machine's runs know nothing.
    if explain or options.named().keys() - {"model", "sequence"}:
        raise ValueError(
            "expected --apply with --model and --sequence alone: it prints Python for this machine"
        )
    return recommended_code(options.model, options.sequence)


def _number(prediction: "Prediction") -> dict[str, Any]:
    """Return the step time of a layout as JSON has it, with memory and MFU."""
    low, high = prediction.interval_90
    return number(
        str(prediction.layout),
        prediction.step_s,
        "s",
        low=low,
        high=high,
        validity="; ".join(prediction.warnings) or "ok",
        peak_gib=prediction.peak_gib,
        mfu=prediction.mfu,
        out_of_memory=prediction.out_of_memory,
    )
