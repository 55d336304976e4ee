"""Processes that measure: forked by a server, all by one caller or, under torchrun, one by each
process of a job."""
