"""Every constant of the predictor, what it means, and where its value comes from.

A constant is known by its quantity and by what it depends on: nothing ("all"), the architecture of the GPU (the
quantities in `BY_ARCHITECTURE`), or the framework; "default" is for the others. `value` is declared, or, of a fitted
constant, what was thought likely beforehand: `benchmarks/fit_scaling.py` draws it towards the published runs, and
writes what it found into `fitted.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

BY_ARCHITECTURE = frozenset({"gemm_efficiency", "attention_efficiency", "link_efficiency", "memory_efficiency"})

PARENTS: Mapping[str, str] = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks that share code: where a framework has no constant of its own, its parent's holds.

megatron and vtrain run Megatron-LM of 2021 (unfused attention, no overlap); MaxText uses NeMo's cuDNN attention.
vtrain_node is vTrain's single-node table, put together from profiled kernels.
"""

GIB = 2**30


@dataclass(frozen=True)
class Constant:
    """One number of the model. `spread`: of a fitted one, the likely standard deviation of ln(value); else 0."""

    quantity: str
    key: str
    value: float
    source: str
    spread: float = 0.0

    @property
    def is_fitted(self) -> bool:
        return self.spread > 0

    @property
    def name(self) -> str:
        return f"{self.quantity}.{self.key}"


_COMPUTE = (
    Constant("gemm_efficiency", "ampere", 0.85, "share of the peak that long products reach", 0.05),
    Constant("gemm_efficiency", "hopper", 0.80, "share of the peak that long products reach", 0.05),
    Constant("gemm_efficiency", "default", 0.75, "a little below both that are fitted"),
    Constant("gemm_efficiency", "measured", 1.0, "of a calibrated machine the rate itself is known"),
    Constant("gemm_k", "all", 130.0, "products of K = 130 reach half of it: published cuBLAS sweeps on A100"),
    Constant("gemm_wave", "all", 0.5, "waves of tiles lost in filling and draining a product's grid", 0.5),
    Constant("fp8_efficiency", "all", 0.9, "of the fp8 peak, over bf16's share of its own", 0.1),
    Constant("fp8_rowwise_traffic", "all", 16.0, "bytes an element that is cast with a scale a row", 0.4),
    Constant("fp8_cast_traffic", "all", 4.0, "bytes a weight and micro-batch: read bf16, write fp8 and its transpose"),
    Constant("attention_efficiency", "ampere", 0.45, "FlashAttention-2, share of the peak (arXiv:2307.08691)", 0.3),
    Constant("attention_efficiency", "hopper", 0.30, "FlashAttention-2 does not use Hopper's units", 0.3),
    Constant("attention_efficiency", "default", 0.30, "as on Hopper"),
    Constant(
        "attention_head", "all", 16.0, "shorter heads are slower: half the rate at this d, cf. figure 4 there", 0.5
    ),
    Constant("attention_slowdown", "default", 1.0, "FlashAttention-2"),
    Constant("attention_slowdown", "nemo", 0.6, "cuDNN's attention over FlashAttention-2", 0.3),
    Constant("attention_slowdown", "torchtitan", 1.1, "PyTorch's own build of FlashAttention-2", 0.3),
    Constant("unfused_attention", "default", 0.0, "1 where scores are written to memory"),
    Constant("unfused_attention", "vtrain", 1.0, "Megatron-LM of 2021"),
    Constant("score_traffic", "default", 1.0, "over 11 bytes forward and 17 backward a score", 0.4),
    Constant("score_traffic", "vtrain_node", 0.8, "the same, in profiled kernels", 0.3),
    Constant("memory_efficiency", "all", 0.85, "share of HBM's bandwidth that streaming kernels reach"),
    Constant("memory_efficiency", "measured", 1.0, "of a calibrated machine the bandwidth itself is known"),
    Constant("elementwise_traffic", "default", 1.0, "over the counted reads and writes of unfused operators"),
    Constant("elementwise_traffic", "nanotron", 1.0, "the same", 0.4),
    Constant("elementwise_traffic", "torchtitan", 1.5, "the same; compiled, half of it", 0.4),
    Constant("elementwise_traffic", "nemo", 1.0, "the same", 0.4),
    Constant("elementwise_traffic", "vtrain", 0.7, "the same, fused kernels", 0.4),
    Constant("compiled_traffic", "all", 0.5, "torch.compile fuses each chain of operators"),
    Constant("loss_traffic", "default", 24.0, "bytes a logit: float32 copies, softmax, gradient"),
    Constant("loss_traffic", "vtrain_node", 60.0, "the head's products are slow there too", 0.4),
    Constant("optimizer_traffic", "all", 40.0, "bytes a parameter: AdamW's states, master weights, gradient, norms"),
    Constant("node_spread", "all", 0.005, "share by which the times of nodes vary", 0.5),
    Constant("slowdown", "default", 1.0, "products, over those of the architecture: clocks, shapes, streams"),
    Constant("slowdown", "nanotron", 1.1, "the same", 0.15),
    Constant("slowdown", "vtrain", 1.1, "the same", 0.15),
    Constant("slowdown", "vtrain_node", 1.1, "the same", 0.15),
    Constant("slowdown", "mosaic", 1.1, "the same", 0.15),
    Constant("slowdown", "torchtitan", 1.0, "the same", 0.15),
    Constant("slowdown", "fms", 1.0, "the same", 0.10),
)

_LAUNCH = (
    Constant("early_stop", "default", 1.0, "1: recomputation ends with the last product that backward needs"),
    Constant("early_stop", "vtrain", 0.0, "Megatron-LM's own checkpoints are re-entrant"),
    Constant(
        "launch_s", "default", 2.4e-3, "CPU time of a layer and micro-batch: some 120 kernels of 20 us in eager PyTorch"
    ),
    Constant("launch_s", "nanotron", 4e-3, "the same", 0.3),
    Constant("launch_s", "vtrain", 3e-3, "the same", 0.3),
    Constant("launch_tp_s", "default", 0.0, "the same for each further tensor rank"),
    Constant("launch_tp_s", "vtrain_node", 2e-4, "the same", 0.5),
    Constant("engine_tp_s", "default", 0.0, "CPU time a layer and tensor rank of a pipeline on several nodes"),
    Constant("engine_tp_s", "nanotron", 2.45e-3, "the same", 0.5),
    Constant("old_pipeline_s", "all", 0.49, "a micro-batch and neighbor, before nanotron's fix", 0.5),
)

_COMMUNICATION = (
    Constant("link_efficiency", "ampere", 0.71, "213 of 300 GB/s: nccl_all_reduce_in_a_node.csv"),
    Constant("link_efficiency", "default", 0.75, "NCCL on NVLink 4: some 340 of 450 GB/s"),
    Constant("link_efficiency", "measured", 1.0, "of a calibrated machine the rate itself is known"),
    Constant("nccl_call_s", "all", 35e-6, "nccl_all_reduce_in_a_node.csv"),
    Constant("nccl_rank_share", "all", 0.11, "nccl_all_reduce_in_a_node.csv"),
    Constant("network_efficiency", "default", 0.8, "share of the node's links that a ring reaches", 0.1),
    Constant("network_efficiency", "nanotron", 0.5, "the same on EFA", 0.3),
    Constant("network_step_s", "default", 7e-6, "latency of a step of a ring across nodes", 0.5),
    Constant("network_step_s", "nanotron", 50e-6, "the same on EFA", 0.4),
    Constant("tp_exposed", "default", 1.0, "share of tensor-parallel collectives that nothing hides"),
    Constant("tp_exposed", "nanotron", 0.7, "the same, asynchronous linear layers", 0.4),
    Constant("tp_exposed", "nemo", 0.5, "the same, user buffers", 0.4),
    Constant("tp_exposed", "vtrain_node", 1.0, "the same; above 1: slower than nccl-tests", 0.2),
    Constant("async_tp_exposed", "all", 0.5, "what torchtitan's async TP leaves of that", 0.5),
    Constant("cp_exposed", "all", 0.5, "share of the ring of keys and values that attention does not hide"),
    Constant("p2p_exposed", "all", 1.0, "share of a pipeline's sends that nothing hides"),
    Constant("overlap_softness", "all", 2.0, "exponent of the soft maximum of compute and parameter gathering", 0.5),
    Constant("dp_overlap", "default", 0.8, "share of the last backward pass that may hide gradient communication"),
    Constant("dp_overlap", "vtrain", 0.0, "Megatron-LM of 2021 reduces gradients after it"),
    Constant("dp_overlap", "nanotron", 0.0, "a fit of it came to 0.1"),
    Constant("gradient_bytes", "default", 4.0, "gradients accumulate and are reduced in float32"),
    Constant("gradient_bytes", "vtrain", 2.0, "in fp16"),
    Constant("gradient_bytes", "mosaic", 2.0, "in bf16"),
    Constant("bucket_bytes", "default", 25e6, "torch's DistributedDataParallel"),
    Constant("bucket_bytes", "nemo", 160e6, "Megatron-Core: 40 million elements"),
    Constant("bucket_bytes", "nanotron", 300e6, "bytes a call", 0.7),
    Constant("bucket_ranks", "default", 0.0, "a bucket grows by its size for this share of a rank"),
    Constant("bucket_ranks", "nemo", 1 / 40, "Megatron-Core: at least one million elements a rank"),
    Constant("largest_shard_group", "default", 1e9, "ranks that divide parameters; beyond, copies"),
    Constant("largest_shard_group", "maxtext", 128, "its README: an FSDP group, then data parallelism"),
)

_MEMORY = (
    Constant("activation_scale", "default", 1.0, "arXiv:2205.05198"),
    Constant("activation_scale", "nanotron", 1.05, "over that count: float32 norms", 0.03),
    Constant("fused_operators", "default", 1.0, "1: no dropout masks, and SwiGLU keeps its input only"),
    Constant("fused_operators", "nanotron", 0.0, "eager operators"),
    Constant("fused_operators", "vtrain", 0.0, "with dropout"),
    Constant("logit_bytes", "default", 6.0, "bytes a logit at the peak: bf16 and float32"),
    Constant("logit_bytes", "torchtitan", 12.0, "float32 logits, log-probabilities and their gradient"),
    Constant("logit_bytes", "nanotron", 12.0, "bf16 and float32, and both gradients: 2 + 4 + 4 + 2"),
    Constant("transient_ffn", "default", 2.0, "bytes a token and feed-forward column inside a layer"),
    Constant("transient_ffn", "nanotron", 12.0, "six bf16 columns in eager operators: gate, up, product and gradients"),
    Constant("held_gathers", "all", 2.0, "a bf16 copy a token, column and layer that waits for a collective", 0.2),
    Constant("fragmentation", "all", 1.02, "reserved over allocated"),
    Constant("stream_fragmentation", "default", 1.02, "the same with tensor parallelism"),
    Constant("stream_fragmentation", "nanotron", 1.12, "the same: blocks wait for the stream of collectives", 0.03),
    Constant("runtime_bytes", "all", 0.35 * GIB, "small tensors and workspaces", 0.5),
)

DECLARED: tuple[Constant, ...] = (*_COMPUTE, *_LAUNCH, *_COMMUNICATION, *_MEMORY)
FITTED = tuple(constant for constant in DECLARED if constant.is_fitted)
OF_MEMORY = frozenset(constant.quantity for constant in _MEMORY)
