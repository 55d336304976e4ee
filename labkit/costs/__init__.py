"""Formulas that predict what an operation costs before it is measured."""
