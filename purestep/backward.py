"""Gradients for a training loop that exists: ``.grad`` of a module's own parameters.

metrics = backward(microbatches)          parameter.grad = ∇L(θ), over all ranks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from purestep import hints, tree, validation
from purestep.axis import Axis, LocalAxis
from purestep.compiling import Compiler
from purestep.counts import label_weights
from purestep.grads.backends import GradBackends
from purestep.grads.compiled import backward_of_compiled_loss
from purestep.grads.inplace import inplace_backward
from purestep.grads.microbatch import GradAccumulator, MicrobatchInputs
from purestep.step import (
    Normalize,
    StepSettings,
    check_settings,
    make_step,
    measure_step,
)
from purestep.types import (
    GradHook,
    GradSums,
    LossOutput,
    Microbatch,
    OptState,
    Params,
    StepMetrics,
    TokenCounts,
    WeightFn,
)


class ModuleLoss(Protocol):
    """Computes one loss per token of a module's outputs: ``loss_fn(model, microbatch)``."""

    def __call__(
        self, model: Any, microbatch: Microbatch, /
    ) -> Tensor | LossOutput: ...


@hints.explain_keywords
def make_backward(
    model: nn.Module,
    loss_fn: ModuleLoss,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
    normalize: Normalize = "loss",
    accum_dtype: torch.dtype | None = None,
    compile: bool | Compiler = False,
) -> Callable[[Sequence[Microbatch]], StepMetrics]:
    """Makes a function that stands where ``loss.backward()`` stands in a training loop.

        for microbatches in batches:
            metrics = backward(microbatches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    ``backward(microbatches)`` sets ``.grad`` of each parameter that requires grad to the gradient
    that ``make_update_step`` computes. It is in the parameter's ``grad_dtype``, by default its
    dtype. What was in ``.grad`` is gone, so nothing is left to zero: that of a frozen parameter is
    None. If ``backward`` raises, all are None. A parameter that the loss does not reach has a
    gradient of zeros. The parameters themselves are the leaves: nothing is copied, and the module
    runs as it is, with its hooks and buffers.

    Args:
        model: the module. Of ``DistributedDataParallel``, pass ``ddp.module``, and an ``axis``.
        loss_fn: ``loss_fn(model, microbatch)`` returns one loss per token, or ``LossOutput``. For
            ``torch.amp.GradScaler``, return ``scaler.scale(losses)``.
        weight_fn: as in ``make_update_step``.
        axis: the ranks over which tokens are spread.
        normalize: as in ``make_update_step``.
        accum_dtype: the dtype of the sums. None: float32 for half precision, else that of params.
        compile: compile the loss, by ``torch.compile`` or by a function like it.

    Returns:
        The function ``backward``, which returns the metrics of an update. ``grad_norm`` is that
        before any clipping. ``applied`` is False where there is no token. The gradient is then
        zero, unless a loss has an infinite or NaN derivative: that makes it NaN.

    Raises ``TypeError`` unless ``model`` is a module, and if it is or contains DDP or FSDP.
    The other arguments raise as in ``make_update_step``. ``backward`` raises ``ValueError`` if no
    parameter requires grad, if a microbatch has a graph, and under a transform or a compiler.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.zeros_(model.weight).tolist()
    [[0.0]]
    >>> def loss_fn(model, microbatch):
    ...     return (model(microbatch["x"]) - microbatch["y"]).square().squeeze(-1)
    >>> backward = make_backward(model, loss_fn, weight_fn=lambda m: m["x"][:, 0] > 0)
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> metrics = backward([{"x": x[:1], "y": 2 * x[:1]}, {"x": x[1:], "y": 2 * x[1:]}])
    >>> metrics.loss, model.weight.grad
    (tensor(18.6667), tensor([[-18.6667]]))
    """
    check_can_set_grads(model)
    validation.check_functions(loss_fn, weight_fn, axis)
    settings = StepSettings(weight_fn, axis, normalize, accum_dtype, "step")
    config = check_settings(settings)

    def loss_of_model(_: Params, microbatch: Microbatch) -> Tensor | LossOutput:
        return loss_fn(model, microbatch)

    def own_leaves() -> list[Tensor]:
        return tree.leaves(trainable_parameters(model))

    plain = inplace_backward(loss_of_model, own_leaves)
    if compile is not False:
        plain = backward_of_compiled_loss(loss_of_model, compile, own_leaves)
    step = make_step(
        GradBackends(plain, _refuse_graph, _refuse_graph),
        settings,
        {**config, "call": "backward"},
        functools.partial(_check_parameters, axis),
        _keep_grads,
        notes_launches=False,
    )

    def backward(microbatches: Sequence[Microbatch], /) -> StepMetrics:
        # That of a parameter that was frozen since, too: an optimizer goes on moving it.
        for parameter in model.parameters():
            parameter.grad = None
        if not tree.is_plain_eager():
            raise _recorded_error()
        parameters = trainable_parameters(model)
        dtypes = [parameter.grad_dtype for parameter in parameters.values()]
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        try:
            _, grads, metrics = step(values, (), microbatches)
        finally:
            # The sums may have had another dtype; and a loss that fails leaves a part of them.
            for parameter, dtype in zip(parameters.values(), dtypes, strict=True):
                parameter.grad = None
                parameter.grad_dtype = dtype
        for name, parameter in parameters.items():
            parameter.grad = grads[name].to(parameter.grad_dtype or parameter.dtype)
        return metrics

    return backward


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require grad, by name; a shared one once, by its first name.

    >>> [*trainable_parameters(nn.Linear(1, 1))]
    ['weight', 'bias']
    """
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def check_can_set_grads(model: object) -> None:
    """Raises ``TypeError`` unless ``model`` is a module that neither is nor contains DDP or FSDP.

    The module inside of DDP, ``ddp.module``, passes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: call "
            "make_backward(model, loss_fn). For a tree of params take ps.make_update_step, or "
            "ps.accumulate"
        )
    for name, module in model.named_modules():
        class_name = type(module).__name__
        bases = {cls.__name__ for cls in type(module).__mro__}
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{name or 'model'} is a {class_name}, which reduces gradients in each backward "
                "pass: pass the module inside, .module, and axis=ps.MeshAxis(mesh, ...), which "
                "reduces once"
            )
        if "FullyShardedDataParallel" in bases or hasattr(
            module, "set_requires_gradient_sync"
        ):
            raise TypeError(
                f"{name or 'model'} is sharded by {class_name}: take the module before "
                "fully_shard, params, apply = ps.from_module(module, units=...), and "
                "ps.make_update_step, which shards likewise"
            )


def _check_parameters(
    axis: Axis,
    params: Params,
    opt_state: OptState,
    microbatches: Sequence[Microbatch],
) -> None:
    """Raises ``ValueError`` without params, and as ``check_params`` if a step cannot take them.

    ``opt_state`` and ``microbatches`` are not checked.
    """
    if not params:
        raise ValueError(
            "no parameter of the model requires grad: call requires_grad_() on those to train"
        )
    validation.check_params(params, axis)


def _refuse_graph(
    inputs: MicrobatchInputs,
    accumulator: GradAccumulator,
    on_grad_ready: GradHook | None,
) -> NoReturn:
    raise _recorded_error()


def _recorded_error() -> ValueError:
    """Returns the error for a backward pass that a graph, a transform or a compiler records."""
    return ValueError(
        "backward() runs where nothing records: a microbatch has a graph, or torch.func or a "
        "compiler is around it. Detach the data, or differentiate by ps.from_module(model) and "
        "ps.make_update_step"
    )


def _keep_grads(
    sums: GradSums, total: TokenCounts, params: Params, opt_state: OptState
) -> tuple[Params, Any, StepMetrics]:
    """Returns params as they are, ``sums.grads`` in the place of ``opt_state``, and metrics.

    The step has divided ``sums`` by N. The gradients stay in the dtype of the sums.
    """
    return params, sums.grads, measure_step(sums, total)
