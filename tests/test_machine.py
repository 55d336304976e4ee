"""The machine as it describes itself; nothing about an unknown device is made up."""

from labkit.machine import description as machine


def test_this_machine_is_described():
    here = machine.describe_machine()
    assert here.cores >= 1
    assert here.memory_bytes >= machine.available_memory_bytes() > 0
    assert here.versions["torch"]
    assert here.slug.replace("-", "").isalnum()


def test_known_devices_have_their_own_peak_and_unknown_ones_none():
    assert machine.dense_bf16_peak_tflops("NVIDIA H100 PCIe") == 756
    assert machine.dense_bf16_peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert machine.dense_bf16_peak_tflops("NVIDIA H200") == 989
    assert machine.dense_bf16_peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert machine.dense_bf16_peak_tflops("NVIDIA GeForce RTX 4090") == 165
    for near in ("A Graphics Card", "NVIDIA H100 NVL", "NVIDIA GB200", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert machine.dense_bf16_peak_tflops(near) is None


def test_a_package_that_is_not_installed_has_no_version():
    assert machine._version("no-such-package-at-all") is None


def test_outside_a_checkout_there_is_no_git_state(tmp_path):
    assert machine._git_state(tmp_path) is None
