"""The scaling lab: how wrong the predictor of many GPUs is, and what it says of 8 to 16,384 of them."""
