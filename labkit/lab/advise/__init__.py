"""`labkit advise`: what a reader asks, in options, and what `labkit.scaling` finds, in words, on a
screen or a page."""
