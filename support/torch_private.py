"""Lists every private name of torch's by which tests, proofs and benchmarks observe torch.

Where one is missing, only its callers fail: purestep itself uses none of these.
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


def count_graphs() -> int:
    """Counts the graphs that the compiler has made since ``reset_graph_count``."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def reset_graph_count() -> None:
    """Resets all counts of the compiler, that of ``count_cached_graphs`` included."""
    from torch._dynamo.utils import counters

    counters.clear()


def compile_data_dependent_sizes() -> AbstractContextManager[None]:
    """Lets the compiler trace operations whose results' sizes depend on the data."""
    import torch._dynamo

    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)


def get_post_grad_pass() -> Any:
    """Returns the post-grad pass in the compiler's global settings."""
    import torch._inductor.config

    return torch._inductor.config.post_grad_custom_post_pass


def run_and_get_code(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Returns a compiled function's result and all code generated for it, without a cache."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    with fresh_cache():
        result, codes = run_and_get_code(function, *args)
    return result, "".join(codes)


def get_decompositions() -> Any:
    """Returns the table by which the compiler decomposes operators."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def limit_recompilations() -> AbstractContextManager[None]:
    """Makes the compiler give a function up at the third graph."""
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=2)


def skip_timing_of_guards() -> None:
    """Lets the compiler make graphs without timing their guards, for the rest of the process.

    To time them, the compiler empties the processor's caches, which takes 20 ms of each graph.
    """
    import torch._dynamo.guards

    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def count_forward_hooks(module: torch.nn.Module) -> int:
    """Counts the forward hooks of a module and its submodules; those with kwargs count twice."""
    count = 0
    for submodule in module.modules():
        count += len(submodule._forward_hooks)
        count += len(submodule._forward_hooks_with_kwargs)
    return count


attention_in_steps = torch.ops.aten._scaled_dot_product_attention_math
"""Attention by operations of ``torch.ops``, which drops elements at a rate above 0."""


def compile_and_list_graphs(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], list[str]]:
    """Compiles a function as one graph, and lists the code of each graph of its backend.

    The list is filled from the first call on.
    """
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    aot_backend = aot_autograd(fw_compiler=backend)
    compiled = torch.compile(function, backend=aot_backend, fullgraph=True)
    return compiled, graphs


def init_function_of(model: Any) -> Any:
    """Returns the function by which a model of transformers initializes one part of itself."""
    return model._init_weights


def resolve_tp_plan(model: Any, config: Any) -> dict[str, str]:
    """Returns the plan for tensor parallelism of a model of transformers, from 5.23 on, by name."""
    plan, *_ = model._resolve_parallel_plans(config)
    resolved: dict[str, str] = plan
    return resolved


def count_cached_graphs() -> int:
    """Counts the graphs that the compiler found in its disk cache since ``reset_graph_count``."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


def fail_in_backward_compiler(after: int) -> Any:
    """Makes a compiler's backend that runs graphs by torch, and compiles ``after`` backward passes.

    It fails at the next one, by an error of the compiler's.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import TorchDynamoException
    from torch._functorch.aot_autograd import make_boxed_func

    num_calls = 0

    def compile_forward(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph)

    def compile_backward(graph: Any, _: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise TorchDynamoException("no backward pass")
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
