"""Ranks: how they start, what they answer, how they fail, and how nothing of them is left behind."""
