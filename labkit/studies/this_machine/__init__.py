"""Training on this machine: what all other labs recommend, in one configuration, against the default."""
