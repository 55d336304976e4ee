"""Processes that measure, forked by a server.

One caller has them all or, under torchrun, each process of the job has one.
"""
