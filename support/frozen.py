"""Lets the process from which ranks and programs are forked look for garbage less often.

It is the last import of that process. Without it, a fork that compiles looks through half a million
objects again and again, none of which is garbage, and so has its own copy of their pages.
"""

import gc

gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 1000)
