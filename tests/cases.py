"""Parameters of a test of which `make test` takes some, and `make test-all` every one."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], is_quick: Callable[..., bool]) -> list[Any]:
    """The cases, one value or a tuple of arguments each, as parameters; marked slow unless
    `is_quick` of them."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.slow) for case in several
    ]
