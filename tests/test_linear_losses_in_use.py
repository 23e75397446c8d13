"""``linear_cross_entropy`` in steps, with a model of transformers, and under a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library
from transformers import LlamaConfig, LlamaForCausalLM

import purestep as ps
from purestep.losses import linear_cross_entropy
from purestep.losses.vocabulary import values
from purestep.testing.bounds import gamma
from tests.logits import problem
from tests.torch_internals import compiled_with_graphs

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_one_operation(dtype: torch.dtype) -> None:
    """However many chunks; with the bits of the eager one, of a transposed weight, too."""
    case = problem(6, 4, 40, dtype)

    def losses(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        def total(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, weight, case.labels, chunk=1).sum()

        return torch.func.grad(total, (0, 1))(hidden, weight)

    compiled, graphs = compiled_with_graphs(losses)
    for weight in (case.weight, case.weight.T.contiguous().T):
        graphs.clear()
        found = compiled(case.hidden, weight)
        for one, other in zip(found, losses(case.hidden, weight), strict=True):
            assert torch.equal(one, other)
        assert sum(graph.count("purestep.vocabulary_values") for graph in graphs) == 1
        assert sum(graph.count("purestep.vocabulary_gradients") for graph in graphs) == 1
        assert not any(".mm" in graph for graph in graphs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_compiler_is_told_what_the_operations_give(dtype: torch.dtype) -> None:
    """Shapes, dtypes and memory order, of transposed inputs, too; and that they write to none of them."""
    from purestep.losses import operators  # noqa: F401

    case = problem(6, 4, 10, dtype)
    hidden, weight = case.hidden.T.contiguous().T, case.weight.T.contiguous().T
    bias = weight[:, 0]
    z, *others = values(hidden, weight, bias, case.labels, None, 3)
    checks = ("test_schema", "test_faketensor")
    library.opcheck(
        torch.ops.purestep.vocabulary_values.default,
        (hidden, weight, bias, case.labels, None, 3), test_utils=checks,
    )  # fmt: skip
    for wanted in ([True, True, True], [True, False, True], [False, True, False]):
        library.opcheck(
            torch.ops.purestep.vocabulary_gradients.default,
            (hidden, weight, bias, case.labels, z, [z, *others], 2.0, None, wanted), test_utils=checks,
        )  # fmt: skip
