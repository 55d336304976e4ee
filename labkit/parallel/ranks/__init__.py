"""The machinery behind `labkit.parallel.launch`: processes that measure, from their start to their results.

fork_server.py          forks ranks, and ends what others leave behind
rank_process.py         a rank as its caller sees it; the caller's side of the fork server
group.py                a group of ranks: start, run a point, close
job_group.py            the same under torchrun, where every process of a job forks one rank
torchrun.py, hosts.py   the job that this process belongs to; which of its ranks share a host
worker.py               what a rank sets up, and how it runs points
current_alternative.py  whom to blame if a rank fails
results.py              rows, ends of points, failures
messages.py             JSON and checkpoints among ranks
"""
