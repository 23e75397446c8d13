"""Every mistake that a user of the step can make, and the words they see."""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, step_with, weight_fn

Optax = namedtuple("Optax", "init update")
ONES = torch.ones(2)
SHORT = {key: value[:1] for key, value in MICROBATCH.items()}
TORCH_SGD = torch.optim.SGD([torch.ones(1)], lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR


def with_aux(aux: Any) -> Any:
    """A loss with what this function makes of a microbatch as aux."""
    return lambda p, m: ps.LossOutput(loss_fn(p, m), aux=aux(m))


REDUCED = r'shape \(\) against .*\(2,\).*one loss per token.*mean.*reduction="none"'
NO_LOSS = "must return a floating point tensor, one loss per token"
SEQUENCE = (
    r"must be a sequence of microbatches, got {}: cut a stacked batch with ps\.split"
)
SCHEDULE = r"got StepLR: .* a schedule .*ps\.optim\.linear_schedule"
NO_OPTIMIZER: list[tuple[Any, str]] = [
    (
        ps.optim.scale_by_adam(),
        r"got Transform: end the chain with one: ps\.optim\.chain",
    ),
    (
        TORCH_SGD,
        r"got SGD: its algorithm .* is ps\.optim\.from_torch\(SGD, lr=\.\.\.\)",
    ),
    (torch.optim.AdamW, r"got AdamW: .*ps\.optim\.from_torch\(AdamW, lr=\.\.\.\)"),
    *((each, SCHEDULE) for each in (SCHEDULER, SCHEDULER(TORCH_SGD, 3))),
    (ps.optim.adamw, r"got function: call it with its settings first"),
    (Optax(None, None), "got Optax: a NamedTuple of init"),
    ((None, None), "got tuple: a NamedTuple of init"),
    (None, "got NoneType"),
]
SHIFTED = r"dimension 1 differs by one, as where loss_fn shifts the labels: shift"
SHIFTING: dict[str, Any] = {
    "loss": lambda p, m: ps.losses.cross_entropy(m["x"] * p["w"], m["labels"][:, 1:]),
    "weight_fn": ps.label_weights,
    "group": [
        {"x": torch.randn(2, 5, 3), "labels": torch.zeros(2, 6, dtype=torch.int64)}
    ],
}
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss": lambda p, m: loss_fn(p, m).mean()}, ValueError, REDUCED),
    ({"loss": lambda p, m: loss_fn(p, m).sum()}, ValueError, REDUCED),
    ({"loss": lambda p, m: loss_fn(p, m)[:, None]}, ValueError, r"\(2, 1\) against weights of shape \(2,\):.* reshape the losses"),
    ({"weight_fn": lambda m: torch.ones(1)}, ValueError, r"\(2,\) against weights of shape \(1,\)"),
    (SHIFTING, ValueError, SHIFTED),
    ({**SHIFTING, "normalize": "grads"}, ValueError, SHIFTED),
    *(({"loss": lambda p, m, output=output: output}, TypeError, NO_LOSS) for output in (3.0, None, torch.tensor([1, 2]))),
    ({"loss": lambda p, m: (loss_fn(p, m), 1)}, TypeError, r"one loss per token, or name the parts as ps\.LossOutput\(tokens.* got tuple"),
    ({"weight_fn": lambda m: torch.tensor([0, -1])}, ValueError, "weights must be finite and not negative, but one is -1"),
    *(({"optimizer": optimizer}, TypeError, hint) for optimizer, hint in NO_OPTIMIZER),
    ({"optimizer": ps.optim.Optimizer(lambda p: {"t": 0}, lambda g, s, p: (p, s))}, TypeError, r"opt_state\['t'\] is of type int, no tensor: init and update return trees of tensors"),
    *(({name: "mean"}, ValueError, f"{name}='mean' must be one of {choices}")
      for name, choices in {"normalize": "'loss', 'grads'", "gather": "'step', 'microbatch', 'loss'", "on_nonfinite": "'propagate', 'skip'"}.items()),
    *(({"accum_dtype": dtype}, ValueError, f"{dtype} must be a floating point dtype") for dtype in (torch.int64, torch.float8_e4m3fn)),
    ({"weight_fn": None}, ValueError, 'weight_fn=None .* pass normalize="grads", or a weight_fn'),
    ({"weight_fn": ONES}, TypeError, "weight_fn must be a function, got Tensor"),
    ({"loss": {}}, TypeError, "loss_fn must be a function, got dict"),
    ({"grad_and_value": None}, TypeError, "grad_and_value must be a function, got NoneType"),
    ({"axis": "dp"}, TypeError, "axis must be an axis object, got 'dp'"),
    ({"axis": ps.VmapAxis}, TypeError, "axis must be an axis object"),
    ({"loss": with_aux(lambda m: {str(len(m["x"])): ONES}), "group": [MICROBATCH, SHORT]}, ValueError, r"trees differ in structure: .*'2'.* against .*'1'"),
    ({"loss": with_aux(lambda m: m["x"]), "group": [MICROBATCH, SHORT]}, ValueError, r"shape \(2,\) in one microbatch and \(1,\) in another"),
    *(({"weight_fn": ps.label_weights, "group": [{"labels": labels}]}, TypeError, r"\['labels'\] is a (ndarray|list), not a tensor")
      for labels in (np.zeros((2, 5), dtype=np.int64), [[0] * 5] * 2)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), MISTAKES)
def test_mistakes(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step_with(**arguments)


def test_evaluation_asks_where_to_gather() -> None:
    with pytest.raises(ValueError, match="gather='mean' must be one of 'step'"):
        ps.make_eval_step(loss_fn, gather="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "microbatches", [MICROBATCH, ONES, Optax(ONES, ONES), iter([MICROBATCH])]
)
def test_a_group_that_is_no_sequence(microbatches: Any) -> None:
    """At the first step and later, and in evaluation."""
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=weight_fn)
    state, found = (
        (PARAMS, SGD.init(PARAMS)),
        SEQUENCE.format(type(microbatches).__name__),
    )
    for call in (partial(step, *state), partial(evaluate, PARAMS)):
        with pytest.raises(TypeError, match=found):
            call(microbatches)
        call([MICROBATCH])
        with pytest.raises(TypeError, match=found):
            call(microbatches)


NO_FLOATS = {
    "torch.int64": torch.tensor([1, 2]), "torch.bool": torch.tensor(True), "float": 1.0,
    "torch.complex64": ONES.to(torch.complex64), "torch.float8_e4m3fn": ONES.to(torch.float8_e4m3fn),
}  # fmt: skip
NO_PARAMS: list[tuple[Any, type[Exception], str]] = [
    ({"nothing": None}, ValueError, "params holds no tensors"),
    (torch.nn.Linear(1, 1), TypeError, r"params is a module, Linear: .*ps\.from_module"),
    *(({"layers": [{"w": torch.ones(())}, {"w": leaf}]}, TypeError, rf"params\['layers'\]\[1\]\['w'\] is {found}: params are .* in bfloat16 or wider")
      for found, leaf in NO_FLOATS.items()),
]  # fmt: skip


@pytest.mark.parametrize(("params", "error", "message"), NO_PARAMS)
def test_params_that_are_none(
    params: Any, error: type[Exception], message: str
) -> None:
    """For evaluation, too."""
    step: Any = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=weight_fn)
    for call in (partial(step, params, ()), partial(evaluate, params)):
        with pytest.raises(error, match=message):
            call([])


INITS: list[ps.optim.Optimizer] = [
    SGD, ps.optim.adamw(0.1), ps.optim.master_weights(SGD), ps.optim.ema(SGD, 0.9),
    ps.optim.partition("all", {"all": SGD}), ps.optim.from_torch(torch.optim.SGD, lr=0.1),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", INITS)
def test_init_refuses_them_too(optimizer: Any) -> None:
    """The optimizer is the first to see params."""
    linear = torch.nn.Linear(2, 2)
    for params, path in (
        (linear, "params is of type Linear"),
        (linear.parameters(), "params is of type generator"),
        ({"w": ONES, "s": 3.0}, r"params\['s'\] is of type float"),
    ):
        with pytest.raises(TypeError, match=rf"{path}, no tensor: .*ps\.from_module"):
            optimizer.init(params)


@pytest.mark.parametrize("leaf", [torch.nn.Parameter, torch.Tensor.requires_grad_])
@pytest.mark.parametrize("donate", [False, True])
def test_leaves_that_require_grad(
    donate: bool, leaf: Callable[[Tensor], Tensor]
) -> None:
    """Each step would be recorded behind the one before. A copy of them has a graph, and is."""
    params = {"w": leaf(torch.tensor(1.0))}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn, donate=donate)
    refused = (
        r"params\['w'\] requires grad and was computed from nothing.*ps\.from_module"
    )
    with pytest.raises(TypeError, match=refused):
        step(params, SGD.init(params), [MICROBATCH])
    frozen = {"w": params["w"].detach()}
    assert not step(frozen, SGD.init(frozen), [MICROBATCH])[0]["w"].requires_grad
    copies = {"w": params["w"].clone()}
    assert step(copies, SGD.init(copies), [MICROBATCH])[0]["w"].requires_grad


def test_what_is_refused_is_refused_again() -> None:
    """An update that fails, or has no microbatch, leaves the checks of the first one to the next."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            w.mul_(0.5)
        return w * x

    sgd, w = ps.optim.sgd(0.1), torch.tensor(8.0)
    update_step = ps.make_update_step(loss_fn, sgd, weight_fn=torch.ones_like)
    update_step(w, sgd.init(w), [])
    for _ in range(2):
        with pytest.raises(ValueError, match="loss_fn wrote to params"):
            update_step(w, sgd.init(w), [torch.ones(2)])


@pytest.mark.parametrize("weight", [1e-50, 1e39])
def test_a_count_that_losses_cannot_be_divided_by(weight: float) -> None:
    """Sums of losses in float32 are not divided by 0 or inf. Losses that are weighed before may have such a count."""
    how: Any = {
        "weight_fn": lambda m: torch.full_like(m["x"], weight, dtype=torch.float64)
    }
    with pytest.raises(
        ValueError, match=r"num_tokens.*cannot be divided: scale the weights"
    ):
        step_with(**how, normalize="grads")
