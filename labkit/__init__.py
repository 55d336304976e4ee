"""labkit: a lab notebook for the systems side of neural-network training.

Importing it is cheap and does nothing. Where to look first:

``labkit.nn``, ``labkit.parallel``   what is studied
``labkit.bench``                     the instruments
``labkit.studies``                   one module a lab: what is measured, predicted and answered
``labkit.lab``                       what turns a study into a run, a notebook and a page
"""

__version__ = "0.1.0"
