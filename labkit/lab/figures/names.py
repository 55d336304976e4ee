"""Natural order and look of names in figures, so that a name looks the same on every page."""

from collections.abc import Iterable, Sequence
from itertools import chain, cycle
from typing import Any

# The place in its group is the color and marker of a name. A name in two groups has the same place
# in both, so `torch` is first wherever it occurs.
_TABLE = """
torch | ring | butterfly | halving_doubling | recursive_doubling | auto | one_shot
torch | point_to_point | shared | registered | floor
gloo | nccl | shared memory
torch | naive | flat | overlapped | bucketed | bucketed_sync | local
  | naive_shared | bucketed_shared
explicit | compiled | tiled | flash | sdpa | sdpa_math | sdpa_flash | sdpa_efficient | sdpa_cudnn
ddp | torch_ddp | zero1 | torch_zero1 | zero2 | zero3 | torch_zero3
torch | labkit | plain_local_batch | plain_whole_batch | collectives_alone
torch | own
torch + BatchNorm | own + BatchNorm | torch + SyncBatchNorm | own + SyncBatchNorm
BatchNorm | SyncBatchNorm
torch | torch, sequence parallel | shared | shared, sequence parallel | one rank
ring, zigzag | ring, contiguous | gathered, zigzag | gathered, contiguous | one rank
data parallel | sharded | tensor parallel | pipeline | context parallel
all_reduce | reduce_scatter | all_gather
input | forward | backward | optimizer
inference | forward | backward | optimizer | forward and backward | step | waiting | all-reduce
parameters | gradients | activations | optimizer | temporaries | inputs
inference, float32 | inference, bfloat16 | forward, float32 | forward, bfloat16
  | full step, float32 | full step, bfloat16
float64 | float32 | bfloat16 | float16
fp32 | fp16 | bf16 | fp16_into_fp32 | fp16_cast_to_fp32 | bf16_into_fp32
matmul | softmax | loss | elementwise | reduction | embedding | copy | dispatch
memory | arithmetic | the call
add | new
nano | mini | small | medium | large | xl | 2.7B | 10B
"""
_LINES = _TABLE.replace("\n  |", " |").strip().splitlines()
GROUPS = tuple(tuple(line.split(" | ")) for line in _LINES)
_PLACES = {name: place for group in GROUPS for place, name in enumerate(group)}


def in_order(values: Iterable[Any]) -> list[Any]:
    """Return distinct values in natural order: numbers ascending, then names as in `GROUPS`.

    Other names, such as a reader's own, come last, in the order in which they are given.
    """
    distinct = list(dict.fromkeys(values))
    numbers = sorted(value for value in distinct if not isinstance(value, str))
    names = [value for value in distinct if isinstance(value, str)]
    # a name may stand in several groups: the one that knows most of these has their order
    groups = sorted(GROUPS, key=lambda group: -len({*group} & {*names}))
    order = {name: place for place, name in enumerate(dict.fromkeys(chain(*groups)))}
    return numbers + sorted(names, key=lambda name: order.get(name, len(order)))


def looks(values: Iterable[Any], choices: Sequence[str]) -> dict[Any, str]:
    """Assign one of `choices`, colors or markers, to each value.

    A name of `GROUPS` gets that of its place. Others get those that are left, so that a reader's
    own alternative changes no other.
    """
    ordered = in_order(values)
    result: dict[Any, str] = {}
    for name in ordered:
        place = _PLACES.get(name, len(choices))
        if place < len(choices) and choices[place] not in result.values():
            result[name] = choices[place]
    free = cycle([one for one in choices if one not in result.values()] or choices)
    return {name: result[name] if name in result else next(free) for name in ordered}
