"""A sound step of four uneven ranks, and what can go wrong in it.

All numbers are integers in float64 and every N is a power of two, so nothing is ever rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor

import purestep as ps
from purestep import tree

Arguments = dict[str, Any]
Batch = dict[str, Tensor]

SGD = ps.optim.sgd(0.5, momentum=0.5)
SHARE = [[2, 3], [], [1, 1, 2], [7]]
"""How many tokens each microbatch of each rank has: uneven, and one rank with none."""
BAD = 2
"""The rank that goes wrong."""


def params() -> dict[str, Tensor]:
    """Integers, in two leaves."""
    return {"b": torch.tensor(1.0).double(), "w": torch.tensor([1.0, -2.0, 3.0]).double()}


def batch(size: int = 16, seed: int = 0) -> Batch:
    """Integers, without a random generator, which a transform would refuse."""
    count = torch.arange(size * 4).view(size, 4) + 5 * seed
    numbers = ((count * count * 3 + count) % 11 % 7 - 3).double()
    return {"x": numbers[:, :3], "y": numbers[:, 3]}


def cut(whole: Batch, share: Sequence[Sequence[int]] = SHARE) -> list[list[Batch]]:
    """The microbatches of each rank."""
    sizes = [size for rank in share for size in rank]
    parts = (
        dict(zip(whole, part, strict=True))
        for part in zip(*(value.split(sizes) for value in whole.values()), strict=True)
    )
    return [list(itertools.islice(parts, len(rank))) for rank in share]


def loss_fn(params: Any, microbatch: Batch) -> Tensor:
    """(xᵀw + b − y)², for each token."""
    return (microbatch["x"] @ params["w"] + params["b"] - microbatch["y"]).square()


def loss_with_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """The same, with its sum and how many are small."""
    losses = loss_fn(params, microbatch)
    return ps.LossTerms(losses, aux={"small": (losses < 5).sum(), "sum": losses.sum()})


def ones(microbatch: Batch) -> Tensor:
    """Every token weighs the same."""
    return torch.ones(len(microbatch["y"]), dtype=torch.int64)


def sound(rank: int) -> Arguments:
    """A step of four uneven ranks."""
    return {
        "loss_fn": loss_with_aux,
        "optimizer": SGD,
        "weight_fn": ones,
        "params": params(),
        "opt_state": SGD.init(params()),
        "microbatches": cut(batch())[rank],
    }


def step(axis: ps.Axis, arguments: Arguments) -> Any:
    """One step with these arguments; with ``gather``, of the state in pieces."""
    settings = dict(arguments)
    *state, group = [settings.pop(name) for name in ("params", "opt_state", "microbatches")]
    if "gather" not in settings:
        params, opt_state = state
        return ps.make_update_step(**settings, axis=axis)(params, opt_state, group)
    params, opt_state = ps.shard(state, axis)
    *new, metrics = ps.make_update_step(**settings, axis=axis)(params, opt_state, group)
    return *ps.unshard(tuple(new)), metrics


def alone() -> Any:
    """The sound step of one rank that holds the whole batch as one microbatch."""
    new_params, opt_state, metrics = step(ps.LocalAxis(), {**sound(0), "microbatches": [batch()]})
    count = sum(map(len, SHARE))
    return new_params, opt_state, metrics._replace(num_microbatches=torch.tensor(count))


def same(one: Any, other: Any) -> bool:
    """Whether two trees agree in structure, dtypes and every bit."""
    leaves, structure = tree.flatten(one)
    others, other_structure = tree.flatten(other)
    return structure == other_structure and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(leaves, others, strict=True)
    )


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
    name = kind.__name__ if kind.__module__ == "builtins" else f"{__name__}.{kind.__name__}"
    told = f"failed, and the step with it on every rank; nothing was updated. rank 2: {name}: "
    return Fault(change, (kind, text), (ps.RankError, told + (heard or text)))


def setting(name: str, right: str, wrong: str, **settings: Any) -> Fault:
    """Another setting of the step."""
    right, wrong = (f"settings[{name!r}]: {value!r}" for value in (right, wrong))
    return disagreement("settings", right, wrong, lambda _: settings)


class Killed(BaseException):
    """No ``Exception``, as torch's ``CheckpointException`` is none."""


def raising(
    function: Callable[..., Any], at: int, kind: type[BaseException] = ArithmeticError
) -> Callable[..., Any]:
    """The function, which raises at this call."""
    calls = itertools.count()

    def raises(*args: Any) -> Any:
        if next(calls) == at:
            raise kind("θ ≠ θ")
        return function(*args)

    return raises


def unreadable(*_: Any) -> Tensor:
    """A file's name need not be text."""
    raise OSError("no file caf\udce9")


def shared() -> Arguments:
    """Two leaves in one piece of memory."""
    w = params()["w"]
    return of_params(b=w[0], w=w)({})


class _BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, kind: type[BaseException]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.kind("no way back")


def broken_backward(
    params: Any, microbatch: Batch, kind: type[BaseException] = ArithmeticError
) -> ps.LossTerms:
    """The gradient of w is found, and may be on its way already, when that of b raises."""
    broken: Tensor = _BrokenBackward.apply(params["b"], kind)
    return loss_with_aux({"w": params["w"], "b": broken}, microbatch)


def interrupted_backward(params: Any, microbatch: Batch) -> ps.LossTerms:
    """The same, where somebody has had enough."""
    return broken_backward(params, microbatch, KeyboardInterrupt)


class Tail(list[Batch]):
    """Microbatches whose end raises: their gradients may be on their way already."""

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        raise ArithmeticError("θ ≠ θ")


class Opaque:
    """A container that does not tell what it holds."""


def _untold(_: Opaque) -> NoReturn:
    raise ArithmeticError("θ ≠ θ")


register: Any = optree.register_pytree_node
register(Opaque, _untold, lambda *_: Opaque(), namespace=tree.NAMESPACE)


class Unruly(Tensor):
    """A tensor that cannot be packed with others."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.reshape:
            raise ArithmeticError("θ ≠ θ")
        return super().__torch_function__(func, types, args, kwargs)


def unruly_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """An aux of the same kind, of a class that raises where it is packed."""
    terms = loss_with_aux(params, microbatch)
    return terms._replace(aux={**terms.aux, "sum": terms.aux["sum"].detach().as_subclass(Unruly)})


class Indescribable:
    """What stands beside leaves, and cannot be told."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt("θ ≠ θ")

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Labelled:
    """A container with something beside its leaf."""

    def __init__(self, value: Any) -> None:
        self.value = value


register(
    Labelled, lambda x: ((x.value,), Indescribable(), None), lambda _, x: Labelled(x[0]),
    namespace=tree.NAMESPACE,
)  # fmt: skip


def indescribable_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """An aux that is added up, and raises where it is described."""
    terms = loss_with_aux(params, microbatch)
    return terms._replace(aux=Labelled(terms.aux))


def hooked(params: Any, microbatch: Batch) -> ps.LossTerms:
    """A hook that raises in the backward pass, where there is one."""

    def raises(grad: Tensor) -> NoReturn:
        raise ArithmeticError("θ ≠ θ")

    if params["w"].requires_grad:
        params["w"].register_hook(raises)
    return loss_with_aux(params, microbatch)


class Large(Tensor):
    """Params for whose gradients there is no memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.new_empty:
            raise MemoryError("θ ≠ θ")
        return super().__torch_function__(func, types, args, kwargs)


def without_aux(params: Any, microbatch: Batch) -> ps.LossTerms:
    """Another structure of aux."""
    return ps.LossTerms(loss_fn(params, microbatch))


def aux_as(dtype: torch.dtype, *shape: int) -> Callable[..., ps.LossTerms]:
    """Another kind of aux."""

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        terms = loss_with_aux(params, microbatch)
        return terms._replace(aux={**terms.aux, "sum": torch.zeros(shape, dtype=dtype)})

    return loss


def of_float_losses(params: Any, microbatch: Batch) -> ps.LossTerms:
    """Another dtype of the losses."""
    terms = loss_with_aux(params, microbatch)
    return terms._replace(tokens=terms.tokens.float())


def of_params(**leaves: Tensor) -> Callable[[Arguments], Arguments]:
    """Other params, and the state that belongs to them."""
    other = {**params(), **leaves}
    return lambda _: {"params": other, "opt_state": SGD.init(other)}


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
    """What a rank is left with after a fault: the error, its state as it was, and that it can go on."""

    axis: str
    error: BaseException | None
    untouched: bool
    next_step: Any


def faulty_step(axis: ps.Axis, rank: int, name: str, how: Arguments) -> Aftermath:
    """A step in which some ranks go wrong, and then a sound one."""
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
    return Aftermath(repr(axis), error, same(leaves, before), step(axis, {**sound(rank), **how}))


def check_fault(name: str, aftermaths: Sequence[Aftermath]) -> None:
    """Every rank heard of it, and nothing has happened."""
    fault, expected = FAULTS[name], alone()
    for rank, (axis, error, untouched, next_step) in enumerate(aftermaths):
        kind, text = fault.own if rank in fault.ranks else fault.others
        assert type(error) is kind
        assert text in str(error)
        if kind is ps.RankError:
            ranks = f"rank{'s' * (len(fault.ranks) > 1)} {', '.join(map(str, fault.ranks))}"
            assert str(error).startswith(f"{ranks} of {axis} failed")
        elif "disagree" in text:
            assert str(error).startswith(f"the ranks of {axis} disagree")
            assert str(error) == str(aftermaths[0].error)
        assert untouched
        assert same(next_step, expected)


COMPUTED = [
    "first loss", "backward", "interrupted loss", "interrupted backward", "no Exception",
    "aux structure", "aux dtype", "aux shape", "loss dtype", "aux that cannot be described",
]  # fmt: skip
"""Faults that show only when losses and gradients are computed."""
