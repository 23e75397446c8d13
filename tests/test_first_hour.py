"""Mistakes of a first hour: each text says what is wrong, and how to go on."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
