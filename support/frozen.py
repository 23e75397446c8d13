"""Prepares the process from which ranks and programs are forked: its last import freezes what it holds.

Without it, a fork that compiles looks through half a million objects again and again, none of which
is garbage, and so has its own copy of their pages.
"""

import gc

from support.torch_private import skip_timing_of_guards

skip_timing_of_guards()
gc.collect()
gc.freeze()
