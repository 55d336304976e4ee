"""Predictions as formulas, from numbers to numbers: what an operation costs before it is
measured."""
