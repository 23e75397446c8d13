"""purestep on one CUDA device: does it hold, does it wait, what does it cost?

``python -m benchmarks.gpu`` takes at most six and a half minutes. It needs neither a network nor an
installation. Each section is a process with a time limit. Results are on the disk after each
entry, so an error, a hang or a broken CUDA context costs one section. ``schedule.py`` lists the
sections in the order of their worth.
"""
