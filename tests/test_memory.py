"""What a step holds, and what it touches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import purestep as ps
from proofs.strategies import RECIPES
from purestep import tree
from purestep.optim.elementwise import HOST_BYTES
from tests.families import enable_checkpoints
from tests.layers import network, rows
from tests.memory import LiveBytes, Touched

LAYERS, WIDTH = 24, 64
TREE = LAYERS * WIDTH * WIDTH * 4


def small() -> tuple[Any, Tensor]:
    """Many equal layers, so that one leaf is a small part of the tree, and two rows."""
    return [leaf.float() for leaf in network(LAYERS, WIDTH)], rows(
        2, width=WIDTH
    ).float()


def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
    """A deep network's squared output."""
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().sum(-1)


def weight_fn(x: Tensor) -> Tensor:
    """Every row is a token."""
    return torch.ones(len(x), dtype=torch.bool)


def test_the_counter_counts() -> None:
    """What is made counts while it is alive; views, and what was there before, do not."""
    before = torch.ones(1000)
    with LiveBytes() as live:
        view = before[10:]
        made = view * 2
        assert live.now == live.peak == 4 * 990
        del made
        assert live.now == 0
    assert live.peak == 4 * 990


def held(microbatches: int, dtype: torch.dtype = torch.float32, **how: Any) -> float:
    """The peak of accumulating, in gradient trees."""
    params, x = tree.map(lambda leaf: leaf.to(dtype), small())
    with LiveBytes() as live:
        sums = ps.accumulate(
            loss_fn, params, [x] * microbatches, weight_fn=weight_fn, **how
        )
    assert sum(leaf.numel() * 4 for leaf in sums.grads) == TREE
    return live.peak / TREE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulating_holds_one_gradient_tree(dtype: torch.dtype) -> None:
    """At most 1.15 trees of float32, where returned gradients would make it two.

    A microbatch keeps six bytes: its two weights and its loss.
    """
    assert 1 <= held(4, dtype) <= 1.15
    assert held(16, dtype) - held(4, dtype) == 12 * 6 / TREE
    by_torch = held(4, dtype, grad_and_value=torch.func.grad_and_value)
    assert by_torch > (2 if dtype == torch.float32 else 1.4)


TREES = {
    "descend": 0, "momentum": 1, "clipped": 1, "adamw": 2, "lion": 1, "partition": 2, "master": 2,
    "ema": 2, "fused": 2,
}  # fmt: skip
"""How many trees the state of each optimizer is."""
FUSED = ps.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_what_a_step_holds(name: str, donate: bool, normalize: Any) -> None:
    """One tree of gradients; without donation one copy of the state, with it some leaves."""
    optimizer, (params, x) = FUSED if name == "fused" else RECIPES[name](0.1), small()
    how: Any = {"weight_fn": weight_fn, "donate": donate, "normalize": normalize}
    step, group = ps.make_update_step(loss_fn, optimizer, **how), [x] * 4
    # torch.optim makes its state in the first step.
    params, opt_state, _ = step(params, optimizer.init(params), group)
    with LiveBytes() as live:
        step(params, opt_state, group)
    held = 1 if donate else 1 + 1 + TREES[name]
    # A leaf is 1/24 of the tree, and lion's formula has six of them alive at once.
    assert TREE <= live.peak <= (held + 0.3) * TREE


@pytest.mark.parametrize("count", [WIDTH, 2048])
def test_reverse_mode_frees_as_it_goes(count: int) -> None:
    """``ps.grad_and_value`` peaks where ``.backward()`` does; ``torch.func`` needs twice as much.

    With as many rows as features, gradients are as large as activations, and take their place.
    """
    x, params = rows(count, width=WIDTH).float(), small()[0]

    def loss(params: list[Tensor]) -> Tensor:
        return loss_fn(params, x).sum()

    def peak(run: Callable[[], object]) -> int:
        with LiveBytes() as live:
            run()
        return live.peak

    plain = peak(
        lambda: loss([leaf.detach().requires_grad_() for leaf in params]).backward()
    )
    assert peak(lambda: ps.grad_and_value(loss)(params)) <= 1.05 * plain
    assert peak(lambda: torch.func.grad_and_value(loss)(params)) >= 1.8 * plain


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_normalising_takes_one_pass_at_most(normalize: Any) -> None:
    """What touches a gradient: its making, its adding up, its norm, the optimizer; with "grads", a division."""
    (params, x), optimizer = small(), ps.optim.sgd(0.1)
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=weight_fn, normalize=normalize
    )
    counts = {}
    state = optimizer.init(params)
    for microbatches in (1, 8):
        with Touched(WIDTH * WIDTH) as touched:
            step(params, state, [x] * microbatches)
        counts[microbatches] = touched.counts
    matmul = {k: counts[k].pop("mm") for k in counts}
    assert matmul[8] == 8 * matmul[1]
    # The copy that the optimizer works on is the only one of the state.
    optimizer_and_norm = {"_foreach_norm": 1, "clone": LAYERS}
    optimizer_and_norm["_foreach_add_"] = TREE // HOST_BYTES
    if normalize == "grads":
        optimizer_and_norm |= {"_foreach_div_": 1}
    assert counts[1] == optimizer_and_norm
    assert counts[8] == {**optimizer_and_norm, "add_": 7 * LAYERS}


def trained(model: Any, donate: bool) -> tuple[Any, Any, int]:
    """What trains of a model, its optimizer's state, and the peak of making both and of a step."""
    tokens, optimizer = torch.randint(0, 64, (2, 8)), ps.optim.adamw(1e-2)
    group = [{"tokens": tokens, "labels": ps.shift_labels(tokens)}] * 2

    def loss_fn(params: Any, m: Any) -> Tensor:
        logits = apply(params, m["tokens"], use_cache=False).logits
        return ps.losses.cross_entropy(logits, m["labels"])

    with LiveBytes() as live:
        params, apply = ps.from_module(model)
        step = ps.make_update_step(loss_fn, optimizer, donate=donate)
        params, opt_state, metrics = step(params, optimizer.init(params), group)
    assert metrics.applied
    return params, opt_state, live.peak


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpoints"])
def test_a_lora_step_holds_nothing_the_size_of_the_frozen_rest(
    again: bool, donate: bool
) -> None:
    """Neither a copy nor a gradient of even one frozen matrix, in 50 MB."""
    torch.manual_seed(0)
    small = {"vocab_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, tie_word_embeddings=True, **small
    )
    model: Any = LlamaForCausalLM(config)
    if again:
        enable_checkpoints(model)  # It calls enable_input_require_grads, too.
    whole = sum(p.nbytes for p in model.parameters())
    matrix = model.model.layers[0].mlp.up_proj.weight.nbytes
    assert trained(model, donate)[2] > 2 * whole

    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    params, opt_state, peak = trained(adapted, donate)
    adapters = sum(leaf.nbytes for leaf in tree.leaves(params))
    assert adapters == 4 * 2 * 2 * (512 + 512) * 4 < whole / 800
    assert sum(leaf.nbytes for leaf in tree.leaves(opt_state)) == 2 * adapters + 8
    assert peak < matrix < whole / 17
