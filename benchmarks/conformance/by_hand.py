"""The smallest cases again, checked by hand: the arithmetic is in the report, and each trainer is run on it here."""

import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.conformance.column import Column
from purestep.testing.problem import REGRESSION, Batch, Linear, Problem
from purestep.testing.trainer import Group, Switchable

RATE = 0.5
"""θ = θ - ½ ∇L, from a model whose prediction is its bias, 0."""


def tokens(*targets: float, counts: bool = True) -> Batch:
    """One row of tokens x = 0, whose losses are (bias - target)²."""
    y = torch.tensor([targets])
    w = torch.full(y.shape, counts)
    return {"x": torch.zeros(*y.shape, 2), "y": y, "w": w}


EQUAL = [tokens(1, 1), tokens(0, 0)]
UNEQUAL = [tokens(1), tokens(0, 0, 0)]
ONE_EMPTY = [tokens(1), tokens(0, counts=False)]
ALL_EMPTY = [tokens(1, counts=False)]
"""The microbatches of an update; what the bias is after it, by the equation and by a mean of means, is worked out in the report."""

CASES: list[tuple[str, list[Batch], float, float]] = [
    ("equal", EQUAL, 0.5, 0.5),
    ("unequal", UNEQUAL, 0.25, 0.5),
    ("one empty", ONE_EMPTY, 1.0, math.nan),
    ("all empty", ALL_EMPTY, 0.0, math.nan),
]


def bias_after(trainer: Any, group: Group) -> float | str:
    """What a trainer of the kit's linear model makes of it; in words, if it refuses."""
    dtype = trainer.abilities.dtype
    problem = Problem(REGRESSION, Linear([0, 0], 0, dtype), RATE)

    def cast(batch: Batch) -> Batch:
        return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}

    try:
        if isinstance(trainer, Switchable):
            trainer.use(trainer.settings[0])
        trainer.start(problem, len(group))
        trainer.update([[cast(batch) for batch in share] for share in group])
        seen = [float(each.params["bias"]) for each in trainer.observe()]
    except Exception as error:
        return type(error).__name__
    return seen[0] if len({str(bias) for bias in seen}) == 1 else f"ranks differ: {seen}"


def biases(columns: Sequence[Column]) -> dict[str, dict[str, float | str]]:
    """For each trainer of the linear model what it makes of each case; each microbatch on a rank of its own, where there are several."""
    found: dict[str, dict[str, float | str]] = {}
    for column in columns:
        trainer = column.make()
        if trainer.abilities.task is not REGRESSION:
            continue
        found[column.name] = {name: bias_after(trainer, [case]) for name, case, _, _ in CASES}
        if trainer.abilities.ranks > 1:
            found[f"{column.name}, on 2 ranks"] = {
                name: bias_after(trainer, [[part] for part in case]) if len(case) > 1 else "-"
                for name, case, _, _ in CASES
            }
    return found


HEADS = {
    "GPT2LMHeadModel": "tokens",
    "LlamaForCausalLM": "tokens",
    "GPT2ForSequenceClassification": "classes",
    "LlamaForSequenceClassification": "classes",
    "BertForSequenceClassification": "classes",
    "DistilBertForSequenceClassification": "classes",
    "LlamaForTokenClassification": "token classes",
    "BertForTokenClassification": "token classes",
    "BertForMaskedLM": "tokens",
    "T5ForConditionalGeneration": "tokens",
}


def head(kind: str) -> Any:
    """One of transformers' models with a head, small, without dropout."""
    import transformers

    torch.manual_seed(0)
    small: dict[str, dict[str, Any]] = {
        "GPT2": {
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 2,
            "attn_pdrop": 0,
            "embd_pdrop": 0,
            "resid_pdrop": 0,
        },
        "Llama": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        },
        "Bert": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "DistilBert": {
            "dim": 8,
            "n_layers": 1,
            "n_heads": 2,
            "hidden_dim": 8,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        },
        "T5": {
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 8,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    }
    family = next(name for name in reversed(small) if kind.startswith(name))
    if kind.endswith("TokenClassification") and family == "GPT2":
        small[family]["classifier_dropout"] = 0.0
    ids: Any = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    labels: Any = {"num_labels": 3} if "Classification" in kind else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=11, **small[family], **ids, **labels
    )
    return getattr(transformers, kind)(config)


def heads() -> dict[str, float]:
    """For each head by how much two microbatches of two equal rows move its parameters, of what one batch of four moves them."""
    import tempfile

    import transformers

    transformers.logging.set_verbosity_error()
    gc.collect()
    gc.freeze()  # Trainer collects garbage after each run.

    def moved(model: Any, items: list[Batch], folder: str) -> Tensor:
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(items),
            max_steps=1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        optimizers = torch.optim.SGD(model.parameters(), lr=1.0), None
        trainer = transformers.Trainer(
            model=model,
            args=args,
            train_dataset=items,
            data_collator=lambda items: items[0],
            optimizers=optimizers,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return before - torch.cat([p.detach().flatten() for p in model.parameters()])

    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, labels in HEADS.items():
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(3, 11, (4, 4), generator=generator)
            wanted = {"tokens": ids, "classes": ids[:, 0] % 3, "token classes": ids % 3}[labels]
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": wanted}
            parts = [{key: x[at : at + 2] for key, x in batch.items()} for at in (0, 2)]
            one, two = moved(head(kind), [batch], folder), moved(head(kind), parts, folder)
            ratios[kind] = float((two @ one) / (one @ one))
    return ratios


def torchtune_weights() -> dict[str, tuple[float, float]]:
    """What the recipe gives a token of the first row, of 2 tokens, and of the second, of 4; and what the equation does."""
    counted, predicted = (2, 4), (1, 3)
    recipe = [c / p / sum(counted) for c, p in zip(counted, predicted, strict=True)]
    return {
        "recipe": (recipe[0], recipe[1]),
        "equation": (1 / sum(predicted), 1 / sum(predicted)),
    }


def torchtune_losses() -> dict[str, float]:
    """The loss that the recipe reports of these two rows in a microbatch each, by its own run and by hand, and that of the equation."""
    from benchmarks.conformance import with_torchtune
    from benchmarks.conformance.with_transformers import gpt2
    from purestep.testing.problem import causal_lm

    def row(*ids: int) -> Batch:
        inputs = torch.tensor([ids])
        labels = inputs.clone()
        labels[:, 0] = -100
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels}

    rows = [row(1, 2), row(3, 4, 1, 2)]
    model = gpt2()
    problem = Problem(causal_lm(model), model, RATE)
    sums = [float(problem.losses(model, batch).sum().detach()) for batch in rows]
    first, second = sums
    weights = torchtune_weights()
    optimizer = problem.optimizer(model)
    reported = with_torchtune.recipe(model, optimizer, rows, problem)["loss"]
    return {
        "reported": reported,
        "by hand": first * weights["recipe"][0] + second * weights["recipe"][1],
        "equation": (first + second) / 4,
    }


def evaluation_losses() -> dict[str, float]:
    """What ``Trainer.evaluate`` says of a batch of one token and one of three, and of both as one batch."""
    from benchmarks.conformance.with_transformers import COLUMNS

    (column,) = [column for column in COLUMNS if column.name.startswith("Trainer.evaluate")]
    trainer = column.make()
    task = trainer.abilities.task
    problem = Problem(task, task.model, RATE)

    def row(*labels: int) -> Batch:
        ids = torch.tensor([[1, 2, 3, 4]])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.tensor([labels]),
        }

    one, three = row(-100, 2, -100, -100), row(-100, 2, 3, 4)
    trainer.start(problem, 1)
    whole = {key: torch.cat([one[key], three[key]]) for key in one}
    return {
        "of the first": trainer.evaluate([[one]]),
        "of the second": trainer.evaluate([[three]]),
        "of both": trainer.evaluate([[one, three]]),
        "of both as one batch": trainer.evaluate([[whole]]),
    }


def torchopt_buffers() -> dict[str, float]:
    """The momentum after gradients 2 and 1, with μ = 0.5: going on, and where the state is put back into a new optimizer between the two."""
    import torchopt

    params = {"w": torch.zeros(())}

    def after(optimizer: Any, state: Any, gradient: float) -> tuple[float, Any]:
        grads = {"w": torch.tensor(gradient)}
        updates, state = optimizer.update(grads, state, params=params, inplace=False)
        return -float(updates["w"]), state

    first, second = (torchopt.sgd(1.0, momentum=0.5) for _ in range(2))
    _, state = after(first, first.init(params), 2.0)
    return {"going on": after(first, state, 1.0)[0], "put back": after(second, state, 1.0)[0]}
