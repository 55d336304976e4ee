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

from labkit.scaling import Count, read_table, validate

Numbers = NDArray[np.float64]

# What makers add to a name, once punctuation is gone, without changing a model's sizes; a name may
# have several: -instruct-hf, -v0.3-chat.
_ENDINGS = re.compile(r"(instruct|chat|base|hf|it|pt|v\d+(\.\d+)?|\d{4})*$")

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
        """Parameters of query and output, keys and values, two or three of h*f, two norms."""
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
NAMED = {row["name"]: validate(Model, row) for row in _ROWS}
_BY_LETTERS = {_letters(name): model for name, model in NAMED.items()} | {
    _letters(alias): NAMED[row["name"]] for row in _ROWS for alias in row.get("aliases", "").split()
}


def find_model(name: str) -> Model:
    """Find a model by its name, as its maker or Hugging Face writes it.

    `Llama 3 8B`, `meta-llama/Llama-3.1-8B`, `mini`. ValueError for an unknown one, with the nearest
    names; for a bare size, `7B`, with the models of that size.
    """
    stated = name.strip().rpartition("/")[2].lower()
    letters = _letters(stated)
    for words in (letters, _ENDINGS.sub("", letters, count=1)):
        if words in _BY_LETTERS:
            return _BY_LETTERS[words]
    # Models with a similar name are dense, and nobody meant those.
    if _MIXTURE.search(stated):
        raise ValueError(f"unknown model {name[:60]!r}: {NO_MIXTURES}")
    near = [model for model in NAMED if model.lower().endswith(f"-{stated}")]
    near = near or difflib.get_close_matches(stated[:60], NAMED, n=3, cutoff=0.5) or list(NAMED)
    raise ValueError(
        f"unknown model {name[:60]!r}; did you mean {', '.join(near)}, or a config.json?"
    )


def read_model(path: Path) -> Model:
    """Read the model of a `config.json` or its folder. ValueError, in one line, for others."""
    path = path / "config.json" if path.is_dir() else path
    # Downloaded configs are all called so: the model's name is that of the folder.
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    # A terminal or a page would take other characters for a command.
    name = re.sub(r"[^\w .-]", "", name)[:40] or "this model"
    try:
        # Not a device or a pipe, which may never end.
        if not path.is_file():
            raise ValueError("there is no such file")
        config = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a config.json, got {str(path)[-80:]}: {error}") from None
    try:
        return _read_config(config, name)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)[-80:]}: {error}") from None


def _read_config(config: Any, name: str) -> Model:
    """Return the model that a config describes, or its language model if it is multimodal."""
    if not isinstance(config, dict):
        raise ValueError(f"expected an object, it is a {type(config).__name__}")
    if any(key in config for key in _PER_TOKEN):
        raise ValueError(NO_MIXTURES)
    tie = config.get("tie_word_embeddings")
    for key in _LANGUAGE_MODEL:
        if isinstance(config.get(key), dict):
            # The outer part may say whether the inner one's embeddings are tied.
            return _read_config({"tie_word_embeddings": tie, **config[key]}, name)
    kind = str(config.get("model_type"))
    if kind not in _TYPES:
        near = difflib.get_close_matches(kind, _TYPES) or ["llama", "qwen3", "gpt2"]
        raise ValueError(
            f"expected a model_type whose sizes are known, such as {', '.join(near)}; got"
            f" {kind[:40]!r}"
        )
    # Without any of its names, a size is missed under the first one.
    keys = {
        size: next((key for key in names if key in config), names[0])
        for size, names in _SIZES.items()
    }
    values = {size: config.get(key) for size, key in keys.items()} | {
        "ffn_gated": _TYPES[kind]["ffn_gated"] == "1",
        "tied": _TYPES[kind]["tied"] == "1" if tie is None else tie,
        "name": name,
    }
    return validate(Model, values, keys=keys | {"tied": "tie_word_embeddings"})
