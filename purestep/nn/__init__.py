"""Modules as pure functions of their parameters: ``from_module``, and ``to_module`` back.

    params, apply = from_module(module)

* ``apply``: a call. ``plan``: the objects that are made for it.
* ``watch``: checks of the first call. ``refused``: modules that are no pure functions.
* ``keyed`` and ``attention``: dropout that draws from keys.
* ``huggingface``: checks for models of transformers.
"""

from purestep.nn.from_module import Apply, from_module, to_module

__all__ = ["Apply", "from_module", "to_module"]
