"""Every mistake that a user of the step can make, and the words they see."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.line import MICROBATCH, PARAMS, SGD, loss_fn, step_with, weight_fn

NO_STATE: Any = ()
SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 3)


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_a_reduced_loss(reduce: Any) -> None:
    with pytest.raises(
        ValueError, match=r'shape \(\) against .*\(2,\).*one loss per token.*mean.*reduction="none"'
    ):
        step_with(lambda p, m: reduce(loss_fn(p, m)))


def test_losses_of_another_shape_are_not_broadcast() -> None:
    with pytest.raises(
        ValueError, match=r"\(2, 1\) against weights of shape \(2,\):.* reshape the losses"
    ):
        step_with(lambda p, m: loss_fn(p, m)[:, None])
    with pytest.raises(ValueError, match=r"\(2,\) against weights of shape \(1,\)"):
        step_with(weight_fn=lambda m: torch.ones(1))


@pytest.mark.parametrize("output", [3.0, None, torch.tensor([1, 2])])
def test_a_loss_that_is_no_loss(output: Any) -> None:
    with pytest.raises(TypeError, match="must return a floating point tensor, one loss per token"):
        step_with(lambda p, m: output)


def test_bad_weights() -> None:
    with pytest.raises(ValueError, match="weights must be finite and not negative, but one is -1"):
        step_with(weight_fn=lambda m: -weight_fn(m))


Optax = namedtuple("Optax", "init update")


class Batch(NamedTuple):
    """A microbatch that is a tuple too."""

    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("microbatches", "found"),
    [
        (MICROBATCH, "dict"),
        (torch.ones(2, 3), "Tensor"),
        (Batch(torch.ones(2), torch.ones(2)), "Batch"),
        (iter([MICROBATCH]), "list_iterator"),
    ],
)
def test_what_is_no_sequence_of_microbatches(microbatches: Any, found: str) -> None:
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    with pytest.raises(TypeError, match=rf"got {found}: cut a stacked batch with ps\.split"):
        step(PARAMS, SGD.init(PARAMS), microbatches)
    with pytest.raises(TypeError, match=rf"got {found}"):
        ps.make_eval_step(loss_fn, weight_fn=weight_fn)(PARAMS, microbatches)


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.tensor(True), "torch.bool"),
        (torch.ones(1, dtype=torch.complex64), "torch.complex64"),
        (1.0, "float"),
    ],
)
def test_params_that_have_no_gradient(leaf: Any, found: str) -> None:
    params = {"layers": [{"w": torch.ones(())}, {"w": leaf}]}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    with pytest.raises(
        TypeError, match=rf"params\['layers'\]\[1\]\['w'\] is {found}: params are dense"
    ):
        step(params, NO_STATE, [])


def test_no_params() -> None:
    with pytest.raises(ValueError, match="params holds no tensors"):
        ps.make_update_step(loss_fn, SGD)({"nothing": None}, NO_STATE, [])


@pytest.mark.parametrize(
    ("optimizer", "hint"),
    [
        (ps.optim.scale_by_adam(), r"got Transform: end the chain with one: ps\.optim\.chain"),
        (
            torch.optim.SGD([torch.ones(1)], lr=0.1),
            r"got SGD: its algorithm .* is ps\.optim\.from_torch\(SGD, lr=\.\.\.\)",
        ),
        (torch.optim.AdamW, r"got AdamW: .*ps\.optim\.from_torch\(AdamW, lr=\.\.\.\)"),
        (
            torch.optim.lr_scheduler.StepLR,
            r"got StepLR: .* a schedule .*ps\.optim\.linear_schedule",
        ),
        (SCHEDULER, r"got StepLR: .* a schedule .*ps\.optim\.linear_schedule"),
        (ps.optim.adamw, r"got function: call it with its settings first"),
        (Optax(None, None), "got Optax: a NamedTuple of init"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        ps.make_update_step(loss_fn, optimizer)


def test_settings() -> None:
    with pytest.raises(ValueError, match="normalize='mean' must be one of 'loss', 'grads'"):
        step_with(normalize="mean")
    with pytest.raises(ValueError, match="on_nonfinite='raise' must be one of 'propagate', 'skip'"):
        step_with(on_nonfinite="raise")
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"accum_dtype={dtype} must be a floating point dtype"):
            step_with(accum_dtype=dtype)
    with pytest.raises(
        ValueError, match=r'weight_fn=None .* pass normalize="grads", or a weight_fn'
    ):
        step_with(weight_fn=None)
    with pytest.raises(TypeError, match="loss_fn must be a function, got dict"):
        ps.make_update_step({}, SGD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss_fn must be a function, got int"):
        ps.make_eval_step(3)  # type: ignore[arg-type]


def test_aux_of_different_structure() -> None:
    def changing(params: Any, microbatch: Any) -> ps.LossTerms:
        losses = loss_fn(params, microbatch)
        return ps.LossTerms(losses, aux={str(len(losses)): losses.sum()})

    step = ps.make_update_step(changing, SGD, weight_fn=weight_fn)
    other = {key: value[:1] for key, value in MICROBATCH.items()}
    with pytest.raises(ValueError, match=r"trees differ in structure: .*'2'.* against .*'1'"):
        step(PARAMS, SGD.init(PARAMS), [MICROBATCH, other])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "dp"}, r"axis must be an axis object, got 'dp'"),
        ({"axis": ps.VmapAxis}, "axis must be an axis object"),
        ({"grad_and_value": None}, "grad_and_value must be a function, got NoneType"),
        ({"weight_fn": torch.ones(1)}, "weight_fn must be a function, got Tensor"),
        ({"optimizer": ps.optim.adamw}, r"got function: call it with its settings first"),
        (
            {"loss": lambda p, m: (loss_fn(p, m), 1)},
            r"one loss per token, or name the parts as ps\.LossTerms\(tokens.* got tuple",
        ),
    ],
)
def test_first_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        step_with(**arguments)


def test_a_module_is_not_its_params() -> None:
    with pytest.raises(TypeError, match=r"params is a module, Linear: .*ps\.from_module"):
        ps.make_update_step(loss_fn, SGD)(torch.nn.Linear(1, 1), NO_STATE, [])


def test_a_module_is_not_its_params_for_init_either() -> None:
    """The optimizer is the first to see params; other leaves that are no tensors are refused alike."""
    linear = torch.nn.Linear(2, 2)
    optimizers = [
        ps.optim.adamw(0.1),
        ps.optim.sgd(0.1),
        ps.optim.master_weights(ps.optim.sgd(0.1)),
        ps.optim.ema(ps.optim.sgd(0.1), 0.9),
        ps.optim.partition("all", {"all": ps.optim.sgd(0.1)}),
        ps.optim.from_torch(torch.optim.SGD, lr=0.1),
    ]
    for optimizer in optimizers:
        for what, path in (
            (linear, "params is of type Linear"),
            (linear.parameters(), "params is of type generator"),
            ({"w": torch.ones(2), "s": 3.0}, r"params\['s'\] is of type float"),
        ):
            with pytest.raises(TypeError, match=rf"{path}, no tensor: .*ps\.from_module"):
                optimizer.init(what)


@pytest.mark.parametrize("donate", [False, True])
def test_parameters_that_require_grad(donate: bool) -> None:
    """Each step would be recorded behind the one before."""
    params = {"w": torch.nn.Parameter(torch.tensor(1.0))}
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn, donate=donate)
    with pytest.raises(
        TypeError, match=r"params\['w'\] is an nn\.Parameter that requires grad.*ps\.from_module"
    ):
        step(params, SGD.init(params), [MICROBATCH])
    frozen = {"w": params["w"].detach()}
    assert not step(frozen, SGD.init(frozen), [MICROBATCH])[0]["w"].requires_grad


def test_aux_of_different_shapes_is_not_broadcast() -> None:
    step = ps.make_update_step(
        lambda p, m: ps.LossTerms(loss_fn(p, m), aux=m["x"]), SGD, weight_fn=weight_fn
    )
    other = {key: value[:1] for key, value in MICROBATCH.items()}
    with pytest.raises(ValueError, match=r"shape \(2,\) in one microbatch and \(1,\) in another"):
        step(PARAMS, SGD.init(PARAMS), [MICROBATCH, other])


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_labels_that_the_loss_shifts(normalize: Any) -> None:
    """Counted before they are shifted: one too many in each row, and the message says how to shift them."""
    x = torch.randn(2, 5, 3)
    labels = torch.zeros(2, 6, dtype=torch.int64)
    step = ps.make_update_step(
        lambda p, m: ps.losses.cross_entropy(m["x"] * p["w"], m["labels"][:, 1:]),
        SGD,
        normalize=normalize,
    )
    with pytest.raises(
        ValueError, match=r"dimension 1 differs by one, as where loss_fn shifts the labels: shift"
    ):
        step(PARAMS, SGD.init(PARAMS), [{"x": x, "labels": labels}])


@pytest.mark.parametrize("labels", [np.zeros((2, 5), dtype=np.int64), [[0] * 5] * 2])
def test_labels_that_are_no_tensor(labels: Any) -> None:
    with pytest.raises(
        TypeError, match=r"microbatch\['labels'\] is a (ndarray|list), not a tensor"
    ):
        ps.make_update_step(loss_fn, SGD)(PARAMS, SGD.init(PARAMS), [{"labels": labels}])


def test_params_in_eight_bits() -> None:
    params = {"w": torch.ones(2).to(torch.float8_e4m3fn)}
    with pytest.raises(
        TypeError, match=r"params\['w'\] is torch.float8_e4m3fn: .* in bfloat16 or wider"
    ):
        ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)(params, NO_STATE, [MICROBATCH])
