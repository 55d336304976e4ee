"""The semaphores of a mailbox by number, in a group of p ranks: what is said with each, and by whom."""


def filled(target: int) -> int:
    """By the owner of the mailbox: a message for `target`, with its note, is ready (`shared.py`)."""
    return target


def taken(p: int, reader: int) -> int:
    """By `reader`: it has read a message of the owner (`shared.py`)."""
    return p + reader


def swapped(p: int, target: int) -> int:
    """By the owner: its half of a swap with `target` is ready (`swaps.py`)."""
    return 2 * p + target


def gate(p: int) -> int:
    """By the rank that shows last: the owner may look at what everybody shows (`boards.py`)."""
    return 3 * p


def lock(p: int) -> int:
    """One token, in the mailbox of rank 0: who has it may count (`boards.py`)."""
    return 3 * p + 1


def count(p: int) -> int:
    """How many there are."""
    return 3 * p + 2
