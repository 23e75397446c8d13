"""Modules as pure functions of their parameters: ``from_module``, and ``to_module`` back.

    params, apply = from_module(module)

* ``from_module``: the two functions, and ``Apply``, which runs a call.
* ``rebuild``: builds copies of a module's objects around other tensors, one set for each call.
* ``validation``: refuses modules, params and names before a call. ``first_call``: during one.
* ``dropout`` and ``attention``: dropout that draws from keys.
* ``units``: parts that gather their own params. ``tensor_parallel``: parameters that are DTensors.
* ``reset``: initializes params in shards.
* ``outside``: dicts outside of a module that its hooks fill by layer.
* ``huggingface``: checks for models of transformers.
"""

from purestep.nn.from_module import Apply, from_module, to_module
from purestep.nn.reset import reset_parameters

__all__ = ["Apply", "from_module", "reset_parameters", "to_module"]
