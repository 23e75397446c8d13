"""Compiles steps and functions: ``torch.compile`` with public options.

``steps``: whole steps. ``graph``: one graph of a function, or the reason why there is none.
``cpu``: rewrites of graphs for CPUs.
"""

from purestep.compiling.graph import Compiler
from purestep.compiling.steps import compile

__all__ = ["Compiler", "compile"]
