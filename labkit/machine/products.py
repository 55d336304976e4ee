"""How float32 products and convolutions run on CUDA: as IEEE float32, or as TF32, 10 bits of 23, on recent GPUs."""

from typing import Any

import torch


def float32_products() -> dict[str, str]:
    """ "matmul" and "convolution", as torch is set up now: "ieee" or "tf32". Its defaults are one of each."""
    backends: Any = torch.backends  # a module that types do not know all of
    settings = {"matmul": backends.cuda.matmul, "convolution": backends.cudnn.conv}
    # "none" leaves it to a setting that is IEEE where nobody changed it
    return {name: each.fp32_precision.replace("none", "ieee") for name, each in settings.items()}
