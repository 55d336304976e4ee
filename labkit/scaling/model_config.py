"""A model from a Hugging Face `config.json`: numbers are read, nothing is fetched and nothing is executed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from labkit.scaling.model import Model

LARGEST_BYTES = 2**20
LARGEST_SIZE = 10**7
_SIZES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
_LLAMA = _SIZES | {"kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size"}
_GPT = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "vocab": "vocab_size"}
_NEOX = _SIZES | {"ffn": "intermediate_size", "vocab": "vocab_size"}
_MPT = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads", "vocab": "vocab_size"}
_ARCHITECTURES = {
    # model_type: names of the sizes, gated, tied where the file is silent
    "llama": (_LLAMA, True, False),
    "mistral": (_LLAMA, True, False),
    "qwen2": (_LLAMA, True, False),
    "qwen3": (_LLAMA, True, False),
    "gpt2": (_GPT, False, True),
    "gpt_neox": (_NEOX, False, False),
    "mpt": (_MPT, False, True),
}
_OPTIONAL = ("kv_heads", "ffn")


def read_model(path: Path) -> Model:
    """The model that a `config.json`, or the folder it is in, describes.

    ValueError, in one line, for what is no such file, is larger than 1 MiB, or describes another architecture.
    """
    path = path / "config.json" if path.is_dir() else path
    shown = str(path)[-80:]
    try:
        if not path.is_file():  # a device or a pipe may never end
            raise ValueError(f"expected a config.json, and there is no file {shown}")
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{shown} cannot be read ({error.strerror})") from None
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"expected a config.json of at most 1 MiB, and {shown} is larger")
    try:
        found = json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:80]
        raise ValueError(f"expected JSON, and {shown} is none: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a config.json with a model's sizes, and {shown} holds none")
    return _model_of(found, path.resolve().parent.name)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _model_of(found: Mapping[str, Any], name: str) -> Model:
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"expected a config.json with a model_type among {known}; got {str(kind)[:40]!r}")
    names, ffn_gated, tied = _ARCHITECTURES[kind]
    sizes = {size: _whole(found, key, size in _OPTIONAL) for size, key in names.items()}
    hidden = sizes["hidden"] or 0
    if not sizes.get("ffn"):
        ratio = found.get("expansion_ratio", 4)
        sizes["ffn"] = hidden * (ratio if type(ratio) is int and 0 < ratio <= 64 else 4)
    tied = found.get("tie_word_embeddings", tied)
    if not isinstance(tied, bool):
        raise ValueError(f"expected tie_word_embeddings to be true or false, got {str(tied)[:40]!r}")
    width = found.get("head_dim")
    model = Model(**sizes, ffn_gated=ffn_gated, tied=tied, name=_printable(name))  # type: ignore[arg-type]
    if width is not None and width != hidden // model.heads:
        raise ValueError(f"expected heads of hidden / heads = {hidden // model.heads}, got a head_dim of {width!r:.20}")
    return model


def _whole(found: Mapping[str, Any], key: str, is_optional: bool) -> int | None:
    value = found.get(key)
    if value is None and is_optional:
        return None
    if type(value) is not int or not 0 < value <= LARGEST_SIZE:
        raise ValueError(f"expected {key} to be a whole number from 1 to {LARGEST_SIZE:,}, got {str(value)[:40]!r}")
    return value


def _printable(name: str) -> str:
    """The folder's name as a title: what a terminal or a page would take for a command is left out."""
    return "".join(letter for letter in name if letter.isalnum() or letter in " .-_")[:40] or "this model"
