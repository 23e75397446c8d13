"""Tests every mistake that a user of the step can make, and the message that they see."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.line_problem import MICROBATCH, PARAMS, SGD, loss_fn, run_step, weight_fn


class Optax(NamedTuple):
    """An optimizer of another library."""

    init: Any
    update: Any


ONES = torch.ones(2)
SHORT = {key: value[:1] for key, value in MICROBATCH.items()}
TORCH_SGD = torch.optim.SGD([torch.ones(1)], lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR


def make_loss(transform: Callable[[Tensor], Any]) -> Any:
    """Makes a loss that returns what this function makes of the losses."""
    return lambda params, microbatch: transform(loss_fn(params, microbatch))


def make_loss_with_aux(aux: Callable[[Any], Any]) -> Any:
    """Makes a loss whose aux is what this function makes of a microbatch."""

    def loss_with_aux(params: Any, microbatch: Any) -> ps.LossOutput:
        return ps.LossOutput(loss_fn(params, microbatch), aux=aux(microbatch))

    return loss_with_aux


def check_refused(error: type[Exception], message: str, **arguments: Any) -> None:
    """Checks that a step with these arguments raises this error."""
    with pytest.raises(error, match=message):
        run_step(**arguments)


REDUCED = r'shape \(\) against .*\(2,\).*one loss per token.*mean.*reduction="none"'
NOT_ONE_PER_TOKEN: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda losses: losses.mean(), REDUCED),
    (lambda losses: losses.sum(), REDUCED),
    (
        lambda losses: losses[:, None],
        r"\(2, 1\) against weights of shape \(2,\):.* reshape the losses",
    ),
]


@pytest.mark.parametrize(("transform", "message"), NOT_ONE_PER_TOKEN)
def test_losses_of_another_shape(transform: Any, message: str) -> None:
    check_refused(ValueError, message, loss=make_loss(transform))


NO_LOSS = "must return a floating point tensor, one loss per token"
TUPLE = r"one loss per token, or name the parts as ps\.LossOutput\(losses.* got tuple"
NO_LOSSES: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda losses: 3.0, NO_LOSS),
    (lambda losses: None, NO_LOSS),
    (lambda losses: ps.LossOutput(5), rf"{NO_LOSS}.* got int"),  # type: ignore[arg-type]
    (lambda losses: torch.tensor([1, 2]), NO_LOSS),
    (lambda losses: (losses, 1), TUPLE),
]


@pytest.mark.parametrize(("transform", "message"), NO_LOSSES)
def test_losses_that_are_no_tensor_of_floats(transform: Any, message: str) -> None:
    check_refused(TypeError, message, loss=make_loss(transform))


def loss_that_shifts_labels(params: Any, microbatch: Any) -> Tensor:
    logits = microbatch["x"] * params["w"]
    return ps.losses.cross_entropy(logits, microbatch["labels"][:, 1:])


@pytest.mark.parametrize("settings", [{}, {"normalize": "grads"}])
def test_a_loss_that_shifts_labels(settings: dict[str, Any]) -> None:
    microbatch = {
        "x": torch.randn(2, 5, 3),
        "labels": torch.zeros(2, 6, dtype=torch.int64),
    }
    check_refused(
        ValueError,
        r"dimension 1 differs by one, as where loss_fn shifts the labels: shift",
        loss=loss_that_shifts_labels,
        weight_fn=ps.label_weights,
        group=[microbatch],
        **settings,
    )


WRONG_WEIGHTS: list[tuple[Tensor, str]] = [
    (torch.ones(1), r"\(2,\) against weights of shape \(1,\)"),
    (
        torch.tensor([0, -1]),
        "weights must be finite and not negative, but one is -1",
    ),
]


@pytest.mark.parametrize(("weights", "message"), WRONG_WEIGHTS)
def test_wrong_weights(weights: Tensor, message: str) -> None:
    check_refused(ValueError, message, weight_fn=lambda microbatch: weights)


LABELS_OF_OTHERS: list[tuple[Any, str]] = [
    (np.zeros((2, 5), dtype=np.int64), "ndarray"),
    ([[0] * 5] * 2, "list"),
]


@pytest.mark.parametrize(("labels", "class_name"), LABELS_OF_OTHERS)
def test_labels_that_are_no_tensor(labels: Any, class_name: str) -> None:
    check_refused(
        TypeError,
        rf"\['labels'\] is a {class_name}, not a tensor",
        weight_fn=ps.label_weights,
        group=[{"labels": labels}],
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
    (
        torch.optim.AdamW,
        r"got AdamW: .*ps\.optim\.from_torch\(AdamW, lr=\.\.\.\)",
    ),
    (SCHEDULER, SCHEDULE),
    (SCHEDULER(TORCH_SGD, 3), SCHEDULE),
    (ps.optim.adamw, r"got function: call it with its settings first"),
    (Optax(None, None), "got Optax: a NamedTuple of init"),
    ((None, None), "got tuple: a NamedTuple of init"),
    (None, "got NoneType"),
    (
        ps.optim.Optimizer(lambda p: {"t": 0}, lambda g, s, p: (p, s)),
        r"opt_state\['t'\] is of type int, no tensor: init and update return trees of tensors",
    ),
]


@pytest.mark.parametrize(("optimizer", "message"), NO_OPTIMIZER)
def test_no_optimizer(optimizer: Any, message: str) -> None:
    check_refused(TypeError, message, optimizer=optimizer)


CHOICES = {
    "normalize": "'loss', 'grads'",
    "gather": "'step', 'microbatch', 'loss'",
    "on_nonfinite": "'propagate', 'skip'",
}


@pytest.mark.parametrize("setting", CHOICES)
def test_a_value_that_is_no_choice(setting: str) -> None:
    message = f"{setting}='mean' must be one of {CHOICES[setting]}"
    check_refused(ValueError, message, **{setting: "mean"})


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_add_up(dtype: torch.dtype) -> None:
    message = f"{dtype} must be a floating point dtype"
    check_refused(ValueError, message, accum_dtype=dtype)


def test_no_weights() -> None:
    message = 'weight_fn=None .* pass weight_fn=.* pass normalize="grads"'
    check_refused(ValueError, message, weight_fn=None)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"weight_fn": ONES}, "weight_fn must be a function, got Tensor"),
    ({"loss": {}}, "loss_fn must be a function, got dict"),
    ({"grad_and_value": None}, "grad_and_value must be a function, got NoneType"),
    ({"axis": "dp"}, "axis must be an axis object, got 'dp'"),
    ({"axis": ps.VmapAxis}, "axis must be an axis object"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_TYPES)
def test_arguments_of_another_type(arguments: Any, message: str) -> None:
    check_refused(TypeError, message, **arguments)


UNLIKE_AUX: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda microbatch: {str(len(microbatch["x"])): ONES},
        r"trees differ in structure: .*'2'.* against .*'1'",
    ),
    (
        lambda microbatch: microbatch["x"],
        r"shape \(2,\) in one microbatch and \(1,\) in another",
    ),
]


@pytest.mark.parametrize(("aux", "message"), UNLIKE_AUX)
def test_aux_that_differs_between_microbatches(aux: Any, message: str) -> None:
    group = [MICROBATCH, SHORT]
    check_refused(ValueError, message, loss=make_loss_with_aux(aux), group=group)


def test_evaluation_checks_where_to_gather() -> None:
    with pytest.raises(ValueError, match="gather='mean' must be one of 'step'"):
        ps.make_eval_step(loss_fn, gather="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "microbatches", [MICROBATCH, ONES, Optax(ONES, ONES), iter([MICROBATCH])]
)
def test_a_group_that_is_no_sequence(microbatches: Any) -> None:
    """At the first step and later, and in evaluation."""
    step: Any = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    evaluate: Any = ps.make_eval_step(loss_fn, weight_fn=weight_fn)
    class_name = type(microbatches).__name__
    message = rf"must be a sequence of microbatches, got {class_name}: cut a stacked batch with ps\.split"

    def run_step(group: Any) -> None:
        step(PARAMS, SGD.init(PARAMS), group)

    def run_evaluation(group: Any) -> None:
        evaluate(PARAMS, group)

    for run in (run_step, run_evaluation):
        with pytest.raises(TypeError, match=message):
            run(microbatches)
        run([MICROBATCH])
        with pytest.raises(TypeError, match=message):
            run(microbatches)


NO_FLOATS = {
    "torch.int64": torch.tensor([1, 2]),
    "torch.bool": torch.tensor(True),
    "float": 1.0,
    "torch.complex64": ONES.to(torch.complex64),
    "torch.float8_e4m3fn": ONES.to(torch.float8_e4m3fn),
}


def check_params_refused(params: Any, error: type[Exception], message: str) -> None:
    """Checks that a step and an evaluation refuse these params."""
    step: Any = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=weight_fn)
    with pytest.raises(error, match=message):
        step(params, (), [])
    with pytest.raises(error, match=message):
        evaluate(params, [])


def test_params_that_are_none() -> None:
    check_params_refused({"nothing": None}, ValueError, "params holds no tensors")
    message = r"params is a module, Linear: .*ps\.from_module"
    check_params_refused(torch.nn.Linear(1, 1), TypeError, message)


@pytest.mark.parametrize("class_name", NO_FLOATS)
def test_params_that_are_no_floats(class_name: str) -> None:
    params = {
        "layers": [
            {"w": torch.ones(())},
            {"w": NO_FLOATS[class_name]},
        ]
    }
    leaf = r"params\['layers'\]\[1\]\['w'\]"
    message = rf"{leaf} is {class_name}: params are .* in bfloat16 or wider"
    check_params_refused(params, TypeError, message)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_params_that_are_not_dense() -> None:
    dense = torch.eye(2)
    for actual, leaf in {
        "of layout torch.sparse_coo": dense.to_sparse(),
        "of layout torch.sparse_csr": dense.to_sparse_csr(),
        "a nested tensor": torch.nested.nested_tensor([ONES, ONES]),
    }.items():
        message = rf"params\['w'\] is {actual}: params are dense tensors"
        check_params_refused({"w": leaf}, TypeError, message)


INITS: list[ps.optim.Optimizer] = [
    SGD,
    ps.optim.adamw(0.1),
    ps.optim.master_weights(SGD),
    ps.optim.ema(SGD, 0.9),
    ps.optim.partition({"all": SGD}, "all"),
    ps.optim.from_torch(torch.optim.SGD, lr=0.1),
]
LINEAR = torch.nn.Linear(2, 2)
NO_TREES: list[tuple[Any, str]] = [
    (LINEAR, "params is of type Linear"),
    (LINEAR.parameters(), "params is of type generator"),
    ({"w": ONES, "s": 3.0}, r"params\['s'\] is of type float"),
]


@pytest.mark.parametrize(("params", "message"), NO_TREES)
@pytest.mark.parametrize("optimizer", INITS)
def test_init_refuses_params_that_are_no_tensors(
    optimizer: Any, params: Any, message: str
) -> None:
    """The optimizer is the first to see params."""
    with pytest.raises(TypeError, match=rf"{message}, no tensor: .*ps\.from_module"):
        optimizer.init(params)


@pytest.mark.parametrize("make_leaf", [torch.nn.Parameter, Tensor.requires_grad_])
@pytest.mark.parametrize("donate", [False, True])
def test_leaves_that_require_grad(
    donate: bool, make_leaf: Callable[[Tensor], Tensor]
) -> None:
    """Autograd would record each step behind the one before.

    A step over copies of them, which have a graph, is recorded.
    """
    w = make_leaf(torch.tensor(1.0))
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn, donate=donate)

    def run_step(w: Tensor) -> Tensor:
        params = {"w": w}
        new_params, _, _ = step(params, SGD.init(params), [MICROBATCH])
        new_w: Tensor = new_params["w"]
        return new_w

    leaf = r"params\['w'\]"
    message = rf"{leaf} requires grad and was computed from nothing.*ps\.from_module"
    with pytest.raises(TypeError, match=message):
        run_step(w)
    assert not run_step(w.detach()).requires_grad
    assert run_step(w.clone()).requires_grad


def test_checks_run_again_after_a_failure() -> None:
    """An update that fails, or has no microbatch, leaves the first checks to the next."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            w.mul_(0.5)
        return w * x

    sgd = ps.optim.sgd(0.1)
    w = torch.tensor(8.0)
    update_step = ps.make_update_step(loss_fn, sgd, weight_fn=torch.ones_like)
    update_step(w, sgd.init(w), [])
    for _ in range(2):
        with pytest.raises(ValueError, match="loss_fn wrote to params"):
            update_step(w, sgd.init(w), [torch.ones(2)])


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Vector:
    """Looks at its tensor."""

    x: Tensor

    def __post_init__(self) -> None:
        assert self.x.ndim == 1


def test_a_node_that_looks_at_its_tensor_is_named() -> None:
    def loss_fn(vector: Any, m: Tensor) -> Tensor:
        with torch.no_grad():
            vector.x.mul_(0.5)
        return vector.x * m

    sgd = ps.optim.sgd(0.1)
    make_vector: Any = Vector
    vector = make_vector(torch.ones(2))
    update_step = ps.make_update_step(loss_fn, sgd, weight_fn=torch.ones_like)
    with pytest.raises(ValueError, match=r"loss_fn wrote to params\.x in place"):
        update_step(vector, sgd.init(vector), [torch.ones(2)])


@pytest.mark.parametrize("weight", [1e-50, 1e39])
def test_a_count_that_losses_cannot_be_divided_by(weight: float) -> None:
    """Sums of losses in float32 are not divided by 0 or inf.

    With ``normalize="loss"``, losses are weighted first and may have such a count.
    """

    def weight_fn(microbatch: Any) -> Tensor:
        return torch.full_like(microbatch["x"], weight, dtype=torch.float64)

    message = r"num_tokens.*cannot be divided: scale the weights"
    check_refused(ValueError, message, weight_fn=weight_fn, normalize="grads")
