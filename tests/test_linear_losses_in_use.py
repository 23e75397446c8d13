"""``linear_cross_entropy`` in steps, with a model of transformers, and under a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import purestep as ps
from purestep.losses import linear_cross_entropy
from purestep.testing.bounds import gamma
from tests.logits import problem
from tests.torch_private import compiled_with_graphs

STEPS: dict[str, dict[str, Any]] = {
    "eager": {},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
    "compiled": {"compile": True},
    "compiled torch.func": {"compile": True, "grad_and_value": torch.func.grad_and_value},
}


@pytest.mark.parametrize("how", STEPS)
def test_a_step_with_a_tied_embedding(how: str) -> None:
    """The embedding's two gradients are one sum, in every kind of step, to rounding in float64."""
    params = {"embedding": problem(1, 4, 11).weight}
    labels = torch.tensor([[3, 5, -100], [1, 1, 10]])
    group = [{"x": labels.clamp(min=0), "labels": labels}, {"x": labels[:1] % 3, "labels": labels[:1]}]  # fmt: skip

    def ours(p: Any, m: Any) -> Tensor:
        hidden = torch.tanh(p["embedding"][m["x"]])
        return linear_cross_entropy(hidden, p["embedding"], m["labels"], chunk=4, z_loss=0.1)

    def plain(p: Any, m: Any) -> Tensor:
        logits = torch.tanh(p["embedding"][m["x"]]) @ p["embedding"].T
        return ps.losses.cross_entropy(logits, m["labels"], z_loss=0.1)

    optimizer = ps.optim.sgd(1.0)
    one, _, metrics = ps.make_update_step(ours, optimizer, **STEPS[how])(
        params, optimizer.init(params), group
    )
    other, _, expected = ps.make_update_step(plain, optimizer)(
        params, optimizer.init(params), group
    )
    bound = gamma(1000, torch.float64)
    assert (metrics.loss - expected.loss).abs() <= bound * expected.loss
    assert ((one["embedding"] - other["embedding"]).abs() <= 10 * bound).all()


def test_a_hugging_face_model_whose_logits_are_never_whole() -> None:
    """Hidden states, and logits of the last position alone, as the README has it: the update of whole logits, to rounding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    params, apply = ps.from_module(LlamaForCausalLM(config).double())
    ids = torch.randint(99, (2, 9))
    sizes: list[torch.Size] = []

    def ours(p: Any, m: Any) -> Tensor:
        output = apply(p, m["ids"], output_hidden_states=True, logits_to_keep=1)
        sizes.append(output.logits.shape)
        return linear_cross_entropy(
            output.hidden_states[-1], p["lm_head.weight"], m["labels"], chunk=10
        )

    def plain(p: Any, m: Any) -> Tensor:
        return ps.losses.cross_entropy(apply(p, m["ids"]).logits, m["labels"])

    optimizer, group = ps.optim.sgd(1.0), [{"ids": ids, "labels": ps.shift_labels(ids)}]
    one, other = (
        ps.make_update_step(loss, optimizer)(params, optimizer.init(params), group)[0]
        for loss in (ours, plain)
    )
    assert sizes == [(2, 1, 99)]
    for name, leaf in other.items():
        bound = gamma(10_000, torch.float64) * (1 + leaf.abs().max())
        assert ((one[name] - leaf).abs() <= bound).all(), name


def test_compiled_the_logits_are_whole() -> None:
    """One product in each pass, and not a copy of the loop for each chunk."""
    case = problem(6, 4, 40)

    def grads(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        def total(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, weight, case.labels, chunk=1).sum()

        return torch.func.grad(total, (0, 1))(hidden, weight)

    compiled, graphs = compiled_with_graphs(grads)
    found = compiled(case.hidden, case.weight)
    for one, other in zip(found, grads(case.hidden, case.weight), strict=True):
        assert ((one - other).abs() <= gamma(1000, torch.float64) * (1 + other.abs())).all()
    assert sum(graph.count(".mm") for graph in graphs) == 3
