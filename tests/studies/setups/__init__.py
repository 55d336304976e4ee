"""Trainings as users write them, for the lab on one's own training."""
