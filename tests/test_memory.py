"""Tests how much memory of a step is alive, and which operations touch a gradient."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

import purestep as ps
from purestep import tree
from purestep.optim.elementwise import HOST_BYTES
from support.strategies import RECIPES
from tests.layer_stack import make_layers, make_rows
from tests.memory import CountTouching, LiveBytes
from tests.model_families import enable_checkpoints

LAYERS, WIDTH = 24, 64
TREE = LAYERS * WIDTH * WIDTH * 4


def small() -> tuple[Any, Tensor]:
    """Makes many equal layers, so that a leaf is a small part of the tree, and two rows."""
    layers = [leaf.float() for leaf in make_layers(LAYERS, WIDTH)]
    return layers, make_rows(2, width=WIDTH).float()


def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
    """Computes a deep network's squared output."""
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().sum(-1)


def weight_fn(x: Tensor) -> Tensor:
    """Counts every row as a token."""
    return torch.ones(len(x), dtype=torch.bool)


def test_the_counter_counts() -> None:
    """Counts new tensors while they are alive; neither views nor what was there before."""
    before = torch.ones(1000)
    with LiveBytes() as live:
        view = before[10:]
        product = view * 2
        assert live.now == live.peak == 4 * 990
        del product
        assert live.now == 0
    assert live.peak == 4 * 990


def peak_of_accumulate(
    microbatches: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> float:
    """Measures the peak of accumulating, in gradient trees."""
    params, x = tree.map(lambda leaf: leaf.to(dtype), small())
    group = [x] * microbatches
    with LiveBytes() as live:
        sums = ps.accumulate(loss_fn, params, group, weight_fn=weight_fn, **settings)
    assert sum(leaf.numel() * 4 for leaf in sums.grads) == TREE
    return live.peak / TREE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulating_holds_one_gradient_tree(dtype: torch.dtype) -> None:
    """Holds at most 1.15 trees of float32, where returned gradients would make it two.

    A microbatch leaves six bytes: its two weights and its loss.
    """
    of_four = peak_of_accumulate(4, dtype)
    of_sixteen = peak_of_accumulate(16, dtype)
    assert 1 <= of_four <= 1.15
    assert of_sixteen - of_four == 12 * 6 / TREE
    by_torch = peak_of_accumulate(4, dtype, grad_and_value=torch.func.grad_and_value)
    assert by_torch > (2 if dtype == torch.float32 else 1.4)


TREES = {
    "momentum": 1,
    "clipped": 1,
    "adamw": 2,
    "lion": 1,
    "partition": 2,
    "master": 2,
    "ema": 2,
    "sgd": 0,
    "fused": 2,
}
"""How many trees the state of each optimizer is."""
FUSED = ps.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_what_a_step_holds(name: str, donate: bool, normalize: Any) -> None:
    """Holds the gradients; without donation one copy of the state, with it some leaves."""
    optimizer = FUSED if name == "fused" else RECIPES[name](0.1)
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=weight_fn, donate=donate, normalize=normalize
    )
    params, x = small()
    group = [x] * 4
    # torch.optim makes its state in the first step.
    params, opt_state, _ = step(params, optimizer.init(params), group)
    with LiveBytes() as live:
        step(params, opt_state, group)
    trees = 1
    if not donate:
        trees += 1 + TREES[name]
    # A leaf is 1/24 of the tree, and lion's formula has six of them alive at once.
    assert TREE <= live.peak <= (trees + 0.3) * TREE


@pytest.mark.parametrize("count", [WIDTH, 2048])
def test_reverse_mode_frees_as_it_goes(count: int) -> None:
    """``ps.grad_and_value`` peaks where ``.backward()`` does; ``torch.func`` needs twice as much.

    With as many rows as features, gradients are as large as activations, and take their place.
    """
    x = make_rows(count, width=WIDTH).float()
    params, _ = small()

    def loss(params: list[Tensor]) -> Tensor:
        return loss_fn(params, x).sum()

    def run_backward() -> None:
        leaves = [leaf.detach().requires_grad_() for leaf in params]
        loss(leaves).backward()

    def measure_peak(run: Callable[[], object]) -> int:
        with LiveBytes() as live:
            run()
        return live.peak

    by_backward = measure_peak(run_backward)
    ours = measure_peak(lambda: ps.grad_and_value(loss)(params))
    by_torch = measure_peak(lambda: torch.func.grad_and_value(loss)(params))
    assert ours <= 1.05 * by_backward
    assert by_torch >= 1.8 * by_backward


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_normalising_takes_one_pass_at_most(normalize: Any) -> None:
    """Touches a gradient to make it, add it up, take its norm and update; "grads" divides once."""
    params, x = small()
    optimizer = ps.optim.sgd(0.1)
    state = optimizer.init(params)
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=weight_fn, normalize=normalize
    )

    def count_operations(microbatches: int) -> Counter[str]:
        with CountTouching(WIDTH * WIDTH) as touched:
            step(params, state, [x] * microbatches)
        return touched.counts

    of_one = count_operations(1)
    of_eight = count_operations(8)
    assert of_eight.pop("mm") == 8 * of_one.pop("mm")
    optimizer_and_norm = {
        "_foreach_norm": 1,
        # The copy that the optimizer works on is the only one of the state.
        "clone": LAYERS,
        "_foreach_add_": TREE // HOST_BYTES,
    }
    if normalize == "grads":
        optimizer_and_norm["_foreach_div_"] = 1
    assert of_one == optimizer_and_norm
    assert of_eight == {**optimizer_and_norm, "add_": 7 * LAYERS}


def train_once(model: Any, donate: bool) -> tuple[Any, Any, int]:
    """Takes a step on what trains of a model; returns it, its optimizer state, and the peak."""
    tokens = torch.randint(0, 64, (2, 8))
    labels = ps.shift_labels(tokens)
    group = [{"tokens": tokens, "labels": labels}] * 2
    optimizer = ps.optim.adamw(1e-2)

    def loss_fn(params: Any, m: Any) -> Tensor:
        logits = apply(params, m["tokens"], use_cache=False).logits
        return ps.losses.cross_entropy(logits, m["labels"])

    with LiveBytes() as live:
        params, apply = ps.from_module(model)
        opt_state = optimizer.init(params)
        step = ps.make_update_step(loss_fn, optimizer, donate=donate)
        params, opt_state, metrics = step(params, opt_state, group)
    assert metrics.applied
    return params, opt_state, live.peak


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpoints"])
def test_a_lora_step_holds_nothing_the_size_of_the_frozen_rest(
    checkpoints: bool, donate: bool
) -> None:
    """Makes neither a copy nor a gradient of even one frozen matrix, in 50 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    if checkpoints:
        enable_checkpoints(model)  # It calls enable_input_require_grads, too.
    model_bytes = sum(p.nbytes for p in model.parameters())
    matrix_bytes = model.model.layers[0].mlp.up_proj.weight.nbytes
    _, _, peak_of_full = train_once(model, donate)
    assert peak_of_full > 2 * model_bytes

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, lora)
    params, opt_state, peak = train_once(adapted, donate)
    adapter_bytes = sum(leaf.nbytes for leaf in tree.leaves(params))
    state_bytes = sum(leaf.nbytes for leaf in tree.leaves(opt_state))
    # Four layers, two projections each, two matrices of rank two each, in float32.
    assert adapter_bytes == 4 * 2 * 2 * (512 + 512) * 4 < model_bytes / 800
    assert state_bytes == 2 * adapter_bytes + 8
    assert peak < matrix_bytes < model_bytes / 17


class Stream(Sequence[dict[str, Tensor]]):
    """Makes a microbatch when it is asked for, and notes which earlier ones are alive then."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.storages: list[StorageWeakRef] = []
        self.alive: list[list[int]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if index >= self.length:
            raise IndexError(index)
        pairs = enumerate(self.storages)
        self.alive.append([number for number, x in pairs if not x.expired()])
        x = torch.full((100,), float(index))
        self.storages.append(StorageWeakRef(x.untyped_storage()))
        return {"x": x}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Keeps nothing, where that of ``Sequence`` keeps a microbatch in a variable."""
        for index in range(self.length):
            yield self[index]


def loss_with_weights(w: Tensor, microbatch: dict[str, Tensor]) -> ps.LossOutput:
    losses = w * microbatch["x"]
    return ps.LossOutput(losses, weights=torch.ones_like(losses, dtype=torch.bool))


def test_a_microbatch_is_freed_before_the_next_is_made() -> None:
    """In a step and in an evaluation of a sequence that makes its microbatches."""
    sgd = ps.optim.sgd(0.1)
    w = torch.tensor(1.0)
    step = ps.make_update_step(
        loss_with_weights, sgd, weight_fn=None, normalize="grads"
    )
    evaluate = ps.make_eval_step(loss_with_weights, weight_fn=None)
    for run in (
        lambda stream: step(w, sgd.init(w), stream),
        lambda stream: evaluate(w, stream),
    ):
        stream = Stream(4)
        run(stream)
        assert stream.alive == [[], [], [], []]
