"""The task of a lab for a class: what a student writes, what it may call, and what is handed in."""

from dataclasses import dataclass

# Of these a student's algorithm may consist: an all-reduce in a single call would be none.
MESSAGES = ("send", "receive", "exchange")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather")

# As a student types them; several functions may make calls of one kind.
FUNCTIONS = {kind: f"`dist.{kind}`" for kind in COLLECTIVES} | {
    "send": "`dist.send`, `dist.isend`",
    "receive": "`dist.recv`, `dist.irecv`, `dist.batch_isend_irecv`",
    "exchange": "`labkit.parallel.exchange.exchange`",
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function or class that a student writes instead of one of the lab's alternatives."""

    name: str
    text: str
    """What it must do, in Markdown."""
    stub: str
    """Code to complete: its signature, a docstring, and NotImplementedError."""
    allowed: tuple[str, ...] = ()
    """Kinds of calls that its code may make; all others are refused."""
    at_most: int | None = None
    """Collectives per forward and backward pass together; None: as many as it likes."""
    moves_input: bool = False
    """Each rank's messages carry at least the bytes of its input: with fewer, something else that
    is not counted, such as another thread, does the work."""
    noted: tuple[str, ...] = ()
    """Parts of names of torch's operators that do the work: no mistake, but a teacher is told."""

    @property
    def may_call(self) -> str:
        """What the code may call, in Markdown."""
        if not self.allowed:
            return "operators of torch, but no fused attention; no communication."
        text = "to communicate, only " + ", ".join(FUNCTIONS[kind] for kind in self.allowed)
        if self.at_most is not None:
            text += f"; at most {self.at_most} per forward and backward pass together"
        return f"{text}. Neither labkit's algorithms nor torch's own wrappers."
