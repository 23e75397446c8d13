"""Freezes what the process holds from which ranks and programs are forked: its last import.

Without it, a fork that compiles looks through half a million objects again and again, none of which
is garbage, and so has its own copy of their pages.
"""

import gc

gc.collect()
gc.freeze()
