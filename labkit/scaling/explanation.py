"""Why a training is slower than expected: conventions, the prediction, and what each suspect could explain at most."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from labkit.scaling.advice import Request
from labkit.scaling.layout import Layout
from labkit.scaling.model import layer_parameters, parameters, step_flops
from labkit.scaling.search import Candidate
from labkit.scaling.suspects import Suspect, suspects_of

SAME = 0.1
"""Reported and computed MFU within this share are the same number."""


@dataclass(frozen=True)
class Convention:
    """One way to print MFU, and what it makes of this throughput, 0 to 1."""

    name: str
    mfu: float


@dataclass(frozen=True)
class Explanation:
    """`step_s` is what was measured, `mfu` the same by labkit's convention; `reported_mfu` what the reader printed.

    `unnamed` are options that the reader left out, of which the prediction took the usual or the best.
    """

    request: Request
    expected: Candidate
    step_s: float
    mfu: float
    conventions: Sequence[Convention]
    reported_mfu: float | None
    parameters_implied: float | None
    """Of a model for which throughput and reported MFU agree; None unless both are given and no convention fits."""
    suspects: Sequence[Suspect]
    """Those that could explain everything first, the quickest to check before others; then by what they explain."""
    unnamed: Collection[str] = ()

    @property
    def is_expected(self) -> bool:
        """Whether the measured step lies in the 90 % interval."""
        low, high = self.expected.interval_90
        return low <= self.step_s <= high

    @property
    def interval_mfu(self) -> tuple[float, float]:
        """The 90 % interval of the predicted MFU."""
        low_s, high_s = self.expected.interval_90
        return tuple(self.expected.mfu * self.expected.step_s / one for one in (high_s, low_s))  # type: ignore[return-value]

    @property
    def convention(self) -> Convention | None:
        """The convention that gives the reported MFU; None if none does or none was reported."""
        if self.reported_mfu is None:
            return None
        near = min(self.conventions, key=lambda one: abs(one.mfu / (self.reported_mfu or 1.0) - 1))
        return near if abs(near.mfu / self.reported_mfu - 1) <= SAME else None

    def share(self, suspect: Suspect) -> float:
        """Of the seconds that a unit of work takes too long, what this suspect gives at its worst: 0 to 1."""
        return _share(suspect, self.expected.mfu, self.mfu)

    def could_be_all(self, suspect: Suspect) -> bool:
        return _place(suspect, self.expected.mfu, self.mfu) == 0

    def is_excluded(self, suspect: Suspect) -> bool:
        """Whether it would make the step slower than it is."""
        return not suspect.is_graded and self.mfu > suspect.high


def explain(
    request: Request,
    *,
    tokens_per_s: float | None = None,
    mfu: float | None = None,
    unnamed: Collection[str] = (),
) -> Explanation:
    """Why this throughput, or this MFU by labkit's convention. ValueError for neither, or an impossible layout."""
    if not any(value is not None and 0 < value < float("inf") for value in (tokens_per_s, mfu)):
        raise ValueError("expected the tokens per second or the MFU that was measured, above zero")
    ranking = request.ranking()
    expected = ranking.candidate(ranking.order[0]) if ranking.order else ranking.leanest()
    step_s = request.tokens / tokens_per_s if tokens_per_s else expected.step_s * expected.mfu / (mfu or 1.0)
    own = expected.mfu * expected.step_s / step_s
    conventions = list(_conventions(request, expected.layout, own))
    found = Explanation(request, expected, step_s, own, conventions, mfu, None, (), unnamed)
    if own < expected.mfu:
        suspects = suspects_of(request, ranking, expected, unnamed, has_throughput=tokens_per_s is not None)
        found = replace(found, suspects=_ranked(list(suspects), expected.mfu, own))
    if mfu and tokens_per_s and found.convention is None:
        found = replace(found, parameters_implied=parameters(request.model) * mfu / own)
    return found


def _ranked(suspects: Sequence[Suspect], usual: float, own: float) -> list[Suspect]:
    def key(suspect: Suspect) -> tuple[int, float]:
        place = _place(suspect, usual, own)
        return place, -_share(suspect, usual, own) if place else 0.0

    return sorted(suspects, key=key)


def _place(suspect: Suspect, usual: float, own: float) -> int:
    """0: could be all of it; 1: a part; 2: would make it slower still."""
    if suspect.is_graded:
        return 0 if suspect.mfu <= own else 1
    return 2 if own > suspect.high else 0 if own >= suspect.low else 1


def _share(suspect: Suspect, usual: float, own: float) -> float:
    if suspect.mfu <= own:
        return 1.0
    return max((1 / suspect.mfu - 1 / usual) / (1 / own - 1 / usual), 0.0)


def _conventions(request: Request, layout: Layout, own: float) -> Iterator[Convention]:
    model, seq_len = request.model, request.seq_len
    whole, causal = (step_flops(model, seq_len=seq_len, sequences=1, causal=half) / seq_len for half in (False, True))
    yield Convention("6 FLOPs a parameter and all attention scores, dense peak", own)
    yield Convention("only the causal half of the scores", own * causal / whole)
    yield Convention("6 FLOPs a parameter, no attention", own * 6 * parameters(model) / whole)
    if layout.recompute == "full":
        again = 2 * model.layers * (layer_parameters(model) + 2 * model.hidden * seq_len)
        yield Convention("recomputation counted (hardware FLOPs)", own * (whole + again) / whole)
    yield Convention("over the peak with sparsity, twice the dense one", own / 2)
