"""Loads the Hypothesis profile before any test is collected."""

import proofs.strategies  # noqa: F401
