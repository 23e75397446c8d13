"""For tests of programs that run on several ranks."""

from purestep.testing.threads import ThreadAxis

__all__ = ["ThreadAxis"]
