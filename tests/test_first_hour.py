"""Mistakes of a first hour: each text says what is wrong, and how to go on."""

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import purestep as ps
from tests.line_problem import MICROBATCH, PARAMS, SGD, loss_fn, weight_fn

STATE = SGD.init(PARAMS)
STEP: Any = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
EXAMPLES = [{"x": torch.ones(1)}, {"x": torch.ones(2)}]
LOGITS: Any = SimpleNamespace(logits=torch.ones(1, 2))
HIDDEN: Any = SimpleNamespace(last_hidden_state=torch.ones(1, 2))
LABELS = torch.ones(1).long()
PS: Any = ps
ADAMW: Any = ps.optim.adamw(0.1)
RATIO: Any = 0.1
FRACTION: Any = 62.5
SCHEDULE = ps.optim.linear_schedule(0.0, 1.0, 4)


def step_on(loss: Any) -> Any:
    """Runs one update of a loss, or of its parts."""
    step = ps.make_update_step(loss, SGD, weight_fn=weight_fn)
    return step(PARAMS, STATE, [MICROBATCH])


def pass_a_loader() -> None:
    STEP(PARAMS, STATE, DataLoader(torch.ones(2)))  # type: ignore[arg-type]


def misspell_a_field() -> None:
    step_on(lambda p, m: p["w"] * m["tokens"])


def evaluate_with_a_state() -> None:
    evaluate: Any = ps.make_eval_step(loss_fn, weight_fn=weight_fn)
    evaluate(PARAMS, STATE, [MICROBATCH])


def swap_the_weight_function() -> None:
    wrong: Any = lambda p, m: weight_fn(m)  # noqa: E731
    ps.make_update_step(loss_fn, SGD, weight_fn=wrong)(PARAMS, STATE, [MICROBATCH])


def run_a_backward_pass_in_the_loss() -> None:
    def loss(p: Any, m: Any) -> Tensor:
        losses = loss_fn(p, m).square()
        losses.sum().backward()
        return losses

    step_on(loss)


def donate(keep: Callable[[Any], Any]) -> None:
    """Keeps the params of a step that donates them."""
    module = nn.Linear(1, 1)
    params, apply = ps.from_module(module)
    step = ps.make_update_step(
        lambda p, x: apply(p, x)[:, 0],
        SGD,
        weight_fn=lambda x: x[:, 0] > 0,
        donate=True,
    )
    step(params, SGD.init(params), [torch.ones(2, 1)])
    keep(params)


def step_with(**data: Tensor) -> None:
    """Runs one update on data of another kind than the params."""
    step_on_data = ps.make_update_step(
        lambda p, m: m["x"] @ p["w"], SGD, weight_fn=lambda m: torch.ones(2)
    )
    params = {"w": torch.ones(3)}
    step_on_data(params, SGD.init(params), [data])


def read_a_tied_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    params, _ = ps.from_module(model)
    step = ps.make_update_step(
        lambda p, m: m["x"] @ p["1.weight"], SGD, weight_fn=lambda m: m["x"][:, 0]
    )
    step(params, SGD.init(params), [{"x": torch.ones(2, 2)}])


def pad_labels_by_minus_one() -> None:
    logits, labels = torch.ones(2, 3), torch.tensor([-1, 0])
    step_on(lambda p, m: ps.losses.cross_entropy(logits * p["w"], labels))


def normalize_in_place() -> None:
    step_on(lambda p, m: p["w"].div_(2) * m["x"])


def classify(logits: Tensor, labels: Tensor) -> Tensor:
    return ps.losses.cross_entropy(logits, labels)


def average(losses: Any = loss_fn, **settings: Any) -> Any:
    """Runs one update with these settings of a step."""
    step = PS.make_update_step(losses, SGD, **settings)
    return step(PARAMS, STATE, [MICROBATCH])


def pass_a_batch_as_group(fails_in_loss: bool = False) -> None:
    """Takes a batch (x, y) of a loader for a group of two microbatches."""

    def loss(p: Any, m: Any) -> Tensor:
        x, y = m
        return p["w"] * x[:, 0] - y

    wrong: Any = lambda m: torch.ones(len(m[1]))  # noqa: E731
    step = ps.make_update_step(
        loss, SGD, weight_fn=torch.ones_like if fails_in_loss else wrong
    )
    step(PARAMS, STATE, (torch.ones(8, 5), torch.ones(8).long()))


def take_integer_params() -> None:
    w = torch.tensor([1, 2])
    step = ps.make_update_step(lambda w, m: w * 1.0, SGD, weight_fn=weight_fn)
    step(w, SGD.init(w), [MICROBATCH])


def update_by_hand(params: Tensor) -> None:
    SGD.update(params, SGD.init(params), params)


def decay(mask: Any, optimizer: Any = ps.optim.adamw) -> None:
    """Makes the state of an optimizer with this mask."""
    optimizer(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


def shard_after_init() -> None:
    axis = ps.testing.ThreadAxis(2)
    step = ps.make_update_step(loss_fn, ADAMW, weight_fn=weight_fn, axis=axis)
    params = {"w": torch.ones(2)}
    state = ADAMW.init(params)
    axis.map(lambda m: step(ps.shard(params, axis), state, [m]))([MICROBATCH] * 2)


def gather_in_no_loss(use: Callable[[Any], Tensor]) -> None:
    """Runs a loss that takes a shard for a tensor."""
    axis = ps.testing.ThreadAxis(2)
    step = ps.make_update_step(
        lambda p, m: use(p["w"]), SGD, weight_fn=weight_fn, axis=axis, gather="loss"
    )

    def update(m: Any) -> None:
        params = ps.shard({"w": torch.ones(2)}, axis)
        step(params, SGD.init(params), [m])

    axis.map(update)([MICROBATCH] * 2)


CASES: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "for microbatches in ps.group", pass_a_loader),
    (KeyError, r"this microbatch has \['x'", misspell_a_field),
    (TypeError, "it takes no opt_state", evaluate_with_a_state),
    (TypeError, r"called as weight_fn\(microbatch\)", swap_the_weight_function),
    (RuntimeError, "loss_fn calls .backward()", run_a_backward_pass_in_the_loss),
    (
        TypeError,
        "ps.losses return one loss per token",
        lambda: step_on(lambda p, m: PS.losses.mse(p["w"], m["x"], reduction="mean")),
    ),
    (
        RuntimeError,
        r"params are on cpu, but microbatch\['x'\] is on meta: .* ps.prefetch\(groups",
        lambda: step_with(x=torch.ones(2, 3, device="meta")),
    ),
    (
        RuntimeError,
        r"params are torch.float32, but microbatch\['x'\] is torch.float64: cast it",
        lambda: step_with(x=torch.ones(2, 3, dtype=torch.float64)),
    ),
    (
        KeyError,
        r"params has \['0.weight'\]; tied parameters have one leaf",
        read_a_tied_name,
    ),
    (IndexError, r"masked_fill\(labels == -1, -100\)", pad_labels_by_minus_one),
    (RuntimeError, r"\{\*\*params, name: tensor\}", normalize_in_place),
    (
        TypeError,
        r"optimizer takes no parameters: write .* optimizer.init\(params\)",
        lambda: PS.optim.adamw(nn.Linear(1, 1).parameters()),
    ),
    (
        TypeError,
        "optimizer takes no parameters",
        lambda: PS.optim.adamw([*nn.Linear(1, 1).parameters()]),
    ),
    (
        TypeError,
        "optimizer takes no parameters",
        lambda: PS.optim.adamw([*nn.Linear(1, 1).named_parameters()]),
    ),
    (TypeError, "takes no parameters", lambda: PS.optim.adamw(nn.Linear(1, 1))),
    (TypeError, "learning_rate= here$", lambda: PS.optim.adamw(0.1, lr=0.1)),
    (
        TypeError,
        r"learning_rate= here, and an optimizer takes no parameters",
        lambda: PS.optim.adamw(nn.Linear(1, 1).parameters(), lr=0.1),
    ),
    (AttributeError, "no 'step': ps.make_update_step", lambda: SGD.step()),
    (AttributeError, "has no 'steps'$", lambda: SGD.steps()),
    (TypeError, "lr= of torch.optim is learning_rate=", lambda: PS.optim.adamw(lr=0.1)),
    (
        TypeError,
        "logits must be a tensor, got SimpleNamespace: take its .logits",
        lambda: ps.losses.cross_entropy(LOGITS, LABELS),
    ),
    (
        TypeError,
        "logits must be a tensor, got SimpleNamespace: take its .logits",
        lambda: ps.losses.kl_divergence(LOGITS, torch.ones(1, 2)),
    ),
    (
        TypeError,
        "hidden must be a tensor, got SimpleNamespace: take its .last_hidden_state",
        lambda: ps.losses.linear_cross_entropy(HIDDEN, torch.ones(2, 2), LABELS),
    ),
    (
        TypeError,
        "teacher_hidden must be a tensor",
        lambda: ps.losses.linear_kl_divergence(
            torch.ones(1, 2), torch.ones(2, 2), HIDDEN, torch.ones(2, 2)
        ),
    ),
    (
        TypeError,
        r"got function: call make_backward\(model, loss_fn\)",
        lambda: PS.make_backward(loss_fn, nn.Linear(1, 1)),
    ),
    (
        ValueError,
        r"params\['bias'\] was donated",
        lambda: donate(lambda params: ps.to_module(params, nn.Linear(1, 1))),
    ),
    (ValueError, "was donated to an earlier step", lambda: donate(ps.state_dict)),
    (TypeError, "swapped", lambda: PS.checkpoint.save(PARAMS, "path")),
    (TypeError, "swapped", lambda: PS.to_module(nn.Linear(1, 1), PARAMS)),
    (TypeError, "takes a list of examples", lambda: PS.pack(MICROBATCH, max_tokens=4)),
    (ValueError, "ps.pack takes a list of examples", lambda: ps.split([*EXAMPLES], 2)),
    (ValueError, r"call group\(batches, k\)", lambda: PS.group(4, [MICROBATCH])),
    (
        ValueError,
        "list, as in a group within a group",
        lambda: PS.count_tokens([[MICROBATCH]]),
    ),
    (
        ValueError,
        r"of one-hot labels take labels.argmax\(-1\); .*kl_divergence",
        lambda: classify(torch.ones(4, 3), torch.eye(3).long()[[0, 1, 2, 0]]),
    ),
    (ValueError, "one logit", lambda: classify(torch.ones(4), torch.ones(4).long())),
    (
        ValueError,
        r"labels.squeeze\(-1\)",
        lambda: classify(torch.ones(4, 3), torch.ones(4, 1).long()),
    ),
    (
        ValueError,
        r"labels.argmax\(-1\)",
        lambda: ps.losses.linear_cross_entropy(
            torch.ones(4, 2), torch.ones(3, 2), torch.ones(4, 3).long()
        ),
    ),
    (
        ValueError,
        r"weight_fn=lambda m: torch.ones_like",
        lambda: average(weight_fn=None),
    ),
    (
        ValueError,
        r"weight_fn=lambda m: torch.ones_like",
        lambda: average(weight_fn=None, normalize="grads"),
    ),
    (
        TypeError,
        r"'gradient_accumulation_steps'\n.* as many microbatches as the group has",
        lambda: average(gradient_accumulation_steps=4),
    ),
    (
        TypeError,
        "as many microbatches",
        lambda: PS.make_backward(nn.Linear(1, 1), loss_fn, accumulate_grad_batches=4),
    ),
    (TypeError, "clip_by_global_norm", lambda: average(max_grad_norm=1.0)),
    (TypeError, "axis=ps.MeshAxis", lambda: average(mesh=None)),
    (TypeError, "schedule as its learning rate", lambda: average(lr_scheduler=None)),
    (TypeError, "'blue'$", lambda: average(blue=None)),
    (
        TypeError,
        r"microbatch is a tensor, torch.int64 of shape \(8,\)\n.* pass \[batch\]",
        pass_a_batch_as_group,
    ),
    (
        ValueError,
        r"microbatch is a tensor, torch.float32 of shape \(8, 5\)\n.* pass \[batch\]",
        lambda: pass_a_batch_as_group(fails_in_loss=True),
    ),
    (
        TypeError,
        r"params is torch.int64.* floating-point tensors.* params.float\(\)",
        take_integer_params,
    ),
    (ValueError, "make integers float", lambda: update_by_hand(torch.ones(2).long())),
    (
        TypeError,
        r"write metrics.loss; the fields are loss, num_tokens, .*, aux",
        lambda: STEP(PARAMS, STATE, [MICROBATCH])[2]["loss"],
    ),
    (
        TypeError,
        "write metrics.grad_norm",
        lambda: STEP(PARAMS, STATE, [MICROBATCH])[2]["grad_norm"],
    ),
    (
        TypeError,
        "metrics have no 'lr'; the fields are loss, num_tokens, num_microbatches, aux",
        lambda: PS.make_eval_step(loss_fn, weight_fn=weight_fn)(PARAMS, [MICROBATCH])[
            "lr"
        ],
    ),
    (
        ValueError,
        r"mask names params, \['w'\], .*\{name: name in names for name in params\}",
        lambda: decay(["w"]),
    ),
    (ValueError, "mask names params", lambda: decay(["w"], ps.optim.sgd)),
    (
        ValueError,
        "mask names params",
        lambda: decay(lambda params: ("w",), ps.optim.lion),
    ),
    (ValueError, "mask names params", lambda: decay({"w"})),
    (ValueError, r"mask=.*bools.*lacks \['w'\]", lambda: decay({"bias": False})),
    (
        ValueError,
        r"warmup_steps=0.1 counts updates, .*: of a ratio, pass round\(0.1 \* ",
        lambda: ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, RATIO, 1000),
    ),
    (
        ValueError,
        r"decay_steps=62.5 counts updates, .* round\(62.5\)",
        lambda: ps.optim.cosine_decay_schedule(1.0, FRACTION),
    ),
    (
        ValueError,
        "transition_steps=0.1 counts updates",
        lambda: ps.optim.linear_schedule(0.0, 1.0, RATIO),
    ),
    (
        ValueError,
        r"boundary=0.1 counts updates, .* round",
        lambda: ps.optim.join_schedules([SCHEDULE, SCHEDULE], [RATIO]),
    ),
    (
        TypeError,
        "from_torch takes a class, .* got an instance of SGD",
        lambda: PS.optim.from_torch(torch.optim.SGD([torch.ones(1)], lr=0.1)),
    ),
    (
        AttributeError,
        r"write adamw\(lr, weight_decay=0.0\)",
        lambda: PS.optim.adam(0.1),
    ),
    (AttributeError, r"returns the new params", lambda: PS.optim.apply_updates),
    (AttributeError, "has no attribute 'blue'$", lambda: PS.optim.blue),
    (
        ValueError,
        r"labels.* one shorter .*: take ps.shift_labels\(tokens\).*tokens\[:-1\]",
        lambda: ps.pack(
            [{"tokens": torch.arange(3), "labels": torch.arange(2)}], max_tokens=8
        ),
    ),
    (
        ValueError,
        "cut or pad them to one length",
        lambda: ps.pack([{"x": torch.ones(3), "y": torch.ones(7)}], max_tokens=8),
    ),
    (
        TypeError,
        r"fold_in takes a whole number, .* got 'dropout': number .* fold_in\(key, 0\)",
        lambda: PS.random.fold_in(ps.random.key(0), "dropout"),
    ),
    (
        TypeError,
        "fold_in takes a whole number, .* got 1.5",
        lambda: PS.random.fold_in(ps.random.key(0), 1.5),
    ),
    (TypeError, "is no key", lambda: PS.random.with_keys(EXAMPLES, 0)),
    (
        ValueError,
        r"one key for all examples, got keys of shape \(2,\)",
        lambda: PS.random.with_keys(EXAMPLES, ps.random.split(ps.random.key(0))),
    ),
    (
        ValueError,
        "accum_dtype=torch.int64 must be a floating point dtype",
        lambda: ps.accumulate(torch.mul, {}, [], accum_dtype=torch.int64),
    ),
    (
        TypeError,
        r"examples\[0\]\['id'\] is 'a', .* identity=None",
        lambda: PS.random.with_keys([{"id": "a"}], ps.random.key(0), identity="id"),
    ),
    (
        TypeError,
        r"stack: got one microbatch with \['x'\]: pass .* ps.split\(batch, k\)",
        lambda: ps.stack(PS.tree.map(lambda x: x, {"x": torch.ones(4, 2)})),
    ),
    (
        ValueError,
        r"\(3, 3\) against .* \(3,\): they are those of \(n, 1\) against \(n,\).*squeeze\(-1\)",
        lambda: PS.objective.match_weights(
            ps.LossOutput(torch.ones(3, 1) - torch.ones(3)), torch.ones(3)
        ),
    ),
    (
        ValueError,
        r"differ in the first dimension alone, .* of a tokenizer's \(1, n\) take \[0\]",
        lambda: ps.pack(
            [{"x": torch.ones(1, 4)}, {"x": torch.ones(1, 3)}], max_tokens=8
        ),
    ),
    (
        ValueError,
        "without a warmup, take cosine_decay_schedule",
        lambda: ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, 0, 10),
    ),
    (
        ValueError,
        "params are sharded, and opt_state is not: call optimizer.init after ps.shard\n",
        shard_after_init,
    ),
    (
        TypeError,
        r"the loss sees each ps.Shard as it is: call ps.unshard\(params\)",
        lambda: gather_in_no_loss(lambda w: torch.ones(1, 1) @ w),
    ),
    (
        AttributeError,
        "the loss sees each ps.Shard as it is",
        lambda: gather_in_no_loss(lambda w: w.sum()),
    ),
    (
        TypeError,
        "the loss sees each ps.Shard as it is",
        lambda: gather_in_no_loss(lambda w: torch.relu(w)),
    ),
]


@pytest.mark.parametrize(("error", "message", "act"), CASES)
def test_a_text_says_how_to_go_on(
    error: type[Exception], message: str, act: Callable[[], Any]
) -> None:
    with pytest.raises(error) as info:
        act()
    text = "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])
    assert re.search(message, text), text


def test_a_loss_of_a_module_is_called_with_it() -> None:
    backward = ps.make_backward(
        nn.Linear(1, 1), lambda model, m: model(m["y"]), weight_fn=weight_fn
    )
    with pytest.raises(Exception) as info:  # noqa: PT011
        backward([MICROBATCH])
    assert "loss_fn(model, microbatch)" in info.value.__notes__[0]


def test_groups_of_a_second_epoch() -> None:
    groups = ps.group(range(3), 2)
    assert [*groups] == [[0, 1], [2]]
    with pytest.warns(UserWarning, match="call ps.group again for each epoch"):
        assert [*groups] == []


def test_a_loader_without_batches() -> None:
    dataset: Any = [1, 2]
    loader = DataLoader(dataset, batch_size=3, drop_last=True)
    with pytest.warns(UserWarning, match="drop_last=True leaves out"):
        groups = ps.group(loader, 1)
    assert [*groups] == []


@pytest.mark.parametrize("batches", [[], iter([])])
def test_a_rank_without_data_is_no_mistake(batches: Any) -> None:
    assert [*ps.group(batches, 2)] == []


def test_errors_about_shapes_get_no_note_on_dtypes() -> None:
    group = {"x": torch.ones(2, 3), "price": torch.ones(2, dtype=torch.float64)}

    def loss(p: Any, m: Any) -> Tensor:
        raise ValueError("Target size must be the same as input size")

    step = ps.make_update_step(loss, SGD, weight_fn=lambda m: torch.ones(2))
    with pytest.raises(ValueError, match="Target size") as info:
        step(PARAMS, STATE, [group])
    assert not any("float64" in note for note in info.value.__notes__)


def test_a_key_without_a_hash_is_raised_as_it_is() -> None:
    def loss(p: Any, m: Any) -> Tensor:
        raise KeyError([1])

    with pytest.raises(KeyError):
        step_on(loss)


def test_a_schedule_is_plotted() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, 1, 3)
    assert [schedule(step).item() for step in range(4)] == [0.0, 1.0, 0.5, 0.0]


def test_a_folder_of_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    ps.checkpoint.save_step(tmp_path, 3, PARAMS)
    with pytest.raises(ValueError, match=r"00000003, as ps\.checkpoint\.latest"):
        ps.checkpoint.load(tmp_path, PARAMS)


NEGATIVE: dict[str, Callable[[], Any]] = {
    "learning_rate": lambda: ps.optim.sgd(-0.1),
    "learning_rate ": lambda: ps.optim.adamw(-0.1),
    "learning_rate  ": lambda: ps.optim.lion(-0.1),
    "weight_decay": lambda: ps.optim.sgd(0.1, weight_decay=-0.1),
    "weight_decay ": lambda: ps.optim.adamw(0.1, weight_decay=-0.1),
    "weight_decay  ": lambda: ps.optim.lion(0.1, weight_decay=-0.1),
    "weight_decay   ": lambda: ps.optim.add_decayed_weights(-0.1),
    "momentum": lambda: ps.optim.sgd(0.1, momentum=-0.1),
    "decay": lambda: ps.optim.momentum(-0.1),
    "eps": lambda: ps.optim.adamw(0.1, eps=-0.1),
    "eps ": lambda: ps.optim.scale_by_adam(eps=-0.1),
    "b1": lambda: ps.optim.adamw(0.1, b1=-0.1),
    "b2": lambda: ps.optim.lion(0.1, b2=-0.1),
    "b2 ": lambda: ps.optim.scale_by_adam(b2=-0.1),
    "max_norm": lambda: ps.optim.clip_by_global_norm(-0.1),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_numbers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name.strip()}=-0.1 must not be negative"):
        NEGATIVE[name]()


def test_nan_is_no_number() -> None:
    with pytest.raises(ValueError, match="b1=nan is no number"):
        ps.optim.scale_by_adam(
            b1=math.nan,
        )


@pytest.mark.parametrize("name", ["b1", "b2"])
def test_decays_of_means_are_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=1.0 must be below 1"):
        PS.optim.adamw(0.1, **{name: 1.0})
    for make in (PS.optim.adamw, PS.optim.lion):
        with pytest.raises(TypeError, match=f"{name} must be a number, got tuple"):
            make(0.1, **{name: (0.9, 0.99)})


def test_what_is_no_mistake_is_taken() -> None:
    """Takes whole numbers that are floats, tensors of any sign, and zeros."""
    whole: Any = 1e2
    ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, whole, 10 * whole)
    ps.optim.join_schedules([SCHEDULE, SCHEDULE], [whole])
    ps.optim.linear_schedule(-1.0, 0.0, 5)
    never: Any = math.inf
    ps.optim.join_schedules([SCHEDULE, SCHEDULE], [never])
    ps.optim.sgd(torch.tensor(-0.1), weight_decay=torch.tensor(-0.1))
    ps.optim.adamw(0, 0, 0, 0, 0)
    ps.optim.clip_by_global_norm(0)
    metrics = STEP(PARAMS, STATE, [MICROBATCH])[2]
    assert metrics[0] is metrics.loss
    assert metrics[-1] is metrics.aux
    assert len(metrics[1:3]) == 2


def soften(*layers: nn.Module) -> None:
    """Takes two steps of a classifier that ends in these layers."""
    model = nn.Sequential(nn.Linear(2, 3), *layers)
    params, apply = ps.from_module(model)
    step = ps.make_update_step(
        lambda p, m: ps.losses.cross_entropy(apply(p, m["x"]), m["labels"]), SGD
    )
    batch = {"x": torch.ones(2, 4, 2), "labels": torch.ones(2, 4).long()}
    for _ in range(2):
        step(params, SGD.init(params), [batch])


def test_a_softmax_before_cross_entropy_is_warned_of_once() -> None:
    for layers in (
        [nn.Softmax(-1)],
        [nn.Softmax(-1), nn.Flatten(0, 1), nn.Unflatten(0, (2, 4))],
    ):
        with pytest.warns(
            UserWarning, match="takes logits, but gets the result of a softmax"
        ) as caught:
            soften(*layers)
        assert len(caught) == 1
    is_token = torch.tensor([True, False, True])
    with pytest.warns(UserWarning, match="gets the result of a softmax"):
        step_on(
            lambda p, m: ps.losses.cross_entropy(
                p["w"].expand(3, 4).softmax(-1)[is_token], LABELS.expand(2)
            )
        )
    with pytest.warns(UserWarning, match="gets the result of a sigmoid"):
        step_on(
            lambda p, m: functional.binary_cross_entropy_with_logits(
                p["w"].expand(len(m["y"])).sigmoid(), m["y"], reduction="none"
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        soften()
        soften(nn.LogSoftmax(-1))  # It changes nothing.
        soften(nn.Softmax(-1), nn.Linear(3, 3))
        # It takes logarithms of probabilities, as this has.
        step_on(
            lambda p, m: functional.nll_loss(
                p["w"].expand(len(m["y"]), 4).softmax(-1).log(),
                LABELS.expand(len(m["y"])),
                reduction="none",
            )
        )
        # An entropy is no loss of labels.
        step_on(
            lambda p, m: (
                p["w"].expand(len(m["y"]), 4).softmax(-1).log_softmax(-1).sum(-1)
            )
        )


def test_the_state_of_another_optimizer_over_shards() -> None:
    """Is not taken for one that was made before ``ps.shard``."""
    shards = ps.shard({"w": torch.ones(4)}, ps.LocalAxis())
    state = PS.optim.sgd(0.1).init(shards)
    adamw = PS.optim.adamw(0.1)
    with pytest.raises(ValueError, match="of this very optimizer"):
        adamw.update(shards, state, shards)


def test_a_compiler_traces_a_schedule_once_for_all_lengths(
    fresh_compiler: None,
) -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    rate = torch.compile(
        lambda step, steps: ps.optim.linear_schedule(0.0, 1.0, steps)(step),
        backend=count,
        fullgraph=True,
    )
    for steps in range(3, 9):
        assert float(rate(torch.tensor(1), steps)) == pytest.approx(1 / steps)
    assert len(graphs) == 2


def test_a_microbatch_that_fails_is_described() -> None:
    """Says what came, without a guess where it may well be a microbatch."""

    def loss(p: Any, m: Any) -> Tensor:
        raise ValueError("no")

    step = ps.make_update_step(loss, SGD, weight_fn=lambda m: torch.ones(2))
    for group in ([torch.ones(2), torch.ones(2)], [(torch.ones(2), torch.ones(2))]):
        with pytest.raises(ValueError, match="no") as info:
            step(PARAMS, STATE, group)
        assert not any("[batch]" in note for note in info.value.__notes__)


def test_an_error_of_an_evaluation_is_explained() -> None:
    evaluate = ps.make_eval_step(lambda p, m: m["z"], weight_fn=weight_fn)
    with pytest.raises(KeyError) as info:
        evaluate(PARAMS, [MICROBATCH])
    notes = "\n".join(info.value.__notes__)
    assert "loss_fn(params, microbatch)" in notes
    assert "this microbatch has ['x'" in notes
