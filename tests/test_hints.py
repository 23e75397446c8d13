"""A first hour: mistakes that a step warns of, or whose errors say what to do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps

ADAMW = ps.optim.adamw(0.1)
SGD = ps.optim.sgd(0.1)
ONES = torch.ones(3)


def squares(w: Tensor, x: Tensor) -> Tensor:
    return (w - x) ** 2


def told(call: Callable[[], object]) -> str:
    """The text of an error, and its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


STEP: Any = ps.make_update_step(squares, ADAMW, weight_fn=torch.ones_like)
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "opt_state forgotten": (lambda: STEP(ONES, [ONES]), "perhaps opt_state is missing"),
    "params and opt_state swapped": (
        lambda: STEP(ADAMW.init(ONES), ONES, [ONES]),
        "params and opt_state are swapped",
    ),
    "loss_fn(microbatch, params)": (
        lambda: ps.make_update_step(
            lambda m, p: (p["w"] - m["x"]) ** 2, ADAMW, weight_fn=lambda m: ONES
        )({"w": ONES}, ADAMW.init({"w": ONES}), [{"x": ONES}]),
        "loss_fn(params, microbatch)",
    ),
    "a module as loss_fn": (
        lambda: ps.make_update_step(nn.Linear(3, 1), ADAMW),
        "ps.from_module(module)",
    ),
    "optax's update(grads, state)": (
        lambda: ADAMW.update(ONES, ADAMW.init(ONES)),  # type: ignore[call-arg]
        "update() missing 1 required positional argument: 'params'",
    ),
    "optax's update of a chain": (
        lambda: ps.optim.sgd(0.1, 0.9).update(ONES, SGD.init(ONES)),  # type: ignore[call-arg]
        "update() missing 1 required positional argument: 'params'",
    ),
    "logits that are not transposed": (
        lambda: ps.make_update_step(
            lambda w, m: functional.cross_entropy(
                m["z"] * w.sum(), m["labels"], reduction="none"
            ),
            SGD,
        )(
            ONES,
            SGD.init(ONES),
            [
                {
                    "z": torch.randn(4, 12, 50),
                    "labels": torch.zeros(4, 12, dtype=torch.int64),
                }
            ],
        ),
        "pass logits.mT",
    ),
    "float labels": (
        lambda: ps.losses.cross_entropy(torch.randn(2, 5), torch.tensor([2.7, 3.9])),
        "labels are torch.float32, but they are class numbers",
    ),
    "float labels of a large vocabulary": (
        lambda: ps.losses.linear_cross_entropy(
            ONES[None], torch.eye(3), torch.tensor([1.5])
        ),
        "labels are torch.float32, but they are class numbers",
    ),
    "an algorithm with a closure": (
        lambda: ps.optim.from_torch(torch.optim.LBFGS, lr=0.1),
        "LBFGS computes the loss again in each step",
    ),
    "an algorithm for sparse gradients": (
        lambda: ps.optim.from_torch(torch.optim.SparseAdam, lr=0.1),
        "a step makes them dense",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_say_what_to_do(name: str) -> None:
    call, words = MISTAKES[name]
    text = told(call)
    assert words in text
    assert "<locals>" not in text


def jagged(*lengths: int) -> Tensor:
    """A nested tensor of ones."""
    return torch.nested.nested_tensor(
        [torch.ones(n) for n in lengths], layout=torch.jagged
    )


def test_nested_losses_and_weights_are_refused() -> None:
    step = ps.make_update_step(
        lambda w, x: w * x, SGD, weight_fn=lambda x: torch.ones(4)
    )
    w = torch.ones(())
    assert "losses are a nested" in told(lambda: step(w, SGD.init(w), [jagged(1, 3)]))
    step = ps.make_update_step(
        lambda w, x: w * x.values(), SGD, weight_fn=torch.ones_like
    )
    assert "weights are a nested" in told(lambda: step(w, SGD.init(w), [jagged(1, 3)]))


WORDS = "microbatch['labels'] equals microbatch['inpu"
TOKENS = torch.arange(8).view(2, 4)
SHIFTED = ps.shift_labels(TOKENS)


def first_update(microbatch: Any, **how: Any) -> None:
    """A step over this microbatch alone."""
    step = ps.make_update_step(lambda w, m: w * m["labels"], SGD, **how)
    w = torch.ones(())
    for _ in range(2):
        step(w, SGD.init(w), [microbatch])


def test_labels_that_were_never_shifted_are_warned_of_once() -> None:
    masked = torch.where(TOKENS % 3 == 0, -100, TOKENS)
    for labels in (TOKENS.clone(), masked):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            first_update({"input_ids": TOKENS, "labels": labels})
        assert [str(w.message)[:44] for w in said] == [WORDS]
    for labels in (SHIFTED, torch.full_like(TOKENS, -100), 9 - TOKENS):
        first_update({"input_ids": TOKENS, "labels": labels})
    # What is counted by a function of the user's is theirs, and a row of numbers is no text.
    first_update(
        {"input_ids": TOKENS, "labels": TOKENS}, weight_fn=lambda m: m["labels"] > 0
    )
    first_update({"x": TOKENS[0], "labels": TOKENS[0]})


def test_an_evaluation_that_draws_is_warned_of_once() -> None:
    params, apply = ps.from_module(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    for function, number in ((apply, 1), (apply.eval, 0)):

        def loss_fn(p: Any, x: Tensor, function: Any = function) -> Tensor:
            return function(p, x).sum(-1)

        evaluate = ps.make_eval_step(loss_fn, weight_fn=lambda x: torch.ones(len(x)))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                evaluate(params, [torch.ones(2, 3)])
        assert len(said) == number


def test_a_penalty_over_a_modules_own_parameters_is_warned_of_once() -> None:
    """It is a constant beside what ``apply`` computes; frozen ones are meant to be."""
    module = nn.Linear(3, 1)
    params, apply = ps.from_module(module)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        penalty = torch.stack([q.square().sum() for q in module.parameters()]).sum()
        return apply(p, x).squeeze(-1) ** 2 + penalty

    step = ps.make_update_step(loss_fn, SGD, weight_fn=lambda x: torch.ones(len(x)))
    with pytest.warns(UserWarning, match="parameters of a module beside params"):
        step(params, SGD.init(params), [torch.ones(2, 3)])
    step(params, SGD.init(params), [torch.ones(2, 3)])
    module.requires_grad_(False)
    step = ps.make_update_step(loss_fn, SGD, weight_fn=lambda x: torch.ones(len(x)))
    step(params, SGD.init(params), [torch.ones(2, 3)])


@pytest.mark.parametrize("stale", ["params", "opt_state"])
def test_a_donated_tree_is_refused_when_it_is_used_again(stale: str) -> None:
    """JAX raises, too. Of torch's tensors it would silently be the newest."""
    step: Any = ps.make_update_step(
        squares, ADAMW, weight_fn=torch.ones_like, donate=True
    )
    keeping: Any = ps.make_update_step(squares, ADAMW, weight_fn=torch.ones_like)
    params = [torch.zeros(3), torch.zeros(2)]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return params[0] * x + params[1].sum()

    step, keeping = (
        ps.make_update_step(loss_fn, ADAMW, weight_fn=torch.ones_like, donate=donate)
        for donate in (True, False)
    )
    first = params, ADAMW.init(params)
    second = step(*first, [ONES])[:2]
    third = step(*second, [ONES])[:2]
    old = (second[0], third[1]) if stale == "params" else (third[0], second[1])
    for again in (step, keeping):
        with pytest.raises(
            ValueError, match=rf"^{stale} was donated to an earlier step"
        ):
            again(*old, [ONES])
    if stale == "params":
        with pytest.raises(ValueError, match=r"^params was donated"):
            ps.make_eval_step(loss_fn, weight_fn=torch.ones_like)(second[0], [ONES])
    step(*third, [ONES])


def test_a_step_that_fails_has_consumed_nothing() -> None:
    step: Any = ps.make_update_step(
        squares, ADAMW, weight_fn=torch.ones_like, donate=True
    )
    w = torch.zeros(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="opt_state was not made by optimizer"):
            step(w, SGD.init(w), [ONES])
    step(w, ADAMW.init(w), [ONES])


def test_an_evaluation_becomes_one_graph(fresh_compiler: None) -> None:
    """What a trace cannot ask, marks of donation and generators, is not asked there."""
    evaluate = ps.make_eval_step(squares, weight_fn=torch.ones_like)
    compiled = ps.compile(evaluate, fullgraph=True, backend="eager")
    group = [ONES, 2 * ONES]
    assert torch.equal(compiled(ONES, group).loss, evaluate(ONES, group).loss)


def test_a_donated_tree_keeps_its_memory() -> None:
    step = ps.make_update_step(squares, ADAMW, weight_fn=torch.ones_like, donate=True)
    w = torch.zeros(3)
    state = ADAMW.init(w)
    places = [leaf.data_ptr() for leaf in (w, *state)]
    new, new_state, _ = step(w, state, [ONES])
    assert [leaf.data_ptr() for leaf in (new, *new_state)] == places


def test_torch_loads_what_it_saved(tmp_path: Any) -> None:
    """With ``weights_only=True``, its default."""
    optimizer = ps.optim.ema(ps.optim.master_weights(ps.optim.adamw(0.1)), 0.5)
    state = optimizer.init(ONES)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert type(loaded) is type(state)
    assert torch.equal(loaded.inner.inner.mu, state.inner.inner.mu)


def test_a_state_of_many_members_has_the_strides_of_a_step() -> None:
    """Else an entire step that is compiled is compiled again at the second call."""
    w = torch.zeros(4, 3)
    state = torch.vmap(ADAMW.init)(w)
    step = torch.vmap(STEP, in_dims=(0, 0, None))
    assert state.step.stride() == step(w, state, [ONES])[1].step.stride() == (1,)


def test_a_default_device_of_the_caller_changes_nothing() -> None:
    with torch.device("meta"):
        new, _, metrics = STEP(ONES, ADAMW.init(ONES), [2 * ONES, ONES])
        unmoved, _, none = STEP(ONES, ADAMW.init(ONES), [])
    assert torch.equal(new, STEP(ONES, ADAMW.init(ONES), [2 * ONES, ONES])[0])
    assert torch.equal(unmoved, ONES)
    assert (metrics.num_tokens, none.num_tokens) == (6, 0)
