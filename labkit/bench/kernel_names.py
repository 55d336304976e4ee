"""Families and short names of operators and GPU kernels, by a profiler's names."""

import re
from functools import cache

MAX_NAME = 100

# In the order in which figures stack them.
FAMILIES = ["matmul", "attention", "softmax", "loss", "norm", "elementwise", "reduction"]
FAMILIES += ["embedding", "copy", "communication", "optimizer", "dispatch", "other"]
# A name belongs to the first family whose pattern it contains.
_RULES = (
    ("communication", r"^nccl|^gloo:|^c10d::"),
    (
        "dispatch",
        r"^autograd::|^(?!aten::)\w*Backward\d*$|^torch::|"
        r"^(aten::)?(linear|matmul|cross_entropy_loss|detach|dropout|lstm|gru|"
        r"conv(_transpose)?\dd|_?convolution|(max|adaptive_avg)_pool\dd|avg_pool1d)$",
    ),
    ("optimizer", r"multi_tensor_apply|_foreach_|_fused_adam|fused_adam"),
    # The last alternative is labkit's kernels (nn/flash_kernels.py, nn/flash_backward_kernels.py).
    (
        "attention",
        r"flash|fmha|sdpa|scaled_dot_product|attention|^(forward|delta|grad_kv|grad_q)_kernel",
    ),
    ("loss", r"log_?softmax|nll_loss|cross_entropy"),
    ("softmax", r"softmax"),
    (
        "matmul",
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|^triton_tem|"
        r"^aten::(mm|bmm|addmm|addmv|mv|dot|baddbmm)$|"
        r"mkldnn_linear|convol|conv_?(transpose|depthwise)?_?\dd|winograd|rnn_layer",
    ),
    # "bn_fw_tr_1C11" is cuDNN's batch norm; the last two are PyTorch's layer norm, backward.
    ("norm", r"(layer|rms|batch|group)_?norm|cudnn::bn_|gammabetabackward|cucomputegradinput"),
    ("embedding", r"embedding|compute_grad_weight|krn_partial|partial_segment|sum_and_scatter"),
    ("elementwise", r"^triton_poi"),
    ("reduction", r"^triton_(red|per)"),
    (
        "copy",
        r"nchwtonhwc|nhwctonchw|copy|memcpy|memset|(?<!masked_)fill|zero|clone|"
        r"^aten::(cat|stack|tril|triu|arange)$|catarray|index|gather|scatter",
    ),
    ("reduction", r"reduce|pool|^aten::(sum|mean|max|min|amax|amin|prod|norm|logsumexp)$"),
    (
        "dispatch",
        r"^aten::(empty|view|_unsafe_view|as_strided|reshape|_reshape|expand|transpose|t$|slice|"
        r"select|unbind|unflatten|flatten|permute|unsqueeze|squeeze|alias|resize|result_type|"
        r"promote_types|to$|_to_copy|item|_local|ones|resolve_|narrow|contiguous|new_)|^cuda|"
        r"Synchronize",
    ),
    (
        "elementwise",
        r"elementwise|^aten::(mul|add|sub|div|neg|pow|square|sqrt|rsqrt|exp|log|silu|gelu|relu|"
        r"sigmoid|tanh|where|masked_fill|bitwise|logical|lerp|addcmul|addcdiv|eq|ne|lt|gt|le|ge|abs|"
        r"sin|cos|clamp|threshold|maximum|minimum|bernoulli|native_dropout|leaky_relu|elu|softplus|"
        r"hardtanh|mish)[_a-z]*$",
    ),
)
# Template arguments that name a kernel's work: "MulFunctor", "GemmUniversal".
_WORK = re.compile(
    r"\w*[Ff]unctor\w*|\w+Ops\b|\w+_kernel_cuda|\w+_kernel(?=\()|\w+KernelImpl|Gemm\w+"
)


@cache
def family_of(name: str) -> str:
    """Return the family of an operator ("aten::mm") or kernel; "other" for an unknown name.

    "dispatch" is the host's work around kernels: views, allocations, the autograd engine, Python.
    """
    for family, pattern in _RULES:
        if re.search(pattern, name, re.IGNORECASE):
            return family
    return "other"


@cache
def short_name(name: str) -> str:
    """Return a kernel's name without namespaces, parameters and most template arguments.

    Kernels that do different work keep different names: the innermost functor, or the tile of a
    CUTLASS GEMM. At most `MAX_NAME` characters.
    """
    if name.startswith(("aten::", "autograd::")):
        return name[:MAX_NAME]
    cutlass = re.search(r"cutlass_\w+", name)
    if cutlass is not None:
        return cutlass[0][:MAX_NAME]
    plain = (
        name.removeprefix("void ")
        .replace("(anonymous namespace)::", "")
        .replace("at::native::", "")
    )
    head, _, arguments = plain.partition("<")
    work = _WORK.findall(arguments)
    # The last one is the innermost.
    short = f"{head}<{work[-1]}>" if work else head.partition("(")[0]
    return short[:MAX_NAME].strip()
