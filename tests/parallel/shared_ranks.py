"""Checks that share ranks: a module starts one group for each number of ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from traceback import format_exc

import pytest
import torch.distributed as dist

from labkit.parallel.launch import RankError, run_ranks

Check = Callable[[], list[str] | None]
"""Runs on every rank, and returns what is wrong, in words, or raises."""

_checks = defaultdict[str, list[tuple[Check, Sequence[int]]]](list)


def on_ranks(*quick: int, slow: Sequence[int] = ()) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test on each of these numbers of ranks; `make test-all` has the `slow` ones,
    too.

    Checks of a module that run on as many ranks follow each other there. If ranks die or hang, all
    of these fail.
    """

    def decorate(check: Check) -> Callable[..., None]:
        _checks[check.__module__].append((check, quick))
        _checks[f"{check.__module__} slow"].append((check, slow))
        cases = [pytest.param(p, check.__module__, id=str(p)) for p in quick]
        marks = {"marks": pytest.mark.slow}
        cases += [
            pytest.param(p, f"{check.__module__} slow", id=f"{p} slow", **marks) for p in slow
        ]

        @pytest.mark.parametrize(("world_size", "checks"), cases)
        def test(world_size: int, checks: str) -> None:
            by_rank = _run(checks, world_size)
            if isinstance(by_rank, RankError):
                raise by_rank
            assert [
                f"rank {rank}: {text}"
                for rank, all_ in enumerate(by_rank)
                for text in all_[check.__name__]
            ] == []

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        return test

    return decorate


@cache
def _run(checks: str, world_size: int) -> list[dict[str, list[str]]] | RankError:
    """Return what is wrong by rank and check, or why the ranks ended."""
    chosen = [check for check, sizes in _checks[checks] if world_size in sizes]
    try:
        return run_ranks(_run_each, chosen, world_size=world_size, timeout_s=600)
    except RankError as error:
        return error


def _run_each(checks: Sequence[Check]) -> dict[str, list[str]]:
    wrong = {}
    for check in checks:
        try:
            wrong[check.__name__] = check() or []
        except Exception:
            wrong[check.__name__] = [format_exc()]
        dist.barrier()
    return wrong


def find_accepted(
    calls: Iterable[tuple[str, Callable[[], object]]], *kinds: type[Exception]
) -> list[str]:
    """Return which calls do not raise one line with their text, as a ValueError or one of these
    kinds."""
    wrong = []
    for expected, call in calls:
        try:
            call()
            wrong.append(f"{expected}: accepted")
        except (ValueError, *kinds) as error:
            wrong += (
                []
                if expected in str(error) and "\n" not in str(error)
                else [f"{expected}: {error}"]
            )
    return wrong
