"""A lab as a reader has it in JupyterLab: opened, changed, run, interrupted, run again, in a real browser."""

import re

import nbformat
import pytest

from labkit.lab.notebook import PAGE_MIME
from labkit.lab.project import notebook_path
from tests.jupyterlab import NEEDED, opened_browser, started_server, until
from tests.rehearsal.pages import cells_of, tries_in

pytestmark = NEEDED
LAB = notebook_path("all_reduce").name
SMALL = """
profile = "smoke"
run = None
world_sizes = [3]
sizes_bytes = [4096, 65536]
algorithms = ["torch", "ring"]
more = {"many_world_sizes": [], "transport_world_sizes": [], "scheduling_sizes_bytes": [], "backends": ["gloo"]}
"""
LONG = f"{SMALL}repeats = 100_000\ntimeout_s = 3600.0\n"  # an hour, were nobody to interrupt it

# A reader's first ring: the first element of rank 1's result is not divided away but added once more.
RING = """
import torch
import torch.distributed as dist

def mine(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.chunk(size))
    for step in range(2 * (size - 1)):
        arrived = torch.empty_like(chunks[(rank - step - 1) % size])
        requests = [dist.isend(chunks[(rank - step) % size].clone(), (rank + 1) % size), dist.irecv(arrived, (rank - 1) % size)]
        for request in requests:
            request.wait()
        if step < size - LAST:
            chunks[(rank - step - 1) % size].add_(arrived)
        else:
            chunks[(rank - step - 1) % size].copy_(arrived)

frame = lab.measure({"mine": mine})
"""
