"""Texts, padded and packed, and how far a step's gradient on them is from that of one big batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import purestep as ps
from tests.families import ROW, examples, model, reference

Inputs = Callable[[dict[str, Tensor]], dict[str, Any]]


def padded(family: str = "Llama") -> list[Any]:
    return ps.pack(examples(family), max_tokens=20)


def packed(family: str = "Llama") -> list[Any]:
    return [ps.pack_documents(examples(family), row_tokens=ROW)]


def off(family: str, group: list[Any], inputs: Inputs, own: nn.Module | None = None) -> float:
    """How far a step's gradient is from that of one big batch."""
    params, apply = ps.from_module(own or model(family))

    def loss_fn(params: Any, m: Any) -> Tensor:
        return ps.losses.cross_entropy(apply(params, **inputs(m)).logits, m["labels"])

    optimizer = ps.optim.sgd(0.1, momentum=0.9)
    _, opt_state, _ = ps.make_update_step(loss_fn, optimizer)(params, optimizer.init(params), group)
    expected = reference(family, "sdpa").grads
    worst = max(
        (opt_state[0].trace[name] - grad).abs().max().item() for name, grad in expected.items()
    )
    return worst / max(grad.abs().max().item() for grad in expected.values())


RIGHT, WRONG = 1e-8, 1e-3
"""Between what rounds in float32 and what is a different gradient."""
