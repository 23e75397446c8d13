"""Tests what a step warns of in a first hour, and mistakes whose errors say what to do."""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep.testing import ThreadAxis
from support.strategies import assert_same

ADAMW = ps.optim.adamw(0.1)
SGD = ps.optim.sgd(0.1)
ONES = torch.ones(3)


def squares(w: Tensor, x: Tensor) -> Tensor:
    return (w - x) ** 2


def error_text(call: Callable[[], object]) -> str:
    """Returns the text of an error, and its notes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    notes = getattr(caught.value, "__notes__", [])
    return "\n".join([str(caught.value), *notes])


STEP: Any = ps.make_update_step(squares, ADAMW, weight_fn=torch.ones_like)


def step_with_microbatch_first() -> None:
    def loss_fn(m: Any, p: Any) -> Tensor:
        return (p["w"] - m["x"]) ** 2

    params = {"w": ONES}
    step = ps.make_update_step(loss_fn, ADAMW, weight_fn=lambda m: ONES)
    state = ADAMW.init(params)
    step(params, state, [{"x": ONES}])


def step_with_untransposed_logits() -> None:
    def loss_fn(w: Tensor, m: Any) -> Tensor:
        logits = m["z"] * w.sum()
        return functional.cross_entropy(logits, m["labels"], reduction="none")

    microbatch = {
        "z": torch.randn(4, 12, 50),
        "labels": torch.zeros(4, 12, dtype=torch.int64),
    }
    step = ps.make_update_step(loss_fn, SGD)
    state = SGD.init(ONES)
    step(ONES, state, [microbatch])


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "opt_state forgotten": (
        lambda: STEP(ONES, [ONES]),
        "perhaps opt_state is missing",
    ),
    "params and opt_state swapped": (
        lambda: STEP(ADAMW.init(ONES), ONES, [ONES]),
        "params and opt_state are swapped",
    ),
    "loss_fn(microbatch, params)": (
        step_with_microbatch_first,
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
        step_with_untransposed_logits,
        "pass logits.mT",
    ),
    "float labels": (
        lambda: ps.losses.cross_entropy(
            torch.randn(2, 5),
            torch.tensor([2.7, 3.9]),
        ),
        "labels are torch.float32, but they are class numbers",
    ),
    "float labels of a large vocabulary": (
        lambda: ps.losses.linear_cross_entropy(
            ONES[None],
            torch.eye(3),
            torch.tensor([1.5]),
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
    text = error_text(call)
    assert words in text
    assert "<locals>" not in text


def jagged(*lengths: int) -> Tensor:
    """Makes a nested tensor of ones."""
    parts = [torch.ones(length) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def test_nested_losses_and_weights_are_refused() -> None:
    w = torch.ones(())

    def refusal(loss_fn: Any, weight_fn: Any) -> str:
        step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
        state = SGD.init(w)
        group = [jagged(1, 3)]
        return error_text(lambda: step(w, state, group))

    def nested_losses(w: Tensor, x: Tensor) -> Tensor:
        return w * x

    def flat_losses(w: Tensor, x: Tensor) -> Tensor:
        return w * x.values()

    def flat_weights(x: Tensor) -> Tensor:
        return torch.ones(4)

    assert "losses are a nested" in refusal(nested_losses, flat_weights)
    assert "weights are a nested" in refusal(flat_losses, torch.ones_like)


UNSHIFTED = "microbatch['labels'] equals microbatch['inpu"
TOKENS = torch.arange(8).view(2, 4)


def warnings_of(run: Callable[..., object], *args: Any) -> list[str]:
    """Calls the function, and returns the texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args)
    return [str(warning.message) for warning in caught]


def step_twice(microbatch: Any, **settings: Any) -> None:
    """Takes a step over this microbatch alone, and takes it again."""

    def loss_fn(w: Tensor, m: Any) -> Tensor:
        return w * m["labels"]

    step = ps.make_update_step(loss_fn, SGD, **settings)
    w = torch.ones(())
    state = SGD.init(w)
    for _ in range(2):
        step(w, state, [microbatch])


def test_labels_that_were_never_shifted_are_warned_of_once() -> None:
    masked = torch.where(TOKENS % 3 == 0, -100, TOKENS)
    for labels in (TOKENS.clone(), masked):
        microbatch = {"input_ids": TOKENS, "labels": labels}
        texts = warnings_of(step_twice, microbatch)
        assert [text[:44] for text in texts] == [UNSHIFTED]

    shifted = ps.shift_labels(TOKENS)
    ignored = torch.full_like(TOKENS, -100)
    for labels in (shifted, ignored, 9 - TOKENS):
        step_twice({"input_ids": TOKENS, "labels": labels})
    # A weight_fn of the user's decides what counts, and a row of numbers is no text.
    unshifted = {"input_ids": TOKENS, "labels": TOKENS}
    step_twice(unshifted, weight_fn=lambda m: m["labels"] > 0)
    step_twice({"x": TOKENS[0], "labels": TOKENS[0]})
    # An autoencoder's labels are its inputs.
    pixels = TOKENS.double()
    step_twice({"x": pixels, "labels": pixels})


def one_weight_each(x: Tensor) -> Tensor:
    return torch.ones(len(x))


def test_an_evaluation_that_draws_is_warned_of_once() -> None:
    module = nn.Sequential(
        nn.Linear(3, 3),
        nn.Dropout(0.5),
    )
    params, apply = ps.from_module(module)

    def evaluate_twice(function: Any) -> None:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            return function(p, x).sum(-1)

        evaluate = ps.make_eval_step(loss_fn, weight_fn=one_weight_each)
        for _ in range(2):
            evaluate(params, [torch.ones(2, 3)])

    assert len(warnings_of(evaluate_twice, apply)) == 1
    assert len(warnings_of(evaluate_twice, apply.eval)) == 0


def test_a_penalty_over_a_modules_own_parameters_is_warned_of_once() -> None:
    """Warns: it is a constant to the step, other than in ``apply``; frozen ones are meant to be."""
    module = nn.Linear(3, 1)
    params, apply = ps.from_module(module)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        squares = [q.square().sum() for q in module.parameters()]
        penalty = torch.stack(squares).sum()
        return apply(p, x).squeeze(-1) ** 2 + penalty

    state = SGD.init(params)
    group = [torch.ones(2, 3)]
    step = ps.make_update_step(loss_fn, SGD, weight_fn=one_weight_each)
    with pytest.warns(UserWarning, match="parameters of a module beside params"):
        step(params, state, group)
    step(params, state, group)

    module.requires_grad_(False)
    step = ps.make_update_step(loss_fn, SGD, weight_fn=one_weight_each)
    step(params, state, group)


@pytest.mark.parametrize("stale", ["params", "opt_state"])
def test_a_donated_tree_is_refused_when_it_is_used_again(stale: str) -> None:
    """Raises, as JAX does: torch's tensors would silently hold the newest values."""
    params = [torch.zeros(3), torch.zeros(2)]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return params[0] * x + params[1].sum()

    def make_step(donate: bool) -> Any:
        return ps.make_update_step(
            loss_fn, ADAMW, weight_fn=torch.ones_like, donate=donate
        )

    donating = make_step(donate=True)
    copying = make_step(donate=False)
    state = ADAMW.init(params)
    second, second_state, _ = donating(params, state, [ONES])
    third, third_state, _ = donating(second, second_state, [ONES])

    used_again = (third, second_state)
    if stale == "params":
        used_again = (second, third_state)
    message = rf"^{stale} was donated to an earlier step"
    for step in (donating, copying):
        with pytest.raises(ValueError, match=message):
            step(*used_again, [ONES])
    if stale == "params":
        evaluate = ps.make_eval_step(loss_fn, weight_fn=torch.ones_like)
        with pytest.raises(ValueError, match=r"^params was donated"):
            evaluate(second, [ONES])
    donating(third, third_state, [ONES])


def donating_step() -> Any:
    return ps.make_update_step(squares, ADAMW, weight_fn=torch.ones_like, donate=True)


def test_a_step_that_fails_has_consumed_nothing() -> None:
    step = donating_step()
    w = torch.zeros(3)
    state = ADAMW.init(w)
    state_of_other = SGD.init(w)
    for _ in range(2):
        with pytest.raises(ValueError, match="opt_state was not made by optimizer"):
            step(w, state_of_other, [ONES])
    step(w, state, [ONES])


def test_an_evaluation_becomes_one_graph(fresh_compiler: None) -> None:
    """Skips in a trace what it cannot check there: marks of donation, and generators."""
    evaluate = ps.make_eval_step(squares, weight_fn=torch.ones_like)
    compiled = ps.compile(evaluate, fullgraph=True, backend="eager")
    group = [ONES, 2 * ONES]
    expected = evaluate(ONES, group).loss
    assert torch.equal(compiled(ONES, group).loss, expected)


def test_a_donated_tree_keeps_its_memory() -> None:
    step = donating_step()
    w = torch.zeros(3)
    state = ADAMW.init(w)
    before = [leaf.data_ptr() for leaf in (w, *state)]
    new, new_state, _ = step(w, state, [ONES])
    after = [leaf.data_ptr() for leaf in (new, *new_state)]
    assert after == before


def test_torch_loads_what_it_saved(tmp_path: Any) -> None:
    """Loads with ``weights_only=True``, torch's default."""
    master_weights = ps.optim.master_weights(ps.optim.adamw(0.1))
    optimizer = ps.optim.ema(master_weights, 0.5)
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
    _, new_state, _ = step(w, state, [ONES])
    assert state.step.stride() == new_state.step.stride() == (1,)


def test_a_default_device_of_the_caller_changes_nothing() -> None:
    state = ADAMW.init(ONES)
    group = [2 * ONES, ONES]
    expected, _, _ = STEP(ONES, state, group)
    with torch.device("meta"):
        new, _, metrics = STEP(ONES, ADAMW.init(ONES), group)
        unmoved, _, of_nothing = STEP(ONES, ADAMW.init(ONES), [])
    assert torch.equal(new, expected)
    assert torch.equal(unmoved, ONES)
    assert metrics.num_tokens == 6
    assert of_nothing.num_tokens == 0


def step_of_torchs_optimizer() -> Any:
    # AdamW of torch 2.11 itself makes its count on the default device.
    sgd = ps.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = ps.make_update_step(squares, sgd, weight_fn=torch.ones_like)
    new, *_ = step(ONES.clone(), sgd.init(ONES), [2 * ONES])
    return new


def step_of_shards() -> Any:
    axis = ThreadAxis(2)
    settings: Any = {"axis": axis, "gather": "microbatch", "weight_fn": torch.ones_like}
    step = ps.make_update_step(squares, ADAMW, **settings)

    def take_step(rank: int, device: torch.device | None) -> Any:
        # Another thread has no default device.
        with device or contextlib.nullcontext():
            shards = ps.shard(ONES, axis)
            new, *_ = step(shards, ADAMW.init(shards), [2 * ONES] * (1 + rank))
            return ps.unshard(new)

    device = torch.get_default_device()
    devices = [device if device.type == "meta" else None] * 2
    return axis.map(take_step)(range(2), devices)


def pack_rows() -> Any:
    examples = [{"tokens": text, "labels": text} for text in TEXTS]
    rows = ps.pack(examples, max_tokens=6)
    return rows, ps.pack_documents(examples, row_tokens=6)


def load_file(tmp_path: Path) -> Any:
    file = tmp_path / "params.safetensors"
    ps.checkpoint.export_safetensors(file, {"w": ONES})
    return ps.checkpoint.load_safetensors(file, like={"w": ONES})


TEXTS = [torch.arange(n) for n in (3, 5, 2)]


@pytest.mark.parametrize(
    "call", [step_of_torchs_optimizer, step_of_shards, pack_rows, load_file]
)
def test_what_is_on_the_host_stays_there(call: Any, tmp_path: Path) -> None:
    """Computes the same where the caller has set another default device."""
    call = partial(call, tmp_path) if call is load_file else call
    expected = call()
    with torch.device("meta"):
        actual = call()
    assert_same(actual, expected)
