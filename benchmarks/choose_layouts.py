"""How good is the advice on published families of layouts: its proposals against the best measured layout.

    python benchmarks/choose_layouts.py             by published table
    python benchmarks/choose_layouts.py --families  and every family

A family is a model on a number of GPUs with one batch, sequence and precision, of which four layouts or more were
timed. Times are predicted by constants fitted without the model (data/reference/scaling/cross_validated.csv).
"""

import argparse

import numpy as np

from labkit.scaling.choices import choices


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--families", action="store_true", help="also every family")
    with_families = arguments.parse_args().families
    families = list(choices())
    print("percent behind the best measured, mean over families: top one, best of three, smallest tp x pp that fits")
    for group in sorted({family.group for family in families}):
        rows = [family for family in families if family.group == group]
        behind = np.array([[row.behind[0], row.best_behind, row.behind_simple] for row in rows])
        means = [np.mean(column[np.isfinite(column)]) for column in behind.T]
        ran_out = [int(np.isinf(row.behind).sum()) for row in rows]
        print(
            f"{group:18} {' '.join(f'{100 * mean:6.1f}' for mean in means)}   {len(rows)} families, "
            f"{sum(ran_out)} proposals and {np.isinf(behind[:, 2]).sum()} smallest ones ran out of memory"
        )
    for row in families if with_families else ():
        behind = ", ".join(f"{100 * one:.1f}" for one in row.behind)
        print(f"  {row.name}: {row.layouts} layouts; proposed {behind}; smallest {100 * row.behind_simple:.1f}")


if __name__ == "__main__":
    main()
