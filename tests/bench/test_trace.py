"""Traces: own times add up, ranges hold what they should, on made-up events and on a small real profile."""

import pytest
import torch
from torch.profiler import record_function

from labkit.bench import trace as trace_module
from labkit.bench.trace import (
    FAMILIES,
    decode_trace,
    encode_trace,
    family_of,
    host_seconds,
    longest,
    profile_call,
    read_events,
    short_name,
    sum_up,
)


def _event(name, start_us, duration_us, category="cpu_op", thread=1, **arguments):
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us, "tid": thread} | {
        "args": arguments
    }


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
    _event("Memcpy HtoD", 45, 1, "gpu_memcpy"),
    _event("aten::mm", 4, 5),
    _event("void sm90_xmma_gemm<float>(int)", 100, 40, "kernel", thread=99, correlation=7),
    _event("void softmax_warp_forward<float>(int)", 140, 10, "kernel", thread=99, correlation=8),
]


def _trace(*events):
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def _by_name(events):
    return {(event.name, event.within(("forward", "backward"))): event for event in events}


def test_own_times_add_up_and_nothing_counts_twice():
    events = read_events(_trace(*reversed(HOST)))
    assert [event.start_s for event in events] == sorted(event.start_s for event in events)
    found = _by_name(events)
    own_us = {key: round(event.self_s * 1e6, 6) for key, event in found.items()}
    assert own_us == {
        ("forward", "forward"): 30,
        ("scores", "forward"): 10,
        ("aten::matmul", "forward"): 10,
        ("aten::mm", "forward"): 30,
        ("aten::mul", "forward"): 20,
        ("backward", "backward"): 100,  # its thread waits for the other one
        ("aten::mm", "backward"): 60,
    }
    assert found["aten::mm", "forward"].duration_s == pytest.approx(30e-6)


def test_ranges_hold_what_starts_in_them_on_any_thread():
    found = _by_name(read_events(_trace(*HOST)))
    assert found["aten::mm", "forward"].ranges == ("forward", "scores")
    assert found["aten::mm", "forward"].within(("scores", "softmax")) == "scores"
    assert found["aten::mul", "forward"].ranges == ("forward",)
    assert found["aten::mm", "backward"].ranges == ("backward",)


def test_kernels_are_the_events_of_a_gpu_and_belong_to_the_range_of_their_launch():
    events = read_events(_trace(*GPU))
    assert [(event.name, event.family, event.ranges) for event in events] == [
        ("Memcpy HtoD", "copy", ("backward",)),
        ("sm90_xmma_gemm", "matmul", ("forward",)),
        ("softmax_warp_forward", "softmax", ("backward",)),
    ]
    assert [round(event.self_s * 1e6, 6) for event in events] == [1, 40, 10]


def test_the_host_time_of_nested_ranges_counts_once():
    assert host_seconds(_trace(*HOST)) == pytest.approx(200e-6)
    assert host_seconds(_trace()) == 0


def test_a_trace_without_events_has_none():
    assert read_events(_trace()) == []


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::mm", "matmul"),
        ("aten::bmm", "matmul"),
        ("ampere_sgemm_128x64_nn", "matmul"),
        ("nvjet_hsh_128x64", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64>(Params)", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "matmul"),
        ("aten::mkldnn_convolution", "matmul"),
        ("aten::convolution_backward", "matmul"),
        ("aten::_slow_conv2d_forward", "matmul"),
        ("void cudnn::cnn::conv2d_grouped_direct_kernel<float>", "matmul"),
        ("void conv_depthwise2d_forward_kernel<3, float, int>", "matmul"),
        ("aten::_softmax", "softmax"),
        ("aten::_softmax_backward_data", "softmax"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false>", "softmax"),
        ("aten::_log_softmax", "loss"),
        ("void cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>", "loss"),
        ("aten::nll_loss_backward", "loss"),
        ("aten::native_layer_norm", "norm"),
        ("aten::mul", "elementwise"),
        ("aten::masked_fill_", "elementwise"),
        ("aten::silu_backward", "elementwise"),
        ("aten::addcdiv_", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("aten::sum", "reduction"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("aten::copy_", "copy"),
        ("aten::cat", "copy"),
        ("aten::fill_", "copy"),
        ("aten::embedding_dense_backward", "copy"),
        ("Memset (Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copy"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_flash_attention_forward", "attention"),
        ("aten::view", "dispatch"),
        ("aten::matmul", "dispatch"),
        ("aten::convolution", "dispatch"),
        ("aten::conv2d", "dispatch"),
        ("aten::max_pool2d_with_indices", "reduction"),
        ("aten::max_pool2d", "dispatch"),
        ("aten::avg_pool2d", "reduction"),
        ("aten::bernoulli_", "elementwise"),
        ("aten::t", "dispatch"),
        ("aten::empty_strided", "dispatch"),
        ("MmBackward0", "dispatch"),
        ("autograd::engine::evaluate_function: SoftmaxBackward0", "dispatch"),
        ("torch::autograd::AccumulateGrad", "dispatch"),
        ("something_nobody_knows", "other"),
    ],
)
def test_families_by_name(name, family):
    assert family_of(name) == family
    assert family in FAMILIES


def test_kernel_names_are_shortened():
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, char*>(int)"
    assert short_name(long).startswith("vectorized_elementwise_kernel")
    assert short_name("aten::mm") == "aten::mm"
    assert short_name("autograd::engine::evaluate_function: MmBackward0") == (
        "autograd::engine::evaluate_function: MmBackward0"
    )
    assert len(short_name("x" * 500)) == 100


def test_sums_are_by_any_key_and_the_longest_do_not_hold_others():
    events = read_events(_trace(*HOST))
    sums = sum_up(events, lambda event: (event.family,))
    assert sums["matmul",].calls == 2
    assert sums["matmul",].seconds == pytest.approx(90e-6)
    assert sum(entry.seconds for entry in sums.values()) == pytest.approx(sum(event.self_s for event in events))
    assert [event.name for event in longest(events, 3)] == ["aten::mm", "aten::mm", "aten::mul"]


def test_a_trace_survives_its_packing():
    trace = _trace(*HOST)
    assert decode_trace(encode_trace(trace)) == trace
    assert encode_trace(trace) == encode_trace(trace)


def test_a_real_profile_adds_up_to_the_clock_and_names_no_machine():
    a = torch.randn(300, 300, requires_grad=True)

    def call():
        with record_function("forward"):
            loss = torch.softmax(a @ a, dim=-1).square().sum()
        with record_function("backward"):
            loss.backward()

    call()
    found = profile_call(call)
    names = {event.name for event in found.events}
    assert {"aten::mm", "aten::_softmax", "forward", "backward"} <= names
    assert {event.within(("forward", "backward")) for event in found.events if event.name == "aten::mm"} == {
        "forward",
        "backward",
    }
    total = sum(event.self_s for event in found.events)
    assert total == pytest.approx(host_seconds(found.trace), rel=1e-3)
    assert total <= found.seconds
    assert found.n_recorded >= len(found.events)
    assert set(found.trace) == {"schemaVersion", "deviceProperties", "displayTimeUnit", "traceEvents"}


def test_a_profile_of_a_gpu_without_kernels_is_refused(monkeypatch):
    """CUPTI may give none: what the host did must not pass for what the GPU did."""
    monkeypatch.setattr(trace_module, "time_interleaved", lambda actions, **_: {"call": [actions["call"]() or 1.0]})
    with pytest.raises(RuntimeError, match="no GPU kernel"):
        profile_call(lambda: torch.ones(2).sum() and None, device="cuda")


def test_what_comes_before_the_call_runs_under_the_profiler_and_is_not_timed():
    found = profile_call(lambda: torch.ones(8).add(1), before=lambda: torch.ones(8).exp())
    assert {"aten::exp", "aten::add"} <= {event.name for event in found.events}


def test_operators_of_the_host_can_be_asked_for_beside_kernels():
    names = [event.name for event in read_events(_trace(*GPU), also="aten::")]
    assert names.count("aten::mm") == 1
    assert "aten::mm" not in [event.name for event in read_events(_trace(*GPU))]
