"""What all tests share: tests that need more than is there, or more time than `make test` has, are skipped by name."""

import os

import pytest
import torch


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
