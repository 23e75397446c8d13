"""Modules as pure functions of their parameters: ``from_module``, and ``to_module`` back.

    params, apply = from_module(module)

``apply`` says what a call is, ``plan`` of what objects it is made, ``watch`` what its first call
shows, ``refused`` what is no such function, ``keyed`` and ``attention`` how dropout draws from
keys, and ``huggingface`` what is known of transformers' models.
"""

from purestep.modules.apply import Apply, from_module, to_module

__all__ = ["Apply", "from_module", "to_module"]
