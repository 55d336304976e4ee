"""The decoder that is trained: shape, parameters, FLOPs; by name or `config.json`.

A matmul of (m, k) by (k, n) is 2mnk FLOPs. `step_flops` takes a model, or the columns of many. Of a
`config.json` only sizes are read; nothing is fetched or executed.

Legend: L layers, h hidden, q width of all query heads, f ffn, V vocabulary, S sequence, b
sequences.
"""

import difflib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.costs.transformer import SIZES
from labkit.scaling import Count, read_table, validate

Numbers = NDArray[np.float64]

# What makers add to a name, once punctuation is gone, without changing a model's sizes.
_ENDINGS = re.compile(r"(instruct|chat|base|hf|it|pt|v\d+(\.\d+)?|\d{4})$")

# Field -> its names in a `config.json`.
_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab_size",),
}
# Model type of a `config.json` -> its feed-forward part, and whether embeddings are tied unless the
# file says so.
_TYPES = {row["model_type"]: row for row in read_table("model_types")}
# Keys of a `config.json` of a mixture of experts.
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
# Keys under which the `config.json` of a multimodal model has its language model.
_LANGUAGE_MODEL = ("thinker_config", "text_config", "llm_config", "language_config")
# Names of mixtures of experts: Mixtral-8x7B, Qwen3-30B-A3B.
_MIXTURE = re.compile(r"mixtral|moe|\d+x\d+b|-a\d+b\b", re.IGNORECASE)
NO_MIXTURES = (
    "a mixture of experts is not predicted; nearest is a dense model with as many parameters as a"
    " token uses"
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT- or Llama-like decoder.

    `ffn_gated`: three matrices in the feed-forward part (SwiGLU) instead of two.

    Defaults: `ffn` is 4 `hidden`, `kv_heads` is `heads`, `head_dim` is `hidden` / `heads`.
    """

    layers: Count
    hidden: Count
    heads: Count
    vocab: Count
    ffn: Count = 0
    kv_heads: Count = 0
    head_dim: Count = 0
    ffn_gated: bool = True
    tied: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "heads", "vocab"):
            if getattr(self, size) < 1:
                raise ValueError(f"expected {size} of 1 or more, got {getattr(self, size)}")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"expected hidden to be a multiple of heads, got {self.hidden} and {self.heads}"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"expected heads to be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        # The class is frozen; these are defaults that depend on other fields.
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)

    @cached_property
    def query_width(self) -> int:
        """Width of all query heads together; hidden in most models."""
        return self.heads * self.head_dim

    @cached_property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer.

        Query and output h*q, keys and values, two or three of h*f, two norms.
        """
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + (2 + self.ffn_gated) * self.hidden * self.ffn + 2 * self.hidden

    @cached_property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied model has one matrix for embedding and output."""
        return (
            self.layers * self.layer_parameters
            + (2 - self.tied) * self.embedding_parameters
            + self.hidden
        )


def step_flops(model: Any, *, seq_len: Any, sequences: Any, causal: bool = False) -> Any:
    """Model FLOPs of a step, forward and backward, without recomputation.

    6 per matrix parameter and token, and 12 L q S^2 per sequence for scores and values (PaLM,
    arXiv:2204.02311, appendix B); half of the latter with `causal`. Embedding lookups cost none.
    """
    matrices = (
        model.layers * (model.layer_parameters - 2 * model.hidden) + model.embedding_parameters
    )
    attention = 12 * model.layers * model.query_width * seq_len * (0.5 if causal else 1.0)
    return sequences * seq_len * (6 * matrices + attention)


def _letters(name: str) -> str:
    """Return letters and digits alone, in lower case; points between digits stay."""
    # llama-3.1-8b is not llama-31-8b; people write all else as they like.
    return re.sub(r"[^a-z0-9.]|(?<!\d)\.|\.(?!\d)", "", name.lower())


_ROWS = read_table("models")
# The published models and labkit's.
NAMED = {row["name"]: validate(Model, row) for row in _ROWS} | {
    name: Model(
        layers=shape.n_layers,
        hidden=shape.d_model,
        heads=shape.n_heads,
        ffn=shape.d_ff,
        vocab=shape.vocabulary,
        name=name,
    )
    for name, shape in SIZES.items()
}
_BY_LETTERS = {_letters(name): model for name, model in NAMED.items()} | {
    _letters(alias): NAMED[row["name"]] for row in _ROWS for alias in row.get("aliases", "").split()
}


def find_model(name: str) -> Model:
    """Find a model by its name, as its maker or Hugging Face writes it.

    `Llama 3 8B`, `meta-llama/Llama-3.1-8B`, `mini`.

    ValueError for an unknown one, with the nearest names; for a bare size, `7B`, with the models of
    that size.
    """
    stated = name.strip().rpartition("/")[2].lower()
    words = _letters(stated)
    while words not in _BY_LETTERS:
        # One ending at a time, since names have several: -instruct-hf, -v0.3-chat.
        shorter = _ENDINGS.sub("", words)
        if shorter == words:
            raise ValueError(f"unknown model {name[:60]!r}{_hint(stated)}")
        words = shorter
    return _BY_LETTERS[words]


def _hint(stated: str) -> str:
    """Return which models are nearest to one that nobody knows."""
    # Models with a similar name are dense, and nobody meant those.
    if _MIXTURE.search(stated):
        return f": {NO_MIXTURES}"
    near = [model for model in NAMED if model.lower().endswith(f"-{stated}")]
    near = near or difflib.get_close_matches(stated[:60], NAMED, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {', '.join(near)}?"
    return f"; there are {', '.join(NAMED)}, or a config.json"


def read_model(path: Path) -> Model:
    """Read the model that a `config.json`, or its folder, describes.

    ValueError, in one line, for any other file.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        # Not a device or a pipe, which may never end.
        if not path.is_file():
            raise ValueError("there is no such file")
        config = _parse_config(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:80]
        raise ValueError(f"expected a config.json, got {str(path)[-80:]}: {reason}") from None
    # Downloaded configs are all called so: the model's name is that of the folder.
    name = path.stem
    if path.name == "config.json":
        name = _folder_name(path.absolute().parent)
    # A terminal or a page would take other characters for a command.
    name = re.sub(r"[^\w .-]", "", name)[:40] or "this model"
    try:
        return _read_config(config, name)
    except ValueError as error:
        raise ValueError(f"{str(path)[-80:]}: {error}") from None


def _parse_config(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    ValueError for a name that occurs twice, and for what a download may leave instead of the file.
    """
    if text.startswith("version https://git-lfs"):
        raise ValueError("it is a Git LFS pointer; `git lfs pull` fetches the file")
    if text.lstrip().startswith("<"):
        raise ValueError("it is an HTML page, as of a sign-in or an error")

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in it")
        return dict(pairs)

    config = json.loads(text, object_pairs_hook=read_object)
    if not isinstance(config, dict):
        raise ValueError(f"expected an object, it is a {type(config).__name__}")
    return config


def _folder_name(folder: Path) -> str:
    """Return the folder's name, or the model's in Hugging Face's cache.

    There it is `models--OWNER--NAME/snapshots/HASH`.
    """
    if folder.parent.name == "snapshots" and "--" in folder.parents[1].name:
        folder = folder.parents[1]
    return folder.name.rpartition("--")[2]


def _read_config(config: dict[str, Any], name: str, where: str = "") -> Model:
    """Return the model that a config describes, or its language model if it is multimodal."""
    if any(key in config for key in _PER_TOKEN):
        raise ValueError(NO_MIXTURES)
    for key in _LANGUAGE_MODEL:
        if isinstance(config.get(key), dict):
            # The outer part may say whether the inner one's embeddings are tied.
            inner = {"tie_word_embeddings": config.get("tie_word_embeddings"), **config[key]}
            return _read_config(inner, name, f" under `{key}`")
    if not config.get("model_type"):
        raise ValueError(f"expected a model_type{where}, such as 'llama'; there is none")
    kind = str(config["model_type"])
    if kind not in _TYPES:
        near = difflib.get_close_matches(kind, _TYPES) or ["llama", "qwen3", "gpt2"]
        raise ValueError(
            f"expected a model_type{where} whose sizes are known, such as {', '.join(near)}; got"
            f" {kind[:40]!r}"
        )
    # Without any of its names, a size is missed under the first one.
    keys = {
        size: next((key for key in names if key in config), names[0])
        for size, names in _SIZES.items()
    }
    tie = config.get("tie_word_embeddings")
    values = {size: config.get(key) for size, key in keys.items()} | {
        "ffn_gated": _TYPES[kind]["ffn_gated"] == "1",
        "tied": _TYPES[kind]["tied"] == "1" if tie is None else tie,
        "name": name,
    }
    # MPT has a ratio in the place of a width.
    if kind == "mpt" and all(type(config.get(k)) is int for k in ("d_model", "expansion_ratio")):
        values["ffn"] = config["d_model"] * config["expansion_ratio"]
    try:
        return validate(Model, values, keys=keys | {"tied": "tie_word_embeddings"})
    except ValueError as error:
        raise ValueError(f"{error}{where}") from None
