"""What all tests share: tests that need more than is there, or more time than `make test` has, are skipped by name."""

import os
import signal

import pytest
import torch

# What is started in the background of a shell ignores SIGINT, and so does all that it starts. Tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    skipped = {}
    if not torch.cuda.is_available():
        skipped["gpu"] = "needs a CUDA device"
    if os.environ.get("LABKIT_FAULTS") != "all":
        skipped["faults"] = "run by `make faults`"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
