"""Processes that measure: forked by a server (`fork_server`, `group`), or those of a torchrun job (`JobGroup`)."""
