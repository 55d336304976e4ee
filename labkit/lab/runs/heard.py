"""A study's worker beside the heartbeat of its rank: every row says of which call of the clock it is, the last has the
beats. Ranks import this: nothing heavy but torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from labkit.bench.heartbeat import Beat, listening

CALL, BEATS = "heartbeat call", "heartbeats"  # no study's worker has names with a blank


def heard(worker: Callable[..., Any], point: Any, **options: Any) -> Iterator[Any]:
    """What the worker yields for a point, and one more row with what was heard.

    Nothing is heard of a point whose ranks have to be new: the first beat would start the process in its stead.
    """
    if getattr(point, "fresh_ranks", False):
        yield from worker(point, **options) or ()
        return
    with listening() as heartbeat:
        for row in worker(point, **options) or ():
            call = heartbeat.call_of(row) if isinstance(row, Mapping) else None
            yield row if call is None else {**row, CALL: call}
            heartbeat.beat()
        yield {BEATS: heartbeat.beats}


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], int | None, list[Beat] | None]:
    """A row as `heard` sends it: what the worker yielded, the call of the clock, and the beats if it is their row."""
    own = {name: value for name, value in values.items() if name not in (CALL, BEATS)}
    return own, values.get(CALL), values.get(BEATS)
