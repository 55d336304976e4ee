"""Models by name: the published ones in `models.csv`, and labkit's sizes."""

import difflib
import re
from collections.abc import Mapping

from labkit.costs.transformer import SIZES
from labkit.scaling.model import Model
from labkit.scaling.tables import read_table

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
_ENDINGS = re.compile(r"(instruct|chat|base|hf|it|pt|v\d+(\.\d+)?|\d{4})$")
"""What makers add to a name, once punctuation is gone, without changing a model's sizes."""


def _published() -> tuple[dict[str, Model], dict[str, str]]:
    """Models by name, and names by alias."""
    models: dict[str, Model] = {}
    aliases: dict[str, str] = {}
    for row in read_table("models"):
        sizes = {size: int(row[size]) for size in _SIZES}
        is_gated, is_tied = (row[name] == "1" for name in ("ffn_gated", "tied"))
        models[row["name"]] = Model(**sizes, ffn_gated=is_gated, tied=is_tied, name=row["name"])
        aliases |= dict.fromkeys(row["aliases"].split(), row["name"])
    return models, aliases


def _labkit() -> dict[str, Model]:
    return {
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


_MODELS, _ALIASES = _published()
NAMED: Mapping[str, Model] = _MODELS | _labkit()


def is_bare_size(name: str) -> bool:
    """Whether a name is only a number of parameters: "7B"."""
    words = name.strip().lower()
    return re.fullmatch(r"\d{1,4}(\.\d)?[bm]", words) is not None and words not in map(str.lower, NAMED)


def find_model(name: str) -> Model:
    """A model by its name, as its maker or Hugging Face writes it: `Llama 3 8B`, `meta-llama/Llama-3.1-8B`, `mini`.

    A bare size, `7B`, is the first model of that size. ValueError, with the nearest names, for an unknown one.
    """
    by_name = {_letters(known): model for known, model in NAMED.items()}
    by_name |= {_letters(alias): NAMED[known] for alias, known in _ALIASES.items()}
    words = _letters(name.strip().rpartition("/")[2])
    while True:
        if words in by_name:
            return by_name[words]
        shorter = _ENDINGS.sub("", words)
        if shorter == words or not shorter:
            break
        words = shorter
    size = name.strip().lower()
    if is_bare_size(name) and (model := next((m for n, m in NAMED.items() if n.endswith(f"-{size}")), None)):
        return model
    near = difflib.get_close_matches(name.strip().rpartition("/")[2].lower()[:60], NAMED, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(NAMED)}, or a config.json"
    raise ValueError(f"unknown model {name[:60]!r}{hint}")


def _letters(name: str) -> str:
    """Letters and digits only, in lower case; points between digits stay."""
    return re.sub(r"[^a-z0-9.]|(?<!\d)\.|\.(?!\d)", "", name.lower())
