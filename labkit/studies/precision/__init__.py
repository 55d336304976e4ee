"""The precision lab: what fewer bits do to sums, norms and dtypes, and what they buy in time.

``numerics``  sums of many small numbers, and the steps of a layer norm, against float64
``dtypes``    which dtype each part of a model has under autocast, read off the running model
``worker``    what a rank runs for one point; the timing of autocast against float32
``study``     parameters and points
``findings``  questions, and what the measurements say
"""
