"""What a compiler sees of ``remat``: one operation, imported by the compiler itself, when it gets there.

It traces the function into a graph, and what the function closes over becomes an argument. When the graph's own operations are recorded, the
same ``autograd.Function`` runs it as everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from purestep.rematerialisation import called, remat
from purestep.torch_internals import may_draw, operation_on_graphs, watching


class _Drawn(Exception):  # noqa: N818
    """Random numbers are drawn."""


def _refuse_drawn(operation: Any, args: Any, kwargs: Any) -> None:
    """A compiler would draw other numbers when it computes again."""
    if may_draw(operation, args, kwargs):
        raise _Drawn


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not isinstance(function, torch.fx.GraphModule):
        return remat(function)(*args, **kwargs)  # The compiler has left this to Python.
    try:
        with watching(_refuse_drawn):
            return called(function, args, kwargs, traced=True)
    except _Drawn:
        return function(*args, **kwargs)


rematerialised: Callable[..., Any] = operation_on_graphs("purestep_remat", _run)
