"""Predicts training steps on 1 to 16,384 GPUs, with intervals. Numbers in, numbers out: no torch here.

`predict(model, hardware, layout, seq_len=...)` gives seconds with intervals, a breakdown that adds up, and memory;
`rank` the best layouts; `calibrate` a profile from three runs or more.

``hardware`` ``model`` ``layout`` ``runs``      the question
``compute`` ``communication`` ``pipeline`` ``step_time`` ``memory``   formulas, one technique per file
``constants`` ``tables``      numbers in `data/reference/scaling/`, with their sources
``published`` ``intervals``   measured runs, and how wrong predictions of them are
``prediction`` ``search`` ``advice`` ``slowdown_causes`` ``calibration``   answers
"""
