"""Traces: times without what ran inside add up, ranges hold what they should, kernels have families
by name."""

import pytest
import torch
from torch.profiler import record_function

from labkit.bench.kernel_names import FAMILIES, family_of, short_name
from labkit.bench.trace import profile_call, read_events


def _event(name, start_us, duration_us, category="cpu_op", thread=1, **arguments):
    fields = {
        "cat": category,
        "name": name,
        "ts": start_us,
        "dur": duration_us,
        "tid": thread,
        "args": arguments,
    }
    return {"ph": "X"} | fields


def _range(name, start_us, duration_us, thread=1):
    return _event(name, start_us, duration_us, "user_annotation", thread)


HOST = [
    _range("forward", 1000, 100),
    _range("scores", 1010, 50),
    _event("aten::matmul", 1015, 40),
    _event("aten::mm", 1020, 30),
    _event("aten::mul", 1070, 20),
    _range("backward", 1200, 100),
    _event("aten::mm", 1210, 60, thread=2),  # the autograd engine's thread
]
GPU = [
    _range("forward", 0, 20),
    _event("cudaLaunchKernel", 5, 2, "cuda_runtime", correlation=7),
    _range("backward", 30, 20),
    _event("cudaLaunchKernel", 35, 2, "cuda_runtime", thread=2, correlation=8),
    _event("Memcpy HtoD (Pageable -> Device)", 45, 1, "gpu_memcpy"),
    _event("aten::mm", 4, 5),
    _event("void sm90_xmma_gemm<float>(int)", 100, 40, "kernel", thread=99, correlation=7),
    _event("void softmax_warp_forward<float>(int)", 140, 10, "kernel", thread=99, correlation=8),
]


def _trace(*events):
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_times_add_up_nothing_counts_twice_and_ranges_hold_what_starts_in_them_on_any_thread():
    events = read_events(_trace(*reversed(HOST)))
    assert [
        (e.name, e.ranges, round(e.self_s * 1e6, 6), round(e.duration_s * 1e6, 6)) for e in events
    ] == [
        ("forward", ("forward",), 30, 100),
        ("scores", ("forward", "scores"), 10, 50),
        ("aten::matmul", ("forward", "scores"), 10, 40),
        ("aten::mm", ("forward", "scores"), 30, 30),
        ("aten::mul", ("forward",), 20, 20),
        ("backward", ("backward",), 100, 100),  # its thread waits for the other one
        ("aten::mm", ("backward",), 60, 60),
    ]
    assert [events[3].within(names) for names in (("forward", "scores"), ("forward",), ("x",))] == [
        "scores",
        "forward",
        "",
    ]
    assert sum(event.self_s for event in events if event.family == "matmul") == pytest.approx(90e-6)
    assert read_events(_trace()) == []


def test_kernels_are_the_events_of_a_gpu_and_belong_to_the_range_of_their_launch():
    events = read_events(_trace(*GPU))
    assert [
        (event.name, event.family, event.ranges, round(event.self_s * 1e6, 6)) for event in events
    ] == [
        ("Memcpy HtoD", "copy", ("backward",), 1),
        ("sm90_xmma_gemm", "matmul", ("forward",), 40),
        ("softmax_warp_forward", "softmax", ("backward",), 10),
    ]


NATIVE = "void at::native::"
HIDDEN = "void at::native::(anonymous namespace)::"
ELEMENTWISE = NATIVE + "vectorized_elementwise_kernel<4, at::native::"
CUTLASS = "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8"
CUDA_NAMES = {
    "matmul": [
        "void cublasLt::splitKreduce_kernel<32, 16>(int)",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<float>",
        "void conv_depthwise2d_forward_kernel<3, float>",
        f"void cutlass::Kernel2<{CUTLASS}>(Params)",
    ],
    "attention": ["void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<x>(y)"],
    "softmax": ["void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false>"],
    "loss": ["void cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>"],
    "elementwise": [ELEMENTWISE + "CUDAFunctor_add<float>>"],
    "reduction": [NATIVE + "reduce_kernel<512, 1, at::native::ReduceOp<float>>"],
    "embedding": [
        HIDDEN + name
        for name in (
            "embedding_backward_feature_kernel<x>",
            "compute_grad_weight<x>",
            "sum_and_scatter<x>",
        )
    ],
    "norm": ["cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(...)"],
    "copy": [
        "void cudnn::ops::nchwToNhwcKernel<float>(...)",
        "Memset (Device)",
        ELEMENTWISE + "FillFunctor<float>>",
    ],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
    "optimizer": [NATIVE + "multi_tensor_apply_kernel<FusedAdamMathFunctor>"],
    "dispatch": [
        "autograd::engine::evaluate_function: SoftmaxBackward0",
        "torch::autograd::AccumulateGrad",
    ],
}
NAMES = {
    "matmul": (
        "aten::mm aten::bmm ampere_sgemm_128x64_nn nvjet_hsh_128x64 aten::mkldnn_convolution "
        "triton_tem_fused_mm_3 aten::convolution_backward aten::_slow_conv2d_forward"
    ),
    "attention": (
        "aten::_flash_attention_forward forward_kernel grad_kv_kernel grad_q_kernel delta_kernel"
        " fmha_cutlassF_bf16_aligned_64x64_rf_sm80"
        " cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"
    ),
    "softmax": "aten::_softmax aten::_softmax_backward_data triton_red_fused__softmax_1",
    "loss": "aten::_log_softmax aten::nll_loss_backward",
    "norm": "aten::native_layer_norm triton_per_fused_native_layer_norm_0",
    "elementwise": (
        "aten::mul aten::masked_fill_ aten::silu_backward aten::addcdiv_ aten::bernoulli_ "
        "triton_poi_fused__to_copy_add_mul_0"
    ),
    "reduction": "aten::sum aten::avg_pool2d aten::max_pool2d_with_indices triton_red_fused_sum_2",
    "embedding": "aten::embedding_dense_backward",
    "copy": "aten::copy_ aten::cat aten::fill_",
    "communication": "gloo:all_reduce",
    "optimizer": "aten::_fused_adamw_",
    "dispatch": (
        "aten::view aten::matmul aten::conv2d aten::max_pool2d aten::t aten::empty_strided"
        " MmBackward0"
    ),
    "other": "something_nobody_knows",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_by_recorded_names(family):
    names = [*NAMES[family].split(), *CUDA_NAMES.get(family, [])]
    assert {name: family_of(name) for name in names} == dict.fromkeys(names, family)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "aten::mm"),
        (
            ELEMENTWISE + "CUDAFunctor_add<float>, char*>(int)",
            "vectorized_elementwise_kernel<CUDAFunctor_add>",
        ),
        (
            ELEMENTWISE + "exp_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}, char*>(int)",
            "vectorized_elementwise_kernel<exp_kernel_cuda>",
        ),
        (
            NATIVE + "reduce_kernel<512, 1, ReduceOp<float, at::native::func_wrapper_t<float,"
            " sum_functor<float>>>>(x)",
            "reduce_kernel<sum_functor>",
        ),
        (f"void cutlass::Kernel2<{CUTLASS}>(Params)", CUTLASS),
        (HIDDEN + "sum_and_scatter<float, long>(long*)", "sum_and_scatter"),
        ("x" * 500, "x" * 100),
    ],
)
def test_short_names_tell_kernels_apart(name, short):
    assert short_name(name) == short


def test_a_real_profile_has_the_operators_in_their_ranges():
    a = torch.randn(300, 300, requires_grad=True)

    def call():
        with record_function("forward"):
            loss = torch.softmax(a @ a, dim=-1).square().sum()
        with record_function("backward"):
            loss.backward()

    call()
    events = profile_call(call, before=lambda: torch.ones(8).exp())
    assert {"aten::mm", "aten::_softmax", "aten::exp", "backward"} <= {
        event.name for event in events
    }
    matmuls = [event for event in events if event.name == "aten::mm"]
    assert {event.within(("forward", "backward")) for event in matmuls} == {"forward", "backward"}
    longest = max(event.start_s + event.duration_s for event in events)
    assert 0 < sum(event.self_s for event in events if event.ranges) <= longest


def test_a_profile_of_a_gpu_without_kernels_is_refused(monkeypatch):
    """CUPTI may give none: what the host did must not pass for what the GPU did."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="no GPU kernel"):
        profile_call(lambda: torch.ones(2).sum(), device="cuda")
