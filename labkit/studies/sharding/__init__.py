"""The sharding lab: what each stage of ZeRO saves, sends and costs.

``worker``    what every rank runs: gate, then bytes, times or memory
``study``     parameters, points
``tables``    from samples to tables
``findings``  the questions, and what a run says of them
"""
