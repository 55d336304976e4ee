"""How good is the advice on published families of layouts: what it proposes, against the best that was measured.

    python benchmarks/choose_layouts.py             by published table
    python benchmarks/choose_layouts.py --families  and every family

A family is a model on a number of GPUs with one batch, sequence and precision, of which four layouts or more were
timed. Times are predicted by constants that saw no row of the model (data/reference/scaling/cross_validated.csv).
"""

import argparse
from pathlib import Path

import numpy as np

from labkit.scaling.published import choices, load_published

DATA = Path(__file__).parents[1] / "data" / "reference" / "scaling"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--families", action="store_true", help="also every family")
    shown = arguments.parse_args().families
    found = list(choices(load_published(DATA)))
    print("percent behind the best measured, mean over families: top one, best of three, smallest tp x pp that fits")
    for group in sorted({choice.group for choice in found}):
        own = [choice for choice in found if choice.group == group]
        rows = np.array([[choice.behind[0], choice.best_behind, choice.behind_simple] for choice in own])
        ran_out = sum(np.isinf(choice.behind).sum() for choice in own)
        means = [np.mean(column[np.isfinite(column)]) for column in rows.T]
        print(
            f"{group:18} {' '.join(f'{100 * mean:6.1f}' for mean in means)}   {len(own)} families, "
            f"{ran_out} proposals and {np.isinf(rows[:, 2]).sum()} smallest ones ran out of memory"
        )
    for choice in found if shown else ():
        behind = ", ".join(f"{100 * one:.1f}" for one in choice.behind)
        print(
            f"  {choice.name}: {choice.layouts} layouts; proposed {behind}; smallest {100 * choice.behind_simple:.1f}"
        )


if __name__ == "__main__":
    main()
