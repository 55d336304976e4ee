"""What a rank says when it waits in vain: another one does something else, has ended, or is late."""

from typing import NoReturn

_ONE_TENSOR = "every rank must call with a tensor of one shape and type"


def refuse_length(sender: int, n_bytes: int, receiver: int, expected: int) -> NoReturn:
    """RuntimeError: a message that came, `n_bytes` long, is not of the `expected` length."""
    raise RuntimeError(
        f"rank {sender} sent {n_bytes} bytes to rank {receiver}, which expected {expected}: {_ONE_TENSOR}"
    )


def refuse_kind(sender: int, receiver: int) -> NoReturn:
    """RuntimeError: a message came where none is waited for, so the awaited one never will."""
    raise RuntimeError(f"rank {sender} sent rank {receiver} another message than it expected: {_ONE_TENSOR}")


def refuse_part(n_bytes: int, most: int) -> NoReturn:
    """ValueError: a part is longer than what it is copied into."""
    raise ValueError(f"expected a part of at most {most} bytes, got {n_bytes}")


def report_ended(rank: int) -> NoReturn:
    """RuntimeError: the awaited rank has ended."""
    raise RuntimeError(f"rank {rank} ended while this rank waited for it")


def report_late(awaited: str) -> NoReturn:
    """TimeoutError; `awaited` is "rank 1", say."""
    raise TimeoutError(f"waited too long for {awaited}")
