"""Checks that share ranks: one group of them for each number of ranks, and a test for each check."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from labkit.parallel.launch import run_ranks

Check = Callable[[], list[str]]
"""Runs on every rank, and returns what is wrong, in words."""


class SharedRanks:
    """Checks, each with numbers of ranks, and with those that only `make test-all` takes.

    Every rank calls `prepare` before the first check.
    """

    def __init__(
        self, checks: Iterable[tuple[Check, Sequence[int], Sequence[int]]], prepare: Callable[[], None] | None = None
    ) -> None:
        self._checks, self._prepare = list(checks), prepare
        self._run = cache(self._run_group)

    def cases(self) -> list[Any]:
        """Return parameters for `check, world_size`, those of `make test-all` marked slow."""
        return [
            pytest.param(check, p, marks=[pytest.mark.slow] if p in slow else [], id=f"{_name(check)} {p}")
            for check, quick, slow in self._checks
            for p in (*quick, *slow)
        ]

    def errors(self, check: Check, world_size: int) -> list[str]:
        """Return what is wrong on any rank. The first call for a number of ranks runs all checks of that number."""
        is_slow = any(check is each and world_size in slow for each, _, slow in self._checks)
        by_rank = self._run(world_size, is_slow)
        return [f"rank {rank}: {text}" for rank, errors in enumerate(by_rank) for text in errors[_name(check)]]

    def _run_group(self, world_size: int, is_slow: bool) -> list[dict[str, list[str]]]:
        checks = [check for check, quick, slow in self._checks if world_size in (slow if is_slow else quick)]
        return run_ranks(_run_all, checks, self._prepare, world_size=world_size, timeout_s=600)


def _name(check: Check) -> str:
    return check.__name__.removeprefix("_").removeprefix("check_")


def _run_all(checks: Sequence[Check], prepare: Callable[[], None] | None) -> dict[str, list[str]]:
    errors = {}
    if prepare is not None:
        prepare()
    for check in checks:
        errors[_name(check)] = check()
        dist.barrier()
    return errors
