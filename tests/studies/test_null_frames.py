"""Runs in which nothing differs: recorded runs of every lab whose times are replaced by noise around one value.

Whatever a finding claims of times then is false, be it an effect, a verdict, a crossover, or the outcome of a published
claim: of many such runs at most 5 % may hold one, for each question.
"""

import numpy as np
import pandas as pd
import pytest
from labkit.studies.kernels.worker import INFERENCE

from labkit.studies import LABS, load_lab
from labkit.studies.sharding.worker import GATHER
from tests.studies.noisy_runs import newest_recorded, rows_with_samples, timed_columns, with_noise

FRAMES = 8  # of each kind of noise
MOST = 0.05
CORRELATED = 0.1  # between one repeat and the next


def _claims_a_difference(finding, untimed):
    """Whether it says of times what is false where nothing differs. How right predictions are is another question.

    `untimed` is what the same question is answered without any time: what is no different is not of times (a loss).
    """
    timed = [effect for effect in finding.effects if effect.low < effect.high and effect not in untimed.effects]
    if any(effect.verdict in ("faster", "slower") for effect in timed):
        return True
    if any(
        claim.where_equal and claim.outcome not in (claim.where_equal, "is not shown here") for claim in finding.claims
    ):
        return True
    if "overtakes another" in (finding.why or ""):
        return True
    is_prediction = finding.table is not None and "measured_over_predicted" in finding.table
    is_timed = (finding.verdict, finding.headline) != (untimed.verdict, untimed.headline)
    is_judged = is_timed and finding.verdict in ("yes", "no", "it depends")
    return is_judged and not (finding.effects or finding.claims or is_prediction)


def _residuals(frame, rows):
    found = []
    for name in timed_columns(frame):
        logs = np.log(frame[name].where(frame[name] > 0)).dropna()
        found.append((logs - logs.groupby(rows[logs.index]).transform("median")).to_numpy())
    return np.concatenate(found)


def _kinds(residuals):
    """How the noise of a sample series, (n,), is drawn, by name."""

    def correlated(rng, n):
        noise = rng.normal(0, 0.1, n)
        for index in range(1, n):
            noise[index] += CORRELATED * noise[index - 1]
        return noise

    return {
        "10 %": lambda rng, n: rng.normal(0, 0.1, n),
        "20 %": lambda rng, n: rng.normal(0, 0.2, n),
        "40 %": lambda rng, n: rng.normal(0, 0.4, n),
        "correlated": correlated,
        "as recorded": lambda rng, n: rng.choice(residuals, n),
    }


def _null(frame, rows, draw, rng):
    """The same rows, each time a draw around 1 ms; all ranks of a repeat take as long.

    What was published, and has a prediction beside it, stays.
    """
    measured = ~_is_published(frame)
    for name in timed_columns(frame):
        frame = with_noise(frame, name, rows, draw, rng, measured)
    return _gathers_take_as_long_as_waiting(_parts_of_attention_take_as_long(frame))


def _is_published(frame):
    return frame["predicted_s"].notna() if "predicted_s" in frame else pd.Series(False, index=frame.index)


def _untimed(frame):
    return frame.assign(**{name: frame[name].where(_is_published(frame)) for name in timed_columns(frame)})


def _gathers_take_as_long_as_waiting(frame):
    """A step gathers the model several times, and waits for all of them."""
    if "tensors_bytes" not in frame:
        return frame
    gathered = frame[(frame["way"] == "fsdp") & (frame["collective"] == "all_gather")]
    times = (gathered["tensors_bytes"] / gathered["model_bytes"]).max()
    return frame.assign(seconds=frame["seconds"].where(frame["part"] != GATHER, frame["seconds"] / times))


def _parts_of_attention_take_as_long(frame):
    """Of a profiled pass, products take half, and in attention the softmax takes as long as they do.

    There the product with the values takes next to nothing: the softmax is also held against that of the scores. The
    operators of a part share a draw: the sum of several has a larger median than one, by 8 % with noise of 40 %.
    """
    if not {"within", "self_s", "family"} <= set(frame):
        return frame
    is_product = (frame["family"] == "matmul") | (frame["within"] == "values")
    part = frame["within"].where(frame["within"].isin(["scores", "values"]), "").where(is_product, "others")
    part = part.mask(frame["within"] == "softmax", "softmax")
    part = part.mask((frame["mode"] == INFERENCE) & (frame["phase"] != "forward"), "not looked at")
    together = frame.groupby([part, *(frame[name] for name in ("model", "mode", "rank", "repeat"))], dropna=False)
    each = together["self_s"].transform("first") / together["self_s"].transform("size")
    return frame.assign(self_s=each.mask(part == "values", 1e-6 * each))


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_runs_in_which_nothing_differs_claim_next_to_nothing(lab):
    run = newest_recorded(lab)
    frame, calibration = run.frame(), run.header.calibration
    if not timed_columns(frame):
        pytest.skip("no times in a recorded run")
    study, rows = load_lab(lab), rows_with_samples(frame)
    untimed = study.findings(_untimed(frame), pd.DataFrame(), calibration)
    kinds = _kinds(_residuals(frame, rows)).values()

    def claiming(seeds):
        """Questions of which more than `MOST` of the frames of these seeds claim something, beyond chance."""
        claims: dict[str, int] = {}
        for number, draw in enumerate(kinds):
            for seed in seeds:
                null = _null(frame, rows, draw, np.random.default_rng([number, seed]))
                for identifier, finding in study.findings(null, pd.DataFrame(), calibration).items():
                    claims[identifier] = claims.get(identifier, 0) + _claims_a_difference(finding, untimed[identifier])
        tries = len(seeds) * len(kinds)
        most = tries * (MOST + 2 * np.sqrt(MOST * (1 - MOST) / tries))
        return {identifier: f"{count} of {tries}" for identifier, count in claims.items() if count > most}

    suspect = claiming(range(FRAMES))
    if suspect:  # among so many questions of all labs some are by chance: other frames decide
        again = claiming(range(FRAMES, 4 * FRAMES))
        suspect = {identifier: again[identifier] for identifier in suspect if identifier in again}
    assert suspect == {}
