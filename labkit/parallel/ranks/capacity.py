"""How many ranks this machine can start."""

from __future__ import annotations

import resource

from labkit.machine import available_cores, available_memory_bytes

RANK_BYTES = 20 * 2**20  # forked from a server that has imported torch: 11 MiB, and buffers of the process group
RANKS_PER_CORE = 64  # more are not ready in time: every rank connects to every other
THREADS_PER_RANK = 4  # its own, and those of gloo and of what watches the parent
FILES_PER_RANK = 4  # of the parent; a rank has one for each of the others
SPARE = 64


def why_too_many(ranks: int) -> str | None:
    """Why so many ranks cannot be started here ("at most 128 ranks, 64 per core"), or None."""
    memory = available_memory_bytes()
    limits = [(RANKS_PER_CORE * available_cores(), f"{RANKS_PER_CORE} per core")]
    limits.append((memory // RANK_BYTES, f"{RANK_BYTES / 2**20:.0f} MiB each of {memory / 2**30:.1f} GiB"))
    for what, name, share in (
        (resource.RLIMIT_NOFILE, "open files", FILES_PER_RANK),
        (resource.RLIMIT_NPROC, "processes and threads", THREADS_PER_RANK),
    ):
        limit, _ = resource.getrlimit(what)
        if limit != resource.RLIM_INFINITY:
            limits.append(((limit - SPARE) // share, f"{share} of the {limit} {name} allowed each"))
    most, why = min(limits)
    return None if ranks <= most else f"at most {max(0, most)} ranks, {why}"
