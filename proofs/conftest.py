"""Loads the Hypothesis profile before any test is collected."""

import support.strategies  # noqa: F401
