"""A model from a Hugging Face `config.json`: only sizes are read; nothing is fetched or executed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from labkit.scaling.model import Model

MAX_BYTES = 2**20
MAX_SIZE = 10**7
_SIZES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
_LLAMA = _SIZES | {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size"}
_GPT = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "vocab": "vocab_size"}
_MPT = {"layers": "n_layers", "hidden": "d_model", "heads": "n_heads", "vocab": "vocab_size"}
_UNTIED = "llama mistral ministral qwen2 qwen3 phi3 internlm2 internlm3 olmo olmo2 olmo3 granite stablelm baichuan"
_TIED = "gemma gemma2 gemma3_text smollm3 cohere cohere2"
_ARCHITECTURES = {
    # model_type: names of the sizes, gated, tied unless the file says otherwise
    **dict.fromkeys(_UNTIED.split(), (_LLAMA, True, False)),
    **dict.fromkeys(_TIED.split(), (_LLAMA, True, True)),
    "starcoder2": (_LLAMA, False, True),
    "phi": (_LLAMA, False, False),
    "gpt2": (_GPT, False, True),
    "gpt_neox": (_SIZES | {"ffn": "intermediate_size"}, False, False),
    "opt": (_SIZES | {"ffn": "ffn_dim"}, False, True),
    "mpt": (_MPT, False, True),
}
_OPTIONAL = ("kv_heads", "ffn", "head_dim")


def read_model(path: Path) -> Model:
    """The model that a `config.json`, or its folder, describes.

    ValueError, in one line, for another kind of file, more than 1 MiB, or another architecture.
    """
    path = path / "config.json" if path.is_dir() else path
    name = str(path)[-80:]
    try:
        if not path.is_file():  # a device or a pipe may never end
            raise ValueError(f"expected a config.json, and there is no file {name}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"expected a config.json of at most 1 MiB, and {name} is larger")
    try:
        config = json.loads(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:80]
        raise ValueError(f"expected JSON, and {name} is none: {reason}") from None
    if not isinstance(config, dict):
        raise ValueError(f"expected a config.json with a model's sizes, and {name} holds none")
    return _model(config, _folder_name(path.absolute().parent))


def _folder_name(folder: Path) -> str:
    """The folder's name; in Hugging Face's cache the model's: `models--OWNER--NAME/snapshots/HASH`."""
    if folder.parent.name == "snapshots" and "--" in folder.parents[1].name:
        folder = folder.parents[1]
    return folder.name.rpartition("--")[2]


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _model(config: Mapping[str, Any], name: str) -> Model:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"expected a config.json with a model_type among {known}; got {str(kind)[:40]!r}")
    names, ffn_gated, tied = _ARCHITECTURES[kind]
    sizes = {size: _size(config, key, is_optional=size in _OPTIONAL) for size, key in names.items()}
    if not sizes.get("ffn"):
        ratio = config.get("expansion_ratio", 4)
        sizes["ffn"] = sizes["hidden"] * (ratio if type(ratio) is int and 0 < ratio <= 64 else 4)
    tied = config.get("tie_word_embeddings", tied)
    if not isinstance(tied, bool):
        raise ValueError(f"expected tie_word_embeddings to be true or false, got {str(tied)[:40]!r}")
    return Model(**sizes, ffn_gated=ffn_gated, tied=tied, name=_printable(name))


def _size(config: Mapping[str, Any], key: str, *, is_optional: bool) -> int:
    """A size; 0 for an optional one that is left out."""
    value = config.get(key)
    if value is None and is_optional:
        return 0
    if type(value) is not int or not 0 < value <= MAX_SIZE:
        raise ValueError(f"expected {key} to be a whole number from 1 to {MAX_SIZE:,}, got {str(value)[:40]!r}")
    return value


def _printable(name: str) -> str:
    """The name as a title, without characters that a terminal or a page would take for a command."""
    return "".join(letter for letter in name if letter.isalnum() or letter in " .-_")[:40] or "this model"
