"""What can go wrong in a step of four uneven ranks, and what every rank must hear of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.broken import (
    Killed,
    Labelled,
    Large,
    Opaque,
    Tail,
    aux_as,
    broken_backward,
    hooked,
    indescribable_aux,
    interrupted_backward,
    of_float_losses,
    raising,
    unreadable,
    unruly_aux,
    without_aux,
)
from tests.uneven import BAD, SGD, Arguments, alone, batch, loss_fn, ones, params, sound, step


class Fault(NamedTuple):
    """What some ranks do differently, and which errors they and the others get."""

    change: Callable[[Arguments], Arguments]
    own: tuple[type[BaseException], str]
    others: tuple[type[BaseException], str]
    ranks: tuple[int, ...] = (BAD,)


def disagreement(name: str, right: str, wrong: str, change: Callable[..., Arguments]) -> Fault:
    """Every rank gets one and the same error."""
    ranks = "ranks 0, 3" if name in ("LossTerms.aux", "the loss") else "ranks 0, 1, 3"
    text = f"disagree on {name}, and nothing was updated: {ranks} with {right} against rank 2 with {wrong}"
    return Fault(change, (ValueError, text), (ValueError, text))


def failure(
    kind: type[BaseException], text: str, change: Callable[..., Arguments], heard: str | None = None
) -> Fault:
    """The rank that fails gets its own exception, and the others hear of it."""
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    told = f"failed, and the step with it on every rank; nothing was updated. rank 2: {name}: "
    return Fault(change, (kind, text), (ps.RankError, told + (heard or text)))


def setting(name: str, right: str, wrong: str, **settings: Any) -> Fault:
    """Another setting of the step."""
    right, wrong = (f"settings[{name!r}]: {value!r}" for value in (right, wrong))
    return disagreement("settings", right, wrong, lambda _: settings)


def of_params(**leaves: Tensor) -> Callable[[Arguments], Arguments]:
    """Other params, and the state that belongs to them."""
    other = {**params(), **leaves}
    return lambda _: {"params": other, "opt_state": SGD.init(other)}


def shared() -> Arguments:
    """Two leaves in one piece of memory."""
    w = params()["w"]
    return of_params(b=w[0], w=w)({})


PLAIN = ps.optim.sgd(0.5)
FAULTS = {
    "structure": disagreement(
        "params", "the structure {'b': *, 'w': *}", "params['c']: torch.float64 of shape ()",
        of_params(c=torch.tensor(0.0).double()),
    ),
    "dtype": disagreement(
        "params", "params['b']: torch.float64 of shape ()", "params['b']: torch.float32 of shape ()",
        of_params(b=torch.tensor(1.0)),
    ),
    "shape": disagreement(
        "params", "params['w']: torch.float64 of shape (3,)",
        "params['w']: torch.float64 of shape (3, 1)", of_params(w=torch.ones(3, 1).double()),
    ),
    "opt_state": disagreement(
        "opt_state",
        "opt_state[0].trace['b']: torch.float64 of shape (), "
        "opt_state[0].trace['w']: torch.float64 of shape (3,), opt_state[1].step: torch.int64 of shape ()",
        "opt_state[0].step: torch.int64 of shape ()",
        lambda a: {"optimizer": PLAIN, "opt_state": PLAIN.init(a["params"])},
    ),
    "normalize": setting("normalize", "loss", "grads", normalize="grads"),
    "accum_dtype": setting("accum_dtype", "None", "torch.float32", accum_dtype=torch.float32),
    "on_nonfinite": setting("on_nonfinite", "propagate", "skip", on_nonfinite="skip"),
    "first loss": failure(
        ArithmeticError, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 0)}
    ),
    "last loss": failure(
        ArithmeticError, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 2)}
    ),
    "backward": failure(ArithmeticError, "no way back", lambda _: {"loss_fn": broken_backward}),
    "interrupted weights": failure(
        KeyboardInterrupt, "θ ≠ θ",
        lambda _: {"weight_fn": raising(ones, 1, KeyboardInterrupt)},
    ),
    "interrupted loss": failure(
        KeyboardInterrupt, "θ ≠ θ",
        lambda a: {"loss_fn": raising(a["loss_fn"], 0, KeyboardInterrupt)},
    ),
    "interrupted backward": failure(
        KeyboardInterrupt, "no way back", lambda _: {"loss_fn": interrupted_backward}
    ),
    "exit": failure(
        SystemExit, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 1, SystemExit)}
    ),
    "no Exception": failure(
        Killed, "θ ≠ θ", lambda a: {"loss_fn": raising(a["loss_fn"], 0, Killed)}
    ),
    "after the last microbatch": failure(
        ArithmeticError, "θ ≠ θ", lambda a: {"microbatches": Tail(a["microbatches"])}
    ),
    "opt_state that raises": failure(
        ArithmeticError, "θ ≠ θ", lambda _: {"opt_state": Opaque()}
    ),
    "aux that raises": failure(ArithmeticError, "θ ≠ θ", lambda _: {"loss_fn": unruly_aux}),
    "aux that cannot be described": failure(
        KeyboardInterrupt, "θ ≠ θ", lambda _: {"loss_fn": indescribable_aux}
    ),
    "params that cannot be described": failure(
        KeyboardInterrupt, "θ ≠ θ", lambda a: {"opt_state": Labelled(a["opt_state"])}
    ),
    "a hook": failure(ArithmeticError, "θ ≠ θ", lambda _: {"loss_fn": hooked}),
    "no memory for gradients": failure(
        MemoryError, "θ ≠ θ",
        lambda a: {"params": {**a["params"], "w": a["params"]["w"].as_subclass(Large)}},
    ),
    "weights": failure(ArithmeticError, "θ ≠ θ", lambda _: {"weight_fn": raising(ones, 1)}),
    "negative weights": failure(
        ValueError, "weights must be finite and not negative, but one is -1",
        lambda _: {"weight_fn": lambda m: -ones(m)},
    ),
    "mean loss": failure(
        ValueError, "losses of shape () against weights of shape (1,)",
        lambda _: {"loss_fn": lambda p, m: loss_fn(p, m).mean()},
    ),
    "no sequence": failure(
        TypeError, "microbatches must be a sequence of microbatches, got dict",
        lambda _: {"microbatches": batch()},
    ),
    "a message that is no text": failure(
        OSError, "no file caf\udce9", lambda _: {"loss_fn": unreadable}, heard=r"no file caf\udce9"
    ),
    "a buffer given twice": failure(
        ValueError, "donate=True needs a buffer for each leaf", lambda _: {"donate": True, **shared()}
    ),
    "no params": failure(
        ValueError, "params holds no tensors", lambda _: {"params": {}}
    ),
    "aux structure": disagreement(
        "LossTerms.aux",
        "LossTerms.aux['small']: torch.int64 of shape (), LossTerms.aux['sum']: torch.float64 of shape ()",
        "the structure ()", lambda _: {"loss_fn": without_aux},
    ),
    "aux dtype": disagreement(
        "LossTerms.aux", "LossTerms.aux['sum']: torch.float64 of shape ()",
        "LossTerms.aux['sum']: torch.float32 of shape ()",
        lambda _: {"loss_fn": aux_as(torch.float32)},
    ),
    "aux shape": disagreement(
        "LossTerms.aux", "LossTerms.aux['sum']: torch.float64 of shape ()",
        "LossTerms.aux['sum']: torch.float64 of shape (2,)",
        lambda _: {"loss_fn": aux_as(torch.float64, 2)},
    ),
    "loss dtype": disagreement(
        "the loss", "the loss: 'torch.float64'", "the loss: 'torch.float32'",
        lambda _: {"loss_fn": of_float_losses},
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


class Aftermath(NamedTuple):
    """What a rank is left with after a fault: the error, and that it can go on."""

    axis: str
    error: BaseException | None
    next_step: Any


def faulty_step(axis: ps.Axis, rank: int, name: str, how: Arguments) -> Aftermath:
    """A step in which some ranks go wrong, which leaves the state as it was, and then a sound one."""
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


COMPUTED = [
    "first loss", "backward", "interrupted loss", "interrupted backward", "no Exception",
    "aux structure", "aux dtype", "aux shape", "loss dtype", "aux that cannot be described",
]  # fmt: skip
"""Faults that show only when losses and gradients are computed."""
