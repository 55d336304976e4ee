"""Once imported, the model nano is a ninth of its size: for pages, and the ranks that measure for them."""

from labkit.costs.transformer import SIZES, TransformerShape

TINY = TransformerShape(d_model=64, d_ff=128, n_layers=2, n_heads=2, vocabulary=2000)
vars(SIZES["nano"]).update(vars(TINY))
