"""Mistakes put into labkit on purpose, one at a time: does a test of `make test` see each? Run by `make mutants`."""
