"""Where the same mistakes were made, and which law sees each; and lines that were run by hand."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """Code that does not install or run here: its lines, and what they make of two microbatches.

    ``gives(sums, counts)`` is the gradient, of microbatches whose gradients have these sums, and which have so many labels.
    """

    project: str
    reference: str
    year: str
    wrong: str
    law: str
    lines: str
    gives: Callable[[Sequence[float], Sequence[int]], float]


SUMS, COUNTS = (-0.5, -1.0), (1, 4)
"""Of one label 0, and of the labels 0 0 0 1. The equation's gradient is (-½ - 1) / 5 = -0.3."""


def means(sums: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Of each microbatch."""
    return [s / n for s, n in zip(sums, counts, strict=True)]


def equation(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Σ Sₖ / N."""
    return sum(sums) / sum(counts)


def mean_of_means(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Σ (Sₖ / nₖ) / K."""
    return sum(means(sums, counts)) / len(sums)


LINES = [
    Line(
        "verl, SFT", "verl-project/verl#436, #3332", "2025",
        "the loss was divided after its backward pass: the gradient is K times the mean of means; since then it is the mean of means",
        "T1",
        "loss = torch.sum(loss) / (valid_token_this_rank + 1e-8) * dp_size\n"
        "loss.backward()\n"
        "[...] loss = self._compute_loss_and_backward(batch=micro_batch) / n_micro_batches",
        lambda sums, counts: sum(means(sums, counts)),
    ),
    Line(
        "TRL, GRPO", "huggingface/trl#3231, #3938", "2025",
        "normalised over the local batch; loss_type=\"dapo\" came of it",
        "T1, T2",
        "loss = (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)",
        mean_of_means,
    ),
    Line(
        "torchtitan", "pytorch/torchtitan#1842, #2206", "2025, 2026",
        "each microbatch's mean, divided by their number; all labels are counted first since",
        "T1, T2",
        "self.loss_fn = rescale_accumulated_loss(self.loss_fn, self.gradient_accumulation_steps)",
        mean_of_means,
    ),
    Line(
        "open-instruct, SFT", "allenai/open-instruct#1728, #1736", "2026",
        "the model's mean in Accelerate's accumulate; or a sum, divided by the number of microbatches",
        "T1",
        "with accelerator.accumulate(model):\n    outputs = model(**batch, use_cache=False)\n    loss = outputs.loss\n    accelerator.backward(loss)",
        mean_of_means,
    ),
    Line(
        "mlx-lm", "ml-explore/mlx-lm#1413, #1544; #1697", "2026",
        "each microbatch's mean, divided by their number; and a padding token behind each row counts",
        "T0, T1",
        "ce = ce.astype(mx.float32).sum() / ntoks\n[...] grad = tree_map(lambda x: x / grad_accum_steps, grad)",
        mean_of_means,
    ),
    Line(
        "unsloth-zoo", "unslothai/unsloth-zoo#1023", "2026",
        "one loss divides by the group's count, and is divided by K as well; another one multiplies by K to fix it",
        "T1",
        "chunked_nll: (S₁ + S₂) / N, then loss / gradient_accumulation_steps",
        lambda sums, counts: equation(sums, counts) / len(sums),
    ),
]  # fmt: skip
"""In the order of their years."""

HISTORY = [
    ("transformers", "#34191", "2024", "mean of microbatch means", "T1"),
    ("torchtune", "#1875", "2024", "mean of microbatch means", "T1"),
    ("transformers", "#34242", "2024", "labels counted over microbatches, not over ranks", "T2"),
    ("transformers", "#46204", "2026", "labels counted before the shift: one too many for each row", "T0"),
    ("transformers", "#46903", "2026", "labels counted as if shifted, for a model that does not shift", "T1"),
    ("torchtitan; TRL", "#4174; #6439", "2026", "the mask is applied to the numerator alone", "T0, T4"),
    ("TRL", "#6478", "2026", "counted on other labels than the loss uses", "T0"),
    ("verl", "#6049", "2026", "ranks of context parallelism left out of the count", "T2"),
    ("TRL", "#7100", "2026", "replicas of tensor parallelism counted again", "T2"),
    ("torchtune", "#1917", "2024", "the count is carried over from the last step", "T0, second update"),
    ("torchtune", "#2172, #2436, #2440", "2024, 2025", "the average over ranks is not undone, or undone by the wrong number", "T2"),
    ("transformers", "#37474", "2025", "a global loss is averaged over ranks again", "T2"),
    ("transformers", "#35808, #45305", "2025, 2026", "divided by the number of microbatches as well, or multiplied by it", "T1"),
    ("transformers", "#37208, #37766, #47688", "2025, 2026", "the count is accepted and ignored", "T1"),
    ("transformers", "#35078", "2024", "a factor of training is used in evaluation", "T1, evaluation"),
    ("tunix", "1acb8de, 59deac3", "2026", "mean of microbatch means, until after 0.1.7", "T1"),
    ("torchtitan", "#4194", "2026", "normalised after the backward pass: the loss is right, the gradient N times too large", "T0"),
    ("torchtitan", "#1732", "2025", "gradients scaled at every microbatch: a decaying average", "T1"),
    ("miles", "#3231", "2026", "no normaliser: the rate follows the number of tokens", "T0"),
    ("torchtune", "#2980", "2025", "no scaling where K = 1, with the local count", "T2, unequal numbers"),
    ("optax", "#828", "2024", "skipping by multiplication: one NaN stays", "T7"),
    ("torchtitan", "#3575", "2026", "zeroed inside of the loop: the last microbatch alone counts", "T1"),
    ("DeepSpeed", "#6550, #7967, #7985", "2024, 2026", "copied instead of added; the last microbatch added after the reduction", "T1, T2"),
    ("torchtune", "#1275", "2024", "the first step is taken after one microbatch", "T1"),
    ("transformers; Lightning", "#38837; #19987", "2025; 2024", "a short tail is divided by the full K", "T1"),
    ("torchtune", "#2745", "2025", "a tail leaks into the next group", "T1, second update"),
    ("torchtitan", "#4226", "2026", "the check for finite gradients comes after the step", "T7"),
    ("verl; torchtitan", "#6176; #1618", "2026; 2025", "ranks have different numbers of microbatches: a hang", "T2, unequal numbers"),
    ("nanochat; axolotl", "#177; #3688", "2025; 2026", "tokens per second off by K, or with padding", "T4, reports"),
    ("torchtune; NeMo-RL", "#2240; #1426", "2025", "the norm of one rank, or summed over microbatches", "T1, T2, reports"),
    ("tunix", "31733c7, 659881f", "2026", "the mean of the norms of microbatches; later the norm, divided by their number", "T1, reports"),
    ("Megatron-LM; Automodel", "#1652, #3672; #1408, #3359", "2025, 2026", "auxiliary losses scaled by local tokens, or not at all", "none: a black box has no such loss"),
    ("torchtune; Accelerate", "#1275; #3762", "2024; 2025", "gradients are reduced at every microbatch: right, but slow", "none: a black box has no traffic"),
]  # fmt: skip
"""Project, reference, year, what was wrong, and the law of the kit that sees it."""
