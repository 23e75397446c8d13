"""Graphs of a function, before and after a rewrite."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.torch_private import decompositions_of_the_compiler


def operators_after(
    rewrite: Callable[[torch.fx.Graph], None],
    function: Callable[..., Any],
    *args: Any,
    mode: Literal["fake", "symbolic"] = "fake",
) -> list[str]:
    """The operators of a function's graph once it is rewritten; it must still compute the same."""
    graph = make_fx(function, decompositions_of_the_compiler(), mode)(*args)
    rewrite(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*args), function(*args), rtol=0, atol=0, equal_nan=True)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
