"""Compiles steps and functions: ``torch.compile`` with public options.

``graph``: one graph of a function, or the reason why there is none. ``cpu``: rewrites of graphs for
CPUs.
"""

from purestep.compiling.graph import Compiler, compile

__all__ = ["Compiler", "compile"]
