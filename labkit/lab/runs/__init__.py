"""Runs on disk: measured, written line by line, resumed, read again, and compared."""
