"""A section for each project: one paragraph, the sentences by which it is right, and what was followed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.trainers.findings import BROKEN, finding, title

Report = Mapping[str, Any]


def sections(report: Report) -> str:
    """All projects, in the table's order."""
    columns: dict[str, list[Any]] = {}
    for column in report["columns"]:
        columns.setdefault(column["project"], []).append(column)
    parts = ["## The projects"]
    for project, them in columns.items():
        parts += [f"### {project}", _packages(them), _paragraph(report, project)]
        parts += [_designs(report, them), _usages(them)]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _paragraph(report: Report, project: str) -> str:
    return PARAGRAPHS[project](report)


def _packages(columns: Sequence[Any]) -> str:
    versions = {
        name: version for each in columns for name, version in each["versions"].items()
    }
    return (
        f"With {', '.join(f'{name} {version}' for name, version in versions.items())}."
    )


def _designs(report: Report, columns: Sequence[Any]) -> str:
    """Lists the sentences, each with its laws and variants."""
    said: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for column in columns:
        for law, sentence in column["promises"].items():
            if finding(column, law) == "by design":
                laws, names = said.setdefault(sentence, ({}, {}))
                laws[title(report, law)] = names[column["name"]] = None
    lines = [
        "| by design | trainers | what its documentation says |",
        "| --- | --- | --- |",
    ]
    for sentence, (laws, names) in said.items():
        those = "all" if len(names) == len(columns) > 1 else "; ".join(names)
        lines.append(f"| {', '.join(laws)} | {those} | {sentence} |")
    return "\n".join(lines) if said else ""


def _usages(columns: Sequence[Any]) -> str:
    """Names the documentation and the settings that were followed."""
    names: dict[tuple[str, str], list[str]] = {}
    for column in columns:
        same = column["source"], column["follows"]
        names.setdefault(same, []).append(column["name"])
    lines: list[str] = []
    for (source, follows), them in names.items():
        lines += [f"{'; '.join(them)}{', from ' if source else ''}{source}:\n"]
        lines += [f"    {line}".rstrip() for line in follows.split("\n")]
        lines.append("")
    return "\n".join(lines)


def _column(report: Report, name: str) -> Any:
    return next(column for column in report["columns"] if column["name"] == name)


def _bias(report: Report, name: str, case: str) -> str:
    """A number of the cases by hand, by the trainer's own run."""
    value = _column(report, name)["biases"][case]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def broken(report: Report, column: Any) -> bool:
    """Whether a cell of it is bold."""
    laws = column["verdicts"]
    return any(finding(column, law) in BROKEN for law in laws)


def _pytorch(report: Report) -> str:
    means = _bias(report, "PyTorch loop", "unequal tokens")
    sums = _bias(report, "PyTorch loop, sums", "unequal tokens")
    ddp = _column(report, "DDP")["uneven"]["3 + 1"]
    return f"""
The notes' loop divides each microbatch's mean by the number of microbatches. For 0 | 1 1 1 the mean of means is (-½ + ½) / 2 = 0, and the loop
ends at {means}. The equation has (-½ + ½ + ½ + ½) / 4 = ¼, and the loop of sums ends at {sums}. DistributedDataParallel exchanges gradients in
the last backward pass of each rank, so that numbers may differ but not be 0: with 3 + 1, it averages (-½ - ½ + ½) / 3 and ½, to (-1/6 + ½) / 2 =
1/6, and ends at {ddp:.4g}. fully_shard gathers parameters in each forward pass, and waits for a rank that has fewer. What to change: sums over the
count of all ranks; as many microbatches on each rank, those without data with labels that are all -100; or `Join`.
"""


def _accelerate(report: Report) -> str:
    means = _bias(report, "Accelerate, accumulate", "unequal tokens")
    sums = _bias(report, "Accelerate, variable size", "unequal tokens")
    return f"""
`accumulate` divides each microbatch's mean by the number of microbatches: for 0 | 1 1 1 it ends at {means}, by (-½ + ½) / 2 = 0. The guide's loop for
samples of variable size counts all labels on all ranks first, and ends at {sums}, as the equation does. Ranks with different numbers of
microbatches are not what its loaders bring, unless `even_batches=False`. What to change: that guide's loop, and no step where it counts 0.
"""


def _transformers(report: Report) -> str:
    heads = report["heads"]
    right = [name for name, ratio in heads.items() if abs(ratio - 1) < 0.01]
    doubled = [name for name, ratio in heads.items() if abs(ratio - 2) < 0.01]
    evaluation = report["evaluation"]
    first, second = evaluation["of the first"], evaluation["of the second"]
    classes = _bias(report, "Trainer, GPT-2 classes", "equal")
    labelled = _bias(report, "Trainer, GPT-2", "first labelled")
    llama = _bias(report, "Trainer, Llama", "first labelled")
    return f"""
For models of next tokens, `Trainer` divides by the labels of the whole group on all ranks, and the update is right. Three things are not.
It seeds the global generators of Python, NumPy and torch before training, so that a program that draws from them later draws other numbers.
Where a loss is no number, it reports the sum so far instead (`logging_nan_inf_filter`); parameters are right.

- *Doubled heads.* `Trainer` asks a model whether its `forward` takes `**kwargs`. If so, it passes `num_items_in_batch`, and does not divide the
loss by `gradient_accumulation_steps`. Models that classify rows or tokens take `**kwargs` and return a mean without that number. For
0 0 | 0 1 the gradient is then (-½ - ½) / 2 + (-½ + ½) / 2 = -½. The step ends at {classes}, where the equation has ¼. Two microbatches of two rows
move parameters {heads[doubled[0]]:.4f} times as far as one batch of the same four. So it is in {len(doubled)} of {len(heads)} models: {", ".join(doubled)}. In
{" and ".join(right)} they move {heads[right[0]]:.4f} times as far. It is known upstream: huggingface/transformers#47688. What to set: `compute_loss_func=`, which divides a sum by `num_items_in_batch`;
`model.accepts_loss_kwargs = False` brings back the mean of means.
- *GPT-2's count.* `Trainer` counts the labels behind each row's first where it
knows that the loss shifts them (huggingface/transformers#46204). It goes by `model.loss_type`, which transformers takes from the name of the
class: `LlamaForCausalLM` has one, `GPT2LMHeadModel` has none. One row of one predicted 0, whose first token has a label as in text, counts 2: the step
is ½ / 2, and ends at {labelled}; Llama's ends at {llama}. What to set: `model.loss_type = "ForCausalLM"`, or -100 at the first place of each row.
- *Evaluation.* `Trainer.evaluate` repeats each batch's mean loss as often as a full batch has rows, and takes the mean. Take one token
with loss {first:.6f}, and three with mean loss {second:.6f}. The equation has (1 · {first:.6f} + 3 · {second:.6f}) / 4 = {(first + 3 * second) / 4:.6f}. One batch of both
gives {evaluation["of both as one batch"]:.6f}. Two batches give ({first:.6f} + {second:.6f}) / 2 = {evaluation["of both"]:.6f}. What to change: sum the losses in `compute_metrics`,
and divide once.
"""


def _trl(report: Report) -> str:
    sft = _bias(report, "TRL SFT, Llama", "unequal tokens")
    return f"""
`SFTTrainer` divides sums by the labels of the whole group: for 0 | 1 1 1 it ends at {sft}, as the equation does. GRPO's "dapo" does the same; "bnpo" divides
by the tokens of the microbatch, and says so. DPO's loss is a mean over the pairs of a microbatch, of which `Trainer` takes the mean: three equal
pairs as 2 | 1 weigh ¼, ¼ and ½ instead of ⅓ each. It matters in the last group of an epoch alone, since all others have full microbatches. It
seeds the global generators, as `Trainer` does.
"""


def _llamafactory(report: Report) -> str:
    equal = _bias(report, "LLaMA-Factory, ASFT", "equal")
    tokens = _bias(report, "LLaMA-Factory, ASFT", "unequal tokens")
    empty = _bias(report, "LLaMA-Factory, ASFT", "one empty")
    return f"""
With `use_asft_loss`, its trainer has a `compute_loss` that takes no `num_items_in_batch`, and returns the mean over the labels of a microbatch. `Trainer`
still takes it that the model has divided by the count of the group, and does not divide by `gradient_accumulation_steps`. So the update is as many times
too large. ASFT weighs a token by its probability, which is ½ here; a rate of 2 makes up for that. For 0 0 | 0 1 the gradient is -½ + 0, and the step
ends at {equal}, where the equation has ¼. For 0 | 1 1 1 it ends at {tokens}, by -½ + ½ = 0. A microbatch without labels divides 0 by 0 in its KL term: for 0 | nothing
the step ends at {empty}. What to change: [the page for its maintainers](trainers/upstream/LLAMA_FACTORY.md) has the lines. `use_dft_loss` and
`use_eaft_loss` take the count, and divide by it.
"""


def _axolotl(report: Report) -> str:
    return f"""
`AxolotlTrainer` turns `model_accepts_loss_kwargs` off where `forward` has no parameter `num_items_in_batch`. Llama's takes it in `**kwargs`, so that it is
off for Llama. Then nothing counts labels over the group, and each microbatch's mean counts alike. For 0 | 1 1 1 the step ends at
{_bias(report, "axolotl, Llama", "unequal tokens")}, by (-½ + ½) / 2 = 0, where `Trainer` alone ends at {_bias(report, "Trainer, Llama", "unequal tokens")}. It is known upstream:
axolotl-ai-cloud/axolotl#3982. What to set: `trainer.model_accepts_loss_kwargs = True` after it is made. [The page for its
maintainers](trainers/upstream/AXOLOTL.md) has numbers and the lines.
"""


def _olmo(report: Report) -> str:
    one = _bias(report, "OLMo-core, DDP", "unequal tokens")
    two = _bias(report, "OLMo-core, DDP", "unequal tokens, 2 ranks")
    empty = _bias(report, "OLMo-core, DDP", "one empty, 2 ranks")
    return f"""
`TransformerTrainModule` sums over the microbatches of a rank, and divides by the labels of that rank, so that its own cut changes nothing.
DDP then averages over ranks. For 0 | 1 1 1 one rank that has both ends at {one}, as the equation does. Two ranks end at {two}, by (-½ + ½) / 2 = 0. For
0 | nothing they end at {empty}, where the equation has ½. Its `OLMoDDPTrainModule` counts on all ranks, and divides by the mean count of a rank. What to
change: the same lines, as [the page for its maintainers](trainers/upstream/OLMO_CORE.md) has them. Here its optimizer is torch's SGD. It draws parameters
anew when it is made, and gets those of the case afterwards.
"""


def _torchtitan(report: Report) -> str:
    one = _bias(report, "torchtitan", "unequal tokens")
    two = _bias(report, "torchtitan", "unequal tokens, 2 ranks")
    replicated = _bias(report, "torchtitan, DDP", "unequal tokens, 2 ranks")
    return f"""
`Trainer.train_step` counts the labels of all microbatches and ranks before the first backward pass, since pytorch/torchtitan#2206. Each
microbatch contributes its sum over that count. `fully_shard` has the divide factor 1, so that gradients of ranks are added. For 0 | 1 1 1 one
rank ends at {one}, two shards at {two}, and two replicas at {replicated}, as the equation does. Where no label counts, the loss is 0 / 0, and its gradient is 0. The
optimizer steps on that, by momentum alone. Only then the loss is looked at, if it is logged, and a RuntimeError ends the run. That is each
step here, with `log_freq=1`. At its default of 10 nine of ten steps are made without an error. The whole constructor runs, from a configuration with a Llama of one
layer. Besides float32, torch's SGD and no clipping, two things are not the defaults. `spmd_backend` is "partial_dtensor": on several ranks "spmd_types" asks more of `fully_shard` than torch 2.13
has. And the column calls `set_force_sum_reduction_for_comms(True)` of `fully_shard`, as with `enable_fsdp_symm_mem`, because gloo has no PREMUL_SUM.
"""


def _lightning(report: Report) -> str:
    means = _bias(report, "Lightning", "unequal tokens")
    sums = _bias(report, "Lightning, sums", "unequal tokens")
    return f"""
`accumulate_grad_batches` divides each loss by the number of microbatches: for 0 | 1 1 1 it ends at {means}, by (-½ + ½) / 2 = 0. What to change: return
sums times `accumulate_grad_batches` over the group's count, which ends at {sums}, as the equation does.
"""


def _ignite(report: Report) -> str:
    return f"""
`create_supervised_trainer` divides each loss by `gradient_accumulation_steps`: for 0 | 1 1 1 it ends at {_bias(report, "Ignite", "unequal tokens")}, by
(-½ + ½) / 2 = 0. What to change: a loss that is a sum, times `gradient_accumulation_steps`, over the group's count.
"""


def _fastai(report: Report) -> str:
    return f"""
`GradientAccumulation` weighs means by their rows. For rows 0 and 0 | 0 1 it ends at {_bias(report, "fastai", "unequal rows")}, by (2 · (-½) + 1 · 0) / 3 = -⅓, where
the labels' mean is -¼. Rows with equally many labels are right, whatever their number. What to change: a loss that is a sum over the count.
"""


def _composer(report: Report) -> str:
    samples = _bias(report, "Composer, samples", "unequal rows")
    tokens = _bias(report, "Composer, tokens", "unequal rows")
    return f"""
It weighs means by their rows: for rows 0 and 0 | 0 1 it ends at {samples}, by (2 · (-½) + 1 · 0) / 3 = -⅓. With `accumulate_train_batch_on_tokens=True`,
and a data spec that counts labels, it ends at {tokens}, as the equation does, and raises a ZeroDivisionError where nothing counts. It seeds the global
generators with a random number.
"""


def _keras(report: Report) -> str:
    return f"""
The optimizer averages gradients over `gradient_accumulation_steps`: for 0 | 1 1 1 it ends at {_bias(report, "Keras", "unequal tokens")}, by (-½ + ½) / 2 = 0.
What to change: batches with equally many labels, or sample weights that sum to the group's mean.
"""


def _torchtune(report: Report) -> str:
    tune = report["torchtune"]
    tokens = _bias(report, "torchtune's recipe", "unequal tokens")
    rows = _bias(report, "torchtune's recipe", "unequal rows")
    masked = _bias(report, "torchtune's recipe, first labels ignored", "unequal tokens")
    return f"""
The recipe counts labels before it shifts them, and multiplies each mean by that count. For 0 | 1 1 1 in rows of 2 and 4 tokens it counts 2 and 4, not 1 and 3:
(2 · (-½) + 4 · ½) / 6 = 1/6, and its step ends at {tokens}, where the equation has ¼. For rows 0 and 0 | 0 1 it counts 4 and 3:
(4 · (-½) + 3 · 0) / 7 = -2/7, and its step ends at {rows}, where the equation has -¼. Of two rows of a GPT-2 it reports the loss {tune["reported"]:.6f}; by hand
that is {tune["by hand"]:.6f}, and the equation gives {tune["equation"]:.6f}. Where each row's first label is ignored, as in a masked prompt, both counts are the same:
it ends at {masked}. A microbatch without labels leaves gradients right, but the loss that it reports is 0 · nan; an update without any label
multiplies a gradient of zero by 1 / 0, and parameters are no numbers from then on. What to change: shift labels, then count; no step where it is 0.
"""


def _mlx(report: Report) -> str:
    return f"""
Its loss counts one place behind each row's end, where the collator has put a 0: `steps <= lengths[:, 1:]`. So 0 0 | 0 1 has the labels 0 0 0 | 0 1 0,
whose means are -½ and -1/6: it ends at {_bias(report, "mlx-lm", "equal")}, by their mean -⅓, where the equation has -¼. That is known upstream: ml-explore/mlx-lm#1697.
It divides each microbatch by its own count, and by their number: for 0 | 1 1 1 it ends at {_bias(report, "mlx-lm", "unequal tokens")}, by (-½ + ¼) / 2. Without
labels, it divides 0 by 0 where rows end at the batch's end, and parameters are no numbers from then on. What to change: `steps < lengths[:, 1:]`,
sums, and one division.
"""


def _torchopt(report: Report) -> str:
    found = report["torchopt"]
    return f"""
`torchopt.sgd` with momentum μ keeps a flag for the first call beside the state that it returns (`first_call` in torchopt/transform/trace.py).
On that call the buffer is m + g instead of μ m + g. From a fresh state, m = 0, and there is no difference. A state that is put back into a new
optimizer meets the flag again. With μ = 0.5 and the gradients 2 and 1, going on gives 0.5 · 2 + 1 = 2 (its own run: {found["going on"]:g}); put back between the
two, into new functions, 2 + 1 = 3 ({found["put back"]:g}), and by `load_state_dict` of `torchopt.SGD` as well ({found["object put back"]:g}). The object's `state_dict` has no
flag either. What to change: keep the optimizer as long as its state; or let a new one make one call on a state that is thrown away, before it
gets the saved one.
"""


def _optax(report: Report) -> str:
    steps = _bias(report, "optax.MultiSteps", "unequal tokens")
    mean = _bias(report, "optax.microbatch, MEAN", "unequal rows")
    return f"""
`MultiSteps` averages gradients over its mini-steps: for 0 | 1 1 1 it ends at {steps}, by (-½ + ½) / 2 = 0. `microbatching.microbatch` cuts a batch
itself, so that what *cut* asks of the others is asked by *settings* here: with `microbatch_size=1` and without. MEAN of the rows' means is
right where rows have equally many tokens: for rows 0 and 0 | 0 1 it ends at {mean}. What to set: `use_grad_mean=False`, or SUM, of gradients of sums, and one
division by the count. `MultiSteps` is saved in the middle of each accumulation, as bytes, and holds.
"""


def _tunix(report: Report) -> str:
    tokens = _bias(report, "tunix", "unequal tokens")
    empty = _bias(report, "tunix", "one empty")
    return f"""
`PeftTrainer` divides the loss of each microbatch by its labels, and gives the gradients to `optax.MultiSteps`, which averages them. For 0 | 1 1 1 the step
ends at {tokens}, by (-½ + ½) / 2 = 0, where the equation has ¼. For 0 | nothing it ends at {empty}, where the equation has ½. It is known upstream, and repaired in
the commits 1acb8de and 59deac3, which no release has yet: with the main branch of August 2026 both are those of the equation. What to change until then: keep as many
labels in each microbatch; or `with_loss_fn` of sums, times `gradient_accumulation_steps` over the group's count. No law here sees two more things. The `grad_norm` that it
logs is the mean of the norms of microbatches. A run that goes on from a checkpoint within a group counts its first microbatches twice. [The page for
its maintainers](trainers/upstream/TUNIX.md) has numbers and the lines. `train(skip_jit=True)` raises a TypeError; what is not compiled here runs in `jax.disable_jit()`.
"""


def _purestep(report: Report) -> str:
    return f"""
Sums over the count of all ranks, and no step where it is 0. For 0 | 1 1 1 it ends at {_bias(report, "purestep", "unequal tokens")}, as the equation does, on one rank and
on two; with 3 + 1 at {_column(report, "purestep")["uneven"]["3 + 1"]:g}. A loop that keeps its own optimizer gets the same gradients from `ps.make_backward`:
{_bias(report, "purestep, make_backward", "unequal tokens")}, and with 1 + 0 {_column(report, "purestep, make_backward")["uneven"]["1 + 0"]:g}.
"""


PARAGRAPHS: dict[str, Callable[[Report], str]] = {
    "PyTorch": _pytorch,
    "Accelerate": _accelerate,
    "transformers": _transformers,
    "TRL": _trl,
    "LLaMA-Factory": _llamafactory,
    "axolotl": _axolotl,
    "OLMo-core": _olmo,
    "torchtitan": _torchtitan,
    "Lightning": _lightning,
    "Ignite": _ignite,
    "fastai": _fastai,
    "Composer": _composer,
    "Keras": _keras,
    "torchtune": _torchtune,
    "mlx-lm": _mlx,
    "TorchOpt": _torchopt,
    "optax": _optax,
    "tunix": _tunix,
    "purestep": _purestep,
}
