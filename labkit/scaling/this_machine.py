"""The machine in front of the reader as hardware to plan with: from its calibration, not from a data sheet."""

from labkit.costs.calibration import ALL_REDUCE, CPU, NCCL, Calibration
from labkit.costs.communication import ring
from labkit.scaling.hardware import Hardware

MEASURED = "measured"
"""The architecture of hardware whose rates were reached, not declared: nothing is taken off them."""
GIB = 2**30


def hardware_of(
    calibration: Calibration, memory_bytes: float, *, ranks: int | None = None, device: str | None = None
) -> Hardware:
    """A node of this machine's own ranks, each a "GPU" that has its share of cores and memory.

    Rates are what `ranks` (None: one per core, as far as calibrated) reach while all compute on `device` (None: a GPU
    if one was calibrated); the link is what an all-reduce of long tensors moves a rank by its fastest way. There is no
    network: it is as fast as the link.
    ValueError for a machine whose ranks were not calibrated.
    """
    device = device or next((one.device for one in calibration.rates if one.device != CPU), CPU)
    known = sorted({one.ranks for one in calibration.transports})
    ranks = ranks or max((n for n in known if n <= calibration.cores), default=1)
    rates = calibration.of_ranks(ranks, device)
    every = {one.way for one in calibration.transports}
    ways = {way for way in every if (way == NCCL) == (device != CPU)} or every
    links = [calibration.transport(way, ALL_REDUCE, max(ranks, 2)) for way in ways]
    betas = [one.beta_s_per_byte for one in links if one is not None and one.beta_s_per_byte > 0]
    if not betas:
        raise ValueError("expected a calibration with long messages between ranks: labkit measure limits")
    link_gb_s = ring(max(ranks, 2), 1.0).n_bytes / min(betas) / 1e9
    dtype = max(rates.products, key=rates.flops_per_s)
    return Hardware(
        name=f"this machine ({calibration.machine})",
        architecture=MEASURED,
        peak_tflops=rates.flops_per_s(dtype) / 1e12,
        memory_gib=memory_bytes / ranks / GIB,
        memory_gb_s=rates.memory_bytes_per_s / 1e9,
        link_gb_s=link_gb_s,
        network_gbps=8 * ranks * link_gb_s,
        source=f"calibrated by {calibration.run}",
        multiprocessors=max(1, calibration.cores // ranks),
        gpus_per_node=ranks,
    )
