"""From one machine to many: what a training step would take on 1 to 16,384 GPUs, and how wrong that may be.

`predict(model, hardware, layout, seq_len=...)` gives seconds with intervals, a breakdown that adds up, and memory;
`search` the best layouts, `calibrate` a profile from three runs or more. Numbers in, numbers out: no torch here.

``hardware`` ``model`` ``layout``        what is asked about
``compute`` ``communication`` ``pipeline`` ``step_time`` ``memory``   the formulas, one technique a file
``declared`` ``constants`` ``fitted.json``   every constant and where it comes from
``intervals`` ``prediction`` ``calibration`` ``search`` ``table``   what is made of them
"""
