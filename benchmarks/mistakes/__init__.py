"""Plants mistakes in training loops, for ``purestep.testing`` to find, and holds loops that it has to accept."""
