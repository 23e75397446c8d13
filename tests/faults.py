"""Faults in a step of four uneven ranks, and what every rank hears of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.broken import (
    Killed,
    Labelled,
    Opaque,
    Tail,
    broken_backward,
    raising,
)
from tests.uneven import BAD, SGD, Arguments, alone, batch, loss_fn, ones, params, sound, step


class Fault(NamedTuple):
    """What some ranks do differently, and which errors they and the others get."""

    change: Callable[[Arguments], Arguments]
    own: tuple[type[BaseException], str]
    others: tuple[type[BaseException], str]
    ranks: tuple[int, ...] = (BAD,)


def failure(
    kind: type[BaseException], text: str, change: Callable[..., Arguments], heard: str | None = None
) -> Fault:
    """The rank that fails gets its own exception, and the others hear of it."""
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    told = f"failed, and the step with it on every rank; nothing was updated. rank 2: {name}: "
    return Fault(change, (kind, text), (ps.RankError, told + (heard or text)))


def setting(name: str, right: str, wrong: str, **settings: Any) -> Fault:
    """Another setting of the step: every rank gets one and the same error."""
    right, wrong = (f"settings[{name!r}]: {value!r}" for value in (right, wrong))
    differ = f"ranks 0, 1, 3 with {right} against rank 2 with {wrong}"
    text = f"disagree on settings, and nothing was updated: {differ}"
    return Fault(lambda _: settings, (ValueError, text), (ValueError, text))


def shared(_: Arguments) -> Arguments:
    """Two leaves in one piece of memory."""
    w = params()["w"]
    theta = {"b": w[0], "w": w}
    return {"donate": True, "params": theta, "opt_state": SGD.init(theta)}


def recorded(_: Arguments) -> Arguments:
    """Params that require grad."""
    return {"params": tree.map(lambda leaf: leaf.requires_grad_(), params())}


FAULTS = {
    "normalize": setting("normalize", "loss", "grads", normalize="grads"),
    "accum_dtype": setting("accum_dtype", "None", "torch.float32", accum_dtype=torch.float32),
    "on_nonfinite": setting("on_nonfinite", "propagate", "skip", on_nonfinite="skip"),
    "recorded": failure(ValueError, "is not recorded, but params", recorded, "a step over"),
    "weights": failure(ArithmeticError, "θ ≠ θ", lambda _: {"weight_fn": raising(ones, 1)}),
    "interrupted weights": failure(
        KeyboardInterrupt, "θ ≠ θ",
        lambda _: {"weight_fn": raising(ones, 1, KeyboardInterrupt)},
    ),
    "negative weights": failure(
        ValueError, "weights must be finite and not negative, but one is -1",
        lambda _: {"weight_fn": lambda m: -ones(m)},
    ),
    "first loss": failure(
        ArithmeticError, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 0)}
    ),
    "last loss": failure(
        ArithmeticError, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 2)}
    ),
    "exit": failure(
        SystemExit, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 1, SystemExit)}
    ),
    "no Exception": failure(
        Killed, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 0, Killed)}
    ),
    "backward": failure(
        ArithmeticError, "no way back", lambda _: {"loss_fn": broken_backward(ArithmeticError)}
    ),
    "interrupted backward": failure(
        KeyboardInterrupt, "no way back", lambda _: {"loss_fn": broken_backward(KeyboardInterrupt)}
    ),
    "after the last microbatch": failure(
        ArithmeticError, "θ ≠ θ", lambda a: {"microbatches": Tail(a["microbatches"])}
    ),
    "mean loss": failure(
        ValueError, "losses of shape () against weights of shape (1,)",
        lambda _: {"loss_fn": lambda p, m: loss_fn(p, m).mean()},
    ),
    "opt_state that raises": failure(
        ArithmeticError, "θ ≠ θ", lambda _: {"opt_state": Opaque()}
    ),
    "opt_state that cannot be described": failure(
        KeyboardInterrupt, "θ ≠ θ", lambda a: {"opt_state": Labelled(a["opt_state"])}
    ),
    "no sequence": failure(
        TypeError, "microbatches must be a sequence of microbatches, got dict",
        lambda _: {"microbatches": batch()},
    ),
    "no params": failure(
        ValueError, "params holds no tensors", lambda _: {"params": {}}
    ),
    "a buffer given twice": failure(
        ValueError, "donate=True needs a buffer for each leaf", shared
    ),
    "two ranks": Fault(
        lambda a: {"loss_fn": raising(a["loss_fn"], 0)},
        (ArithmeticError, "θ ≠ θ"),
        (ps.RankError, "rank 0: ArithmeticError: θ ≠ θ; rank 2: ArithmeticError: θ ≠ θ"),
        ranks=(0, 2),
    ),
    "every rank": Fault(
        lambda _: {"weight_fn": raising(ones, 0), "microbatches": [batch()]},
        (ArithmeticError, "θ ≠ θ"),
        (ps.RankError, ""),
        ranks=(0, 1, 2, 3),
    ),
}  # fmt: skip
COMPUTED = ["first loss", "backward", "interrupted backward", "no Exception"]
"""Faults that show only when losses and gradients are computed."""


class Aftermath(NamedTuple):
    """What a rank is left with after a fault: the error, and that it can go on."""

    axis: str
    error: BaseException | None
    next_step: Any


def faulty_step(axis: ps.Axis, rank: int, name: str, how: Arguments) -> Aftermath:
    """A step in which some ranks go wrong, which changes no state, and then a sound one."""
    arguments, fault = {**sound(rank), **how}, FAULTS[name]
    if rank in fault.ranks:
        arguments |= fault.change(arguments)
    state = arguments["params"], arguments["opt_state"]
    leaves = [
        leaf for part in state if not isinstance(part, Opaque) for leaf in tree.leaves_of(part)
    ]
    before = tree.map(torch.clone, leaves)
    error = None
    try:
        step(axis, arguments)
    except BaseException as caught:
        error = caught
    assert_same(leaves, before)
    return Aftermath(repr(axis), error, step(axis, {**sound(rank), **how}))


def check_fault(name: str, aftermaths: Sequence[Aftermath]) -> None:
    """Every rank heard of it, and nothing has happened."""
    fault, expected = FAULTS[name], alone()
    for rank, (axis, error, next_step) in enumerate(aftermaths):
        kind, text = fault.own if rank in fault.ranks else fault.others
        assert type(error) is kind
        assert text in str(error)
        if kind is ps.RankError:
            ranks = f"rank{'s' * (len(fault.ranks) > 1)} {', '.join(map(str, fault.ranks))}"
            assert str(error).startswith(f"{ranks} of {axis} failed")
        elif "disagree" in text:
            assert str(error).startswith(f"the ranks of {axis} disagree")
            assert str(error) == str(aftermaths[0].error)
        assert_same(next_step, expected)
