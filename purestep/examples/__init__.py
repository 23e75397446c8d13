"""Runnable examples: ``python -m purestep.examples.NAME``."""
