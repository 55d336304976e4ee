"""Runs on disk: measured, written line by line, resumed, and read again."""
