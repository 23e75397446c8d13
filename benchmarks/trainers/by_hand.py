"""The smallest cases again, checked by hand: the arithmetic is in the report, and each trainer is run on it here."""

import copy
import gc
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.trainers.column import Bigram, Column
from purestep.testing.problem import REGRESSION, Batch, Linear, Problem
from purestep.testing.trainer import Switchable

RATE = 1.0
"""θ = θ - ∇L, from a model that says its bias, (0, 0): a token of label 0 has the gradient (-½, ½), one of label 1 (½, -½)."""

NONE = -100
Rows = list[list[int]]
"""A microbatch: the labels of each row."""

CASES: dict[str, tuple[list[list[Rows]], float, float]] = {
    "equal": ([[[[0, 0]], [[0, 1]]]], 0.25, 0.25),
    "unequal rows": ([[[[0], [0]], [[0, 1]]]], 0.25, 0.25),
    "unequal tokens": ([[[[0]], [[1, 1, 1]]]], -0.25, 0.0),
    "one empty": ([[[[0]], [[NONE]]]], 0.5, 0.25),
    "all empty": ([[[[NONE]]]], 0.0, 0.0),
    "momentum": ([[[[0]]], [[[NONE]]]], 0.5, 0.75),
}
"""Updates, each of microbatches; the first bias after them by the equation, and by a mean of means: the report works them out.
In the last case momentum is ½, and an update without labels follows one with a label."""

FIRST = "first labelled"
"""One row, 0, whose first token has a label, too, which nothing predicts: the equation gives 0.5."""

CUTS = ("equal", "unequal rows", "unequal tokens")
"""Those of T1."""

UNEVEN: dict[str, tuple[list[list[Rows]], float]] = {
    "3 + 1": ([[[[0]], [[0]], [[1]]], [[[1]]]], 0.0),
    "1 + 0": ([[[[0]]], []], 0.5),
}
"""One update, of microbatches for each of two ranks; the first bias after it by the equation."""
HANG = 20.0
"""Seconds."""


def labels_of(rows: Rows) -> Batch:
    """Rows of tokens, each of which has a label, after a first one that has none."""
    length = 1 + max(map(len, rows))
    labels = torch.tensor(
        [[NONE, *row, *[NONE] * (length - 1 - len(row))] for row in rows]
    )
    known = torch.tensor([[0, *row, *[NONE] * (length - 1 - len(row))] for row in rows])
    return {
        "input_ids": known.clamp(min=0),
        "attention_mask": torch.ones_like(labels),
        "labels": labels,
    }


def targets_of(rows: Rows, dtype: torch.dtype) -> Batch:
    """The same for a linear model at x = 0: the gradients of (b - y)² are those of the labels where y = ¼ and -¼."""
    labels = labels_of(rows)["labels"]
    y = torch.where(labels == 0, 0.25, -0.25).to(dtype)
    return {"x": torch.zeros(*y.shape, 2, dtype=dtype), "y": y, "w": labels != NONE}


class Said(NamedTuple):
    """A problem whose model says its bias, and where the bias stands."""

    problem: Problem
    bias: str
    first_labels: bool = False
    """Whether a label at a row's first place is predicted by nothing."""
    rows_of_one: bool = False
    """Whether a row has one label."""


HEADS_OF_TOKENS = {
    "GPT2LMHeadModel": "transformer.wte.weight",
    "LlamaForCausalLM": "lm_head.weight",
    "GPT2ForTokenClassification": "classifier.weight",
    "GPT2ForSequenceClassification": "score.weight",
    "Transformer": "lm_head.w_out.weight",
    "Llama3Model": "lm_head.weight",
}
"""Of transformers' models, OLMo-core's and torchtitan's, the parameter that is the logits, where the hidden state is 1."""


def said_by(trainer: Any, momentum: float = 0.0) -> Said | None:
    """A model that says its bias; None where the trainer learns something else than labels."""
    task, dtype = trainer.capabilities.task, trainer.capabilities.dtype
    if task is REGRESSION:
        return Said(Problem(task, Linear([0, 0], 0, dtype), RATE, momentum), "bias")
    if isinstance(task.model, Bigram):
        model = Bigram(torch.ones(2, 1, dtype=dtype), torch.zeros(2, 1, dtype=dtype))
        shifts = task.name == "next tokens of logits"
        return Said(Problem(task, model, RATE, momentum), "head.weight", shifts)
    kind = type(task.model).__name__
    if kind not in HEADS_OF_TOKENS or task.name in ("policy gradient", "preferences"):
        return None
    # ASFT weighs each token by its probability, which is ½.
    rate = 2 * RATE if task.name == "asft" else RATE
    return Said(
        Problem(task, constant(kind), rate, momentum),
        HEADS_OF_TOKENS[kind],
        task.name in ("next tokens", "next tokens of logits", "asft"),
        task.name == "classes of rows",
    )


def constant(kind: str) -> Any:
    """One of these models with the hidden state 1 everywhere, for two labels, whose logits are 0."""
    if kind in ("Transformer", "Llama3Model"):
        from benchmarks.trainers import with_olmo, with_torchtitan

        small = with_olmo.small if kind == "Transformer" else with_torchtitan.small
        decoder = small(2, 2, 1)
        with torch.no_grad():
            for name, p in decoder.named_parameters():
                # So far from 0 that the norm's ε is nothing; and no block adds to it.
                p.fill_(1024 if "embeddings" in name else "norm" in name)
        return decoder
    import transformers

    ids: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    if kind.startswith("Llama"):
        # √(1² + 1²) / 2 is 1: what RMSNorm divides by.
        config: Any = transformers.LlamaConfig(
            vocab_size=2, hidden_size=2, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=2, rms_norm_eps=0.0, **ids,
        )  # fmt: skip
        model: Any = transformers.LlamaForCausalLM(config)
        layer = model.model.layers[0]
        nn.init.ones_(model.model.embed_tokens.weight)
        zero = [layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight]
        zero += [model.lm_head.weight]
    else:
        config = transformers.GPT2Config(
            vocab_size=2, n_positions=64, n_embd=1, n_layer=1, n_head=1, num_labels=2,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, classifier_dropout=0.0, **ids,
        )  # fmt: skip
        model = getattr(transformers, kind)(config)
        # The last norm of one number is its bias.
        nn.init.ones_(model.transformer.ln_f.bias)
        zero = [dict(model.named_parameters())[HEADS_OF_TOKENS[kind]]]
    for weight in zero:
        nn.init.zeros_(weight)
    return model


def problem_for(trainer: Any, momentum: float = 0.0) -> Problem | None:
    """Makes the problem of a model whose logits are its bias, if it has one."""
    said = said_by(trainer, momentum)
    return said and said.problem


def bias_after(
    trainer: Any,
    said: Said,
    updates: Sequence[Sequence[Sequence[Rows]]],
    first_labels: bool = False,
) -> Any:
    """The first bias, after updates each of which has microbatches for each rank; in words, if the trainer refuses."""
    dtype, problem = trainer.capabilities.dtype, said.problem

    def batch(rows: Rows) -> Batch:
        if problem.task is REGRESSION:
            return targets_of(rows, dtype)
        if said.rows_of_one:
            rows = [[label] for row in rows for label in row]
        batch = labels_of(rows)
        if first_labels:
            batch["labels"][:, 0] = batch["input_ids"][:, 0]
        return batch

    try:
        if isinstance(trainer, Switchable):
            trainer.select_setting(trainer.settings[0])
        trainer.start(problem, len(updates[0]))
        for update in updates:
            trainer.update([[batch(rows) for rows in share] for share in update])
        seen = [
            float(each.params[said.bias].flatten()[0]) for each in trainer.observe()
        ]
    except Exception as error:
        raised = (
            error.__cause__ or error
        )  # Processes raise from what a rank has raised.
        return "hangs" if "is silent after" in str(error) else type(raised).__name__
    return (
        seen[0] if len({str(bias) for bias in seen}) == 1 else f"ranks differ: {seen}"
    )


def biases(column: Column) -> dict[str, Any]:
    """What a trainer makes of each case; each microbatch on a rank of its own, where there are several."""
    trainer = column.make()
    found: dict[str, Any] = {}
    for name, (updates, _, _) in CASES.items():
        said = said_by(trainer, 0.5 if name == "momentum" else 0.0)
        if said is None:
            continue
        found[name] = bias_after(trainer, said, [[update] for update in updates])
        if trainer.capabilities.ranks > 1 and len(updates[0]) > 1:
            spread = [[[part] for part in update] for update in updates]
            found[f"{name}, 2 ranks"] = bias_after(trainer, said, spread)
    said = said_by(trainer)
    if said is not None and said.first_labels:
        found[FIRST] = bias_after(trainer, said, [[[[[0]]]]], first_labels=True)
    return found


def uneven(column: Column) -> dict[str, Any]:
    """What a trainer makes of ranks that hold different numbers of microbatches."""
    capabilities = column.make().capabilities
    if (
        capabilities.ranks == 1
        or not column.takes_uneven
        or problem_for(column.make()) is None
    ):
        return {}
    found = {}
    for name, (update, _) in UNEVEN.items():
        trainer = (
            column.make() if capabilities.uneven_ranks else column.make(timeout=HANG)
        )
        said = said_by(trainer)
        assert said is not None
        # Once with as many on each, so that what is imported is not waited for below.
        bias_after(trainer, said, [[[[[0]]], [[[1]]]]])
        found[name] = bias_after(trainer, said, [update])
    return found


def moved_by_momentum(trainer: Any) -> float | None:
    """How far an update without labels moves the parameters, of what one with labels did before it, where momentum is ½; None: not asked."""
    task, dtype = trainer.capabilities.task, trainer.capabilities.dtype
    if task is REGRESSION:
        problem = Problem(task, Linear([0, 0], 0, dtype), RATE, 0.5)
        one, none = targets_of([[0, 1, 0]], dtype), targets_of([[NONE] * 3], dtype)
    else:
        problem = Problem(task, task.model, RATE, 0.5)
        one, none = labels_of([[1, 2, 3]]), labels_of([[NONE] * 3])
    after = []
    try:
        for updates in ([one], [one, none]):
            trainer.start(problem, 1)
            for batch in updates:
                trainer.update([[batch]])
            after.append(trainer.observe()[0].params)
    except Exception:
        return None
    first, second = after
    start = problem.params()
    step = torch.stack([(first[name] - p).norm() for name, p in start.items()]).norm()
    more = torch.stack([(second[name] - first[name]).norm() for name in first]).norm()
    ratio = float(more / step)
    return ratio if ratio > 1e-6 or math.isnan(ratio) else 0.0


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
            wanted = {
                "tokens": ids,
                "classes": ids[:, 0] % 3,
                "token classes": ids % 3,
            }[labels]
            batch = {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": wanted,
            }
            parts = [{key: x[at : at + 2] for key, x in batch.items()} for at in (0, 2)]
            one, two = (
                moved(head(kind), [batch], folder),
                moved(head(kind), parts, folder),
            )
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
    from benchmarks.trainers import with_torchtune
    from benchmarks.trainers.with_transformers import gpt2
    from purestep.testing.problem import causal_lm

    def row(*ids: int) -> Batch:
        inputs = torch.tensor([ids])
        labels = inputs.clone()
        labels[:, 0] = -100
        return {
            "input_ids": inputs,
            "attention_mask": torch.ones_like(inputs),
            "labels": labels,
        }

    rows = [row(1, 2), row(3, 4, 1, 2)]
    model = gpt2()
    problem = Problem(causal_lm(model), model, 0.5)
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
    from benchmarks.trainers.with_transformers import COLUMNS

    (column,) = [
        column for column in COLUMNS if column.name.startswith("Trainer.evaluate")
    ]
    trainer = column.make()
    task = trainer.capabilities.task
    problem = Problem(task, task.model, 0.5)

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

    leaf = torch.zeros((), requires_grad=True)
    one, other = (torchopt.SGD([leaf], 1.0, momentum=0.5) for _ in range(2))
    leaf.grad = torch.tensor(2.0)
    one.step()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    before = float(leaf)
    leaf.grad = torch.tensor(1.0)
    other.step()
    return {
        "going on": after(first, state, 1.0)[0],
        "put back": after(second, state, 1.0)[0],
        "object put back": before - float(leaf),
    }
