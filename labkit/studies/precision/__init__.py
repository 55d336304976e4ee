"""The precision lab: what fewer bits do to sums, norms and dtypes, and what they buy in time."""
