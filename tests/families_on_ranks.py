"""Trains models of transformers in units on two to four processes, against one process that holds all of each.

Three updates in float64, of which the second is skipped; ranks hold unequal rows and microbatches. The tests run a part of all
cases. ``python -m tests.families_on_ranks`` runs each of them, and prints the distances.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import purestep as ps
from purestep import tree
from purestep.testing.processes import World
from support.worlds import NUM_PROCESSES, Grid, Ranks, on_processes
from tests import model_families
from tests.model_families import VOCABULARY, is_block, is_block_or_mlp

OPTIMIZER = ps.optim.chain(ps.optim.clip_by_global_norm(0.5), ps.optim.adamw(0.01))
MAX_DISTANCE = 1e-12
SKIPPED = 1
"""The update in which the gradient of one text is not finite."""
GROUPS = {2: [[0, 1], [2, 3, 4]], 3: [[0], [1, 2, 3], [4]], 4: [[0], [1], [2], [3, 4]]}
"""The microbatches of each rank, for a number of ranks."""
GRID = Ranks(4, rows=2)


class Family(NamedTuple):
    """A model, its units, and whether it has dropout, which takes keys."""

    make: Callable[[], Any]
    is_unit: Callable[[str, nn.Module], bool] = is_block
    has_dropout: bool = True


def build_vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


def build(name: str, **config: Any) -> Callable[[], Any]:
    return lambda: model_families.build_model(name, **config)


def build_mixtral() -> Any:
    model = model_families.build_model("MixtralForCausalLM", num_local_experts=4)
    model.set_experts_implementation("eager")  # Others have no float64.
    return model


def build_of_shape(name: str) -> Callable[[], Any]:
    return lambda: model_families.build_model(name, model_families.SHAPE)


FAMILIES = {
    "Llama": Family(build("LlamaForCausalLM")),
    "Qwen, tied": Family(build("Qwen2ForCausalLM", tie_word_embeddings=True)),
    "GPT-2, nested": Family(build_of_shape("GPT2LMHeadModel"), is_block_or_mlp),
    "BERT": Family(build_of_shape("BertForMaskedLM")),
    "T5": Family(model_families.build_t5, has_dropout=False),
    "ViT": Family(build_vit),
    "Mixtral": Family(build_mixtral),
    "LoRA": Family(model_families.build_lora, has_dropout=False),
}


class Case(NamedTuple):
    """A family on some ranks, whether units are recomputed, and whether dropout takes keys."""

    family: str
    ranks: Ranks
    remat: bool
    keyed: bool


def list_cases() -> Iterator[Case]:
    """Lists all cases."""
    for family, (_, _, has_dropout) in FAMILIES.items():
        for ranks in (Ranks(2), Ranks(3), Ranks(4), GRID):
            for remat in (False, True):
                for keyed in (False, True)[: 1 + has_dropout]:
                    yield Case(family, ranks, remat, keyed)


def make_model(family: str, keyed: bool) -> Any:
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        torch.manual_seed(0)
        model = FAMILIES[family].make().to(torch.float64).train()
    return model_families.with_dropout(model, 0.2 if keyed else 0.0)


def make_texts(family: str, update: int) -> list[dict[str, Tensor]]:
    """Makes five microbatches of uneven size, with a key for each row."""
    generator = torch.Generator().manual_seed(update)
    texts = []
    num_rows = 0
    for index, rows in enumerate((1, 2, 3, 1, 2)):
        text = make_text(family, rows, generator)
        is_bad = update == SKIPPED and index == 3
        text["scale"] = torch.tensor(math.nan if is_bad else 1.0, dtype=torch.float64)
        key = ps.random.key(7)
        positions = torch.arange(num_rows, num_rows + rows)
        text["keys"] = torch.stack([ps.random.fold_in(key, int(p)) for p in positions])
        texts.append(text)
        num_rows += rows
    return texts


def make_text(family: str, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids, other = torch.randint(1, VOCABULARY, (2, rows, 6), generator=generator)
    if family == "ViT":
        shape = (rows, 3, 8, 8)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": ids[:, 0] % 5}
    if family == "T5":
        start = torch.zeros(rows, 1, dtype=torch.int64)
        shifted = torch.cat([start, other[:, :-1]], 1)
        return {"input_ids": ids, "decoder_input_ids": shifted, "labels": other}
    if family == "BERT":
        labels = torch.where(torch.arange(6) % 2 == 0, ids, -100)
        return {"input_ids": torch.where(labels == -100, ids, 3), "labels": labels}
    return {"input_ids": ids, "labels": ps.shift_labels(ids)}


def make_loss(family: str, apply: Any, keyed: bool) -> Any:
    def loss_fn(params: Any, microbatch: dict[str, Tensor]) -> Tensor:
        inputs: dict[str, Any] = dict(microbatch)
        labels, scale, keys = (inputs.pop(key) for key in ("labels", "scale", "keys"))
        if family not in ("ViT", "BERT"):
            inputs["use_cache"] = False
        if keyed:
            inputs["key"] = keys
        losses = ps.losses.cross_entropy(apply(params, **inputs).logits, labels)
        return losses * scale

    return loss_fn


Result = tuple[dict[str, Tensor], list[tuple[float, float, bool]]]


def train(
    loss_fn: Any, params: Any, select: Callable[[int], Any], **step: Any
) -> Result:
    """Takes three updates; returns full params, and losses, norms and whether each was applied."""
    update_step = ps.make_update_step(
        loss_fn,
        OPTIMIZER,
        weight_fn=ps.label_weights,
        on_nonfinite="skip",
        **step,
    )
    opt_state = OPTIMIZER.init(params)
    figures = []
    for update in range(3):
        params, opt_state, metrics = update_step(params, opt_state, select(update))
        figures.append(
            (float(metrics.loss), float(metrics.grad_norm), bool(metrics.applied))
        )
    return ps.unshard(params), figures


@cache
def train_in_one_process(family: str, keyed: bool) -> Result:
    params, apply = ps.from_module(make_model(family, keyed))
    loss_fn = make_loss(family, apply, keyed)
    return train(loss_fn, params, lambda update: make_texts(family, update))


def train_in_units(axes: Any, case: Case) -> Result:
    """Trains in shards on ranks; on a grid, each row holds all shards."""
    family, _, remat, keyed = case
    shard_axis, axis = axes, axes
    if isinstance(axes, Grid):
        shard_axis, axis = axes.second, axes.both
    is_unit = FAMILIES[family].is_unit
    params, apply = ps.from_module(
        make_model(family, keyed), units=is_unit, remat=remat
    )

    def select(update: int) -> list[dict[str, Tensor]]:
        texts = make_texts(family, update)
        return [texts[index] for index in GROUPS[axis.size][axis.rank]]

    loss_fn = make_loss(family, apply, keyed)
    shards = ps.shard(params, shard_axis)
    return train(loss_fn, shards, select, axis=axis, gather="loss")


def find_distance(world: World, case: Case) -> float:
    """Returns the largest relative distance from one process: of all params, losses and norms.

    Not of each param: a bias of keys has no gradient but its rounding, which AdamW scales up.
    """
    expected_params, expected_figures = train_in_one_process(case.family, case.keyed)
    size = case.ranks.size
    largest = 0.0
    for params, figures in on_processes(
        world, case.ranks, train_in_units, [case] * size
    ):
        difference = tree.map(torch.sub, params, expected_params)
        distance = tree.global_norm(difference) / tree.global_norm(expected_params)
        largest = max(largest, float(distance))
        for values, wanted in zip(figures, expected_figures, strict=True):
            assert values[2] == wanted[2]
            if wanted[2]:
                for value, other in zip(values[:2], wanted[:2], strict=True):
                    largest = max(largest, abs(value / other - 1))
    return largest


def name_case(case: Case) -> str:
    family, ranks, remat, keyed = case
    words = [family, f"{ranks.size} ranks" if not ranks.rows else "2 x 2 ranks"]
    words += ["remat"] * remat + ["keys"] * keyed
    return ", ".join(words)


def main() -> int:
    """Runs all cases."""
    largest = 0.0
    with World(NUM_PROCESSES, timeout=120, strict=False) as world:
        for case in list_cases():
            distance = find_distance(world, case)
            largest = max(largest, distance)
            print(f"{name_case(case):40} {distance:.1e}", flush=True)
    print(f"the largest distance is {largest:.1e}")
    return int(largest > MAX_DISTANCE)


if __name__ == "__main__":
    from tests import families_on_ranks  # under the name by which ranks import it

    sys.exit(families_on_ranks.main())
