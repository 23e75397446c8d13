"""What a compiler must not look into: imported by the compiler itself, when it gets there.

Inside a collective it would find ``forward``, and never learn of the batching rule. Saying so takes
``torch._dynamo``, whose import costs a second, so it is not said when purestep is imported.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from purestep.axis import primitives

apply_collective: Callable[..., Tensor] = torch.compiler.allow_in_graph(
    primitives.apply_function
)
