"""Notebooks of all labs on recorded runs, whole or damaged: cells run in this process."""
