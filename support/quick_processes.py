"""Makes a process take less time, from its import on: for tests, and all processes that they start.

The modules that tests import hold half a million objects. To look through them for garbage took a
third of the time of the imports, and later a tenth of that of the tests. And torch's compiler asks
in each process, for a second, whether it can compile for the vectors of this processor.
"""

import gc
import os

gc.set_threshold(100_000, 50, 1000)
# Read as torch's compiler is imported.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
