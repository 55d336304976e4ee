"""How a model is spread over GPUs, and why some layouts are impossible."""

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.scaling.model import Model

SHARDS = ("none", "zero1", "zero2", "zero3", "hsdp")
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp16", "fp8")
MAX_STAGES = 512
OPTIONS = {
    "async_tp": "tensor-parallel collectives in pieces, alongside the matmuls (torchtitan)",
    "fp8_rowwise": "a scale per row instead of one per tensor (torchtitan)",
    "old_pipeline": "nanotron's pipeline engine before it was made faster",
    "new_pipeline": "nanotron's pipeline engine after that",
    "empty_stages": "more stages than layers are allowed; some only pass on (nanotron)",
    "low_precision_master": "master weights and AdamW's states in 16 bits (llm-foundry's older rows)",
    "blocking_launch": "every kernel's launch waits for the kernel (CUDA_LAUNCH_BLOCKING=1)",
    "save_qkv": "full recomputation except for query, key and value (MaxText)",
    "op_recompute": "selective: every second matmul and all elementwise operators again (torchtitan)",
    "layer_recompute": "selective: every second layer again (fms)",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, the batch, and what is traded for memory.

    tp tensor, pp pipeline (vp chunks of layers per stage), cp context, dp data parallelism: tp*pp*cp*dp GPUs.
    Data-parallel ranks divide what `shard` says: nothing, optimizer (zero1), also gradients (zero2), also parameters
    (zero3); hsdp is zero3 inside a node with copies between nodes. `micro_batch` and `global_batch` are sequences.
    """

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vp: int = 1
    cp: int = 1
    dp: int = 1
    shard: str = "none"
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    precision: str = "bf16"
    compiled: bool = False
    options: frozenset[str] = frozenset()
    """Names in `OPTIONS`."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batches(self) -> float:
        """Micro-batches per replica and step, whose gradients accumulate."""
        return self.global_batch / (self.dp * self.micro_batch)


def impossible_reason(layout: Layout, model: Model, seq_len: int) -> str | None:
    """The first reason why this layout cannot run this model, in a line; None if it can."""
    return next(_reasons(layout, model, seq_len), None)


def counts_ends_as_layers(layers: int, chunks: int) -> bool:
    """Whether embedding and loss take a layer's place each, so that stages are equal: 126 + 2 layers on 8 x 16 chunks.

    Published for Llama 3 405B (arXiv:2407.21783, section 3.3.2), and for other recipes of Megatron-Core.
    """
    return chunks > 1 and layers % chunks != 0 and (layers + 2) % chunks == 0


def _reasons(layout: Layout, model: Model, seq_len: int) -> Iterator[str]:
    for name in ("tp", "pp", "vp", "cp", "dp", "micro_batch", "global_batch"):
        if getattr(layout, name) < 1:
            yield f"expected {name} of 1 or more, got {getattr(layout, name)}"
    if layout.pp > MAX_STAGES:
        yield f"expected pp of at most {MAX_STAGES}, got {layout.pp}"
    if seq_len < 1:
        yield f"expected seq_len of 1 or more, got {seq_len}"
    for name, allowed in (("shard", SHARDS), ("recompute", RECOMPUTE), ("precision", PRECISIONS)):
        if getattr(layout, name) not in allowed:
            yield f"expected {name} among {', '.join(allowed)}, got {getattr(layout, name)!r}"
    if model.heads % layout.tp:
        yield f"{model.heads} heads cannot be divided over tp = {layout.tp}"
    if layout.sequence_parallel and seq_len % (layout.tp * layout.cp):
        yield f"sequence parallelism cannot divide {seq_len // layout.cp} tokens over tp = {layout.tp}"
    if seq_len % layout.cp:
        yield f"{seq_len} tokens cannot be divided over cp = {layout.cp}"
    chunks = layout.pp * layout.vp
    may_be_empty = "empty_stages" in layout.options or counts_ends_as_layers(model.layers, chunks)
    if chunks > model.layers and not may_be_empty:
        yield f"pp x vp = {chunks} stages are more than {model.layers} layers"
    if layout.vp > 1 and layout.pp == 1:
        yield f"vp = {layout.vp} interleaves stages of a pipeline, and pp is 1"
    if layout.global_batch % layout.dp:
        yield f"a global batch of {layout.global_batch} cannot be divided over dp = {layout.dp}"
    elif layout.global_batch % (layout.dp * layout.micro_batch):
        yield f"{layout.global_batch // layout.dp} sequences per replica are no multiple of {layout.micro_batch}"
