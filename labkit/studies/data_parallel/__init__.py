"""The data-parallel lab: how gradients should be averaged on this machine, and what that costs a
step."""
