"""The data-parallel lab: how to average gradients here, and what that costs a step."""
