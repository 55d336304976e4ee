"""Models that people name, with the sizes their makers published; and labkit's own.

A tuple is (layers, hidden, heads, kv_heads, ffn, vocab, tied). Models whose heads are not hidden / heads wide (Qwen3 4B
and 32B, Mistral NeMo) are left out: no formula here knows such a width.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from labkit.costs.transformer import SIZES
from labkit.scaling.model import Model

_GATED = {
    # Touvron et al. 2023, arXiv:2307.09288
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, False),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, False),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, False),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3; 3.2: config.json as published
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, False),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, False),
    "llama-3-405b": (126, 16384, 128, 8, 53248, 128256, False),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, True),
    "llama-3.2-3b": (28, 3072, 24, 8, 8192, 128256, True),
    # arXiv:2412.15115 and config.json as published
    "qwen-2.5-0.5b": (24, 896, 14, 2, 4864, 151936, True),
    "qwen-2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, True),
    "qwen-2.5-3b": (36, 2048, 16, 2, 11008, 151936, True),
    "qwen-2.5-7b": (28, 3584, 28, 4, 18944, 152064, False),
    "qwen-2.5-14b": (48, 5120, 40, 8, 13824, 152064, False),
    "qwen-2.5-32b": (64, 5120, 40, 8, 27648, 152064, False),
    "qwen-2.5-72b": (80, 8192, 64, 8, 29568, 152064, False),
    # arXiv:2505.09388, table 1
    "qwen-3-1.7b": (28, 2048, 16, 8, 6144, 151936, True),
    "qwen-3-8b": (36, 4096, 32, 8, 12288, 151936, False),
    "qwen-3-14b": (40, 5120, 40, 8, 17408, 151936, False),
    # arXiv:2310.06825; Mistral Large 2: config.json as published
    "mistral-7b": (32, 4096, 32, 8, 14336, 32000, False),
    "mistral-large": (88, 12288, 96, 8, 28672, 32768, False),
}
_PLAIN = {
    # Brown et al. 2020, arXiv:2005.14165, table 2.1; heads of 1.3B and hidden of 13B so that heads are whole
    "gpt-3-125m": (12, 768, 12, 12, 3072, 50257, True),
    "gpt-3-350m": (24, 1024, 16, 16, 4096, 50257, True),
    "gpt-3-760m": (24, 1536, 16, 16, 6144, 50257, True),
    "gpt-3-1.3b": (24, 2048, 16, 16, 8192, 50257, True),
    "gpt-3-2.7b": (32, 2560, 32, 32, 10240, 50257, True),
    "gpt-3-6.7b": (32, 4096, 32, 32, 16384, 50257, True),
    "gpt-3-13b": (40, 5120, 40, 40, 20480, 50257, True),
    "gpt-3-175b": (96, 12288, 96, 96, 49152, 50257, True),
    # config.json as published
    "mpt-7b": (32, 4096, 32, 32, 16384, 50432, True),
    "mpt-30b": (48, 7168, 64, 64, 28672, 50432, True),
}
_SHORTER = {"llama-3.1": "llama-3", "qwen2.5": "qwen-2.5", "qwen3": "qwen-3", "llama2": "llama-2", "llama3": "llama-3"}
_SHORTER |= {"gpt3": "gpt-3", "llama3.1": "llama-3", "llama3.2": "llama-3.2"}


def _built(name: str, sizes: tuple[int, int, int, int, int, int, bool], ffn_gated: bool) -> Model:
    *whole, tied = sizes
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    numbers: dict[str, Any] = dict(zip(names, whole, strict=True))
    return Model(**numbers, ffn_gated=ffn_gated, tied=tied, name=name)


NAMED: Mapping[str, Model] = (
    {name: _built(name, sizes, True) for name, sizes in _GATED.items()}
    | {name: _built(name, sizes, False) for name, sizes in _PLAIN.items()}
    | {
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
)


def is_bare_size(name: str) -> bool:
    """Whether a name is nothing but a number of parameters, as people say it: "7B"."""
    words = name.strip().lower()
    return re.fullmatch(r"\d{1,4}(\.\d)?[bm]", words) is not None and words not in map(str.lower, NAMED)


def find_model(name: str) -> Model:
    """A model by its name, as its maker or Hugging Face writes it: `Llama 3 8B`, `meta-llama/Llama-3.1-8B`, `mini`.

    Of a bare size, `7B`, the first that is listed. ValueError, with the nearest names, for one that is not listed.
    """
    words = name.strip().rpartition("/")[2].lower().replace("_", "-").replace(" ", "-")
    for longer, short in sorted(_SHORTER.items(), key=lambda pair: -len(pair[0])):
        if words.startswith(f"{longer}-"):
            words = short + words.removeprefix(longer)
            break
    by_name = {known.lower(): model for known, model in NAMED.items()}
    for end in ("", "-hf", "-base", "-instruct"):
        if words.removesuffix(end) in by_name:
            return by_name[words.removesuffix(end)]
    sized = (model for known, model in by_name.items() if known.endswith(f"-{words}"))
    if is_bare_size(words) and (model := next(sized, None)) is not None:
        return model
    near = difflib.get_close_matches(words, by_name, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(NAMED)}, or a config.json"
    raise ValueError(f"unknown model {name[:60]!r}{hint}")
