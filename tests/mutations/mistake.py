"""What a mistake is: a piece of a file, what is written in its place, and the tests that should fail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """In `file`, below labkit/, `new` stands for the only `old`; pytest with the arguments `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mistakes(file: str, tests: tuple[str, ...], **changes: tuple[str, str]) -> list[Mistake]:
    """Several in one file, by name: what stands there, and what is written instead."""
    return [Mistake(name.replace("_", " "), file, old, new, tests) for name, (old, new) in changes.items()]
