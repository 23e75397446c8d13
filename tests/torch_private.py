"""Every private name of torch's through which tests, proofs and benchmarks watch torch.

Where one is missing, what imports or calls it fails, and nothing else does: purestep itself uses none of these.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._lazy.metrics as lazy_metrics
import torch._lazy.ts_backend as lazy_backend
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "attention",
    "lazy_backend",
    "lazy_metrics",
]


def graphs_compiled() -> int:
    """How many graphs the compiler has made since ``forget_graphs``."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def forget_graphs() -> None:
    """Begins to count the compiler's graphs anew."""
    from torch._dynamo.utils import counters

    counters.clear()


def compiling_sizes_of_data() -> AbstractContextManager[None]:
    """Within it, the compiler takes operations whose results' sizes only the data tells."""
    import torch._dynamo

    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)


def pass_of_the_compiler() -> Any:
    """The pass that the compiler's global settings hold."""
    import torch._inductor.config

    return torch._inductor.config.post_grad_custom_post_pass


def code_of_the_compiler(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a compiled function gives, and all that was written for it, without a cache of earlier compilations."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    with fresh_cache():
        result, codes = run_and_get_code(function, *args)
    return result, "".join(codes)


def decompositions_of_the_compiler() -> Any:
    """How it takes operators apart."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def few_recompilations() -> AbstractContextManager[None]:
    """Within it, the compiler gives a function up at the third graph."""
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=2)


def forward_hooks(module: torch.nn.Module) -> int:
    """How many hooks its parts hold that run after them, and how many notes about such hooks."""
    return sum(
        len(m._forward_hooks) + len(m._forward_hooks_with_kwargs)
        for m in module.modules()
    )


attention_in_steps = torch.ops.aten._scaled_dot_product_attention_math
"""Attention as an operation of ``torch.ops``, which drops elements when it is told to."""


def compiled_with_graphs(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], list[str]]:
    """The function compiled whole, and the code of each graph that reaches the compiler's backend, from the first call on."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    whole = torch.compile(
        function, backend=aot_autograd(fw_compiler=backend), fullgraph=True
    )
    return whole, graphs
