"""The tests draw their cases as the proofs do."""

import proofs.strategies  # noqa: F401
