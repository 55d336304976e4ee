"""Options of `labkit advise`, checked before anything is computed: the command line and notebooks take the same."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,20})?(?:e[0-9]{1,2})?)\s*([kmbgt]?)", re.ASCII)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_number(value: Any) -> Any:
    """A number from "4M", "15T" or "4,000,000"; what is no text stays as it is. ValueError for other text."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace("_", "")
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    if (match := _NUMBER.fullmatch(text)) is None:
        raise ValueError("should be a number such as 8, 4M or 15T")
    return float(match[1]) * _UNITS[match[2]]


def _parse_gib(value: Any) -> Any:
    return parse_number(re.sub(r"\s*gib$", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value)


Whole = Annotated[int, BeforeValidator(parse_number), Field(ge=1, le=10**7)]
Layers = Annotated[int, BeforeValidator(parse_number), Field(ge=1, le=10_000)]
Gpus = Annotated[int, BeforeValidator(parse_number), Field(ge=1, le=2**20)]
Amount = Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1e18)]
Gib = Annotated[float, BeforeValidator(_parse_gib), Field(gt=0, le=1e6)]
Percent = Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=100)]


class Options(BaseModel):
    """What a reader may ask about; None for what was left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="A name (llama-3-8b, qwen-2.5-7b, gpt-3-175b, mini) or a config.json.")
    gpus: Gpus | None = Field(None, description="How many GPUs.")
    gpu: str | None = Field(None, description="Which: h100, a100-40gb, h200, b200, mi300x, 4090, ...")
    gpus_per_node: Gpus | None = Field(None, description="GPUs that share a node; default 8.")
    network_gbps: Amount | None = Field(None, description="All links of a node, in one direction.")
    tokens_per_step: Amount | None = Field(None, description="Of all GPUs together; default 4M.")
    sequence: Whole | None = Field(None, description="Tokens per sequence; default 4096.")
    precision: Literal["bf16", "fp16", "fp8"] | None = Field(None, description="bf16, fp16 or fp8; default bf16.")
    memory_reserve: Gib | None = Field(None, description="Memory of each GPU to leave free, as 8GiB.")
    tokens: Amount | None = Field(None, description="To train on, as 15T; default 20 per parameter.")
    framework: str | None = Field(None, description="A profile: nanotron, nemo, torchtitan, mosaic, megatron, ...")
    calibrate: str | None = Field(None, description="A CSV of three or more of your runs, with step_s.")
    tokens_per_second: Amount | None = Field(None, description="With --explain: measured, of all GPUs.")
    mfu: Percent | None = Field(None, description="With --explain: measured, in percent.")
    tp: Whole | None = Field(None, description="Tensor-parallel ranks; what is not named is searched.")
    pp: Whole | None = Field(None, description="Pipeline stages.")
    vp: Whole | None = Field(None, description="Chunks per stage.")
    cp: Whole | None = Field(None, description="Context-parallel ranks.")
    dp: Whole | None = Field(None, description="Data-parallel ranks.")
    shard: Literal["none", "zero1", "zero2", "zero3", "hsdp"] | None = Field(
        None, description="none, zero1, zero2, zero3 or hsdp."
    )
    micro_batch: Whole | None = Field(None, description="Sequences at once on a rank.")
    recompute: Literal["none", "selective", "full"] | None = Field(None, description="none, selective or full.")
    layers: Layers | None = Field(None, description="Instead of --model, with --hidden and --heads.")
    hidden: Whole | None = Field(None, description="Width.")
    heads: Layers | None = Field(None, description="Attention heads.")
    kv_heads: Layers | None = Field(None, description="Heads of keys and values; default --heads.")
    ffn: Whole | None = Field(None, description="Width of the feed-forward part; default 8/3 of --hidden.")
    vocab: Whole | None = Field(None, description="Vocabulary; default 32000.")

    def named(self, *names: str) -> dict[str, Any]:
        """Those of some options, or of all, that were not left out."""
        values = self.model_dump(exclude_none=True)
        return {name: values[name] for name in names or values if name in values}


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def read_options(values: Mapping[str, Any]) -> Options:
    """The options by name; text is read as on the command line. ValueError in one line for the first wrong one."""
    try:
        return Options.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, message = str(first["loc"][0]), first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if first["type"] == "extra_forbidden":
            raise ValueError(f"expected options among {', '.join(Options.model_fields)}; got {name}") from None
        raise ValueError(f"{flag(name)} {message}, got {str(first['input'])[:40]!r}") from None
