"""Deadlines of ranks, in seconds: what both sides of a launch must agree on."""

# 32 ranks under spawn were ready after 18 s on two cores; a cold disk takes longer to give torch away.
START_TIMEOUT_S = 120.0
# Between one deadline and the next that is there in case the first did not do.
MARGIN_S = 5.0
