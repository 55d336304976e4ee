"""The FlashAttention lab: every implementation of causal attention that runs here, from short sequences to long."""
