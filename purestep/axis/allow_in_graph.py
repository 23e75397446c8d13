"""Keeps collectives whole in a trace: dynamo itself imports this module, when it reaches one.

Inside a collective it would trace ``forward``, and lose the batching rule. To mark the function
takes ``torch._dynamo``, whose import costs a second, so purestep does not import this module.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from purestep.axis import primitives

apply_collective: Callable[..., Tensor] = torch.compiler.allow_in_graph(
    primitives.apply_function
)
