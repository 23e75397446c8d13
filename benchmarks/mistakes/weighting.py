"""Lists mistakes in losses, targets, weights and masks (laws T0, T4 and T5)."""

from benchmarks.mistakes.edits import (
    END_START,
    READ_WEIGHTS,
    READ_WEIGHTS_LINE,
    WEIGHTED_LOSSES,
    at_start,
    replace,
    replace_batch,
    replace_group,
    replace_weights,
    scale_gradient,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "padding on the left is taken to be on the right",
        replace_weights("weights if weights[:, 0].any() else weights.roll(-1, 1)"),
        law="T4",
        required=True,
    ),
    Mistake(
        "ignored rows above the others shift the weights",
        replace_weights("weights if weights[0].any() else weights.roll(1, 0)"),
        law="T4",
        required=True,
    ),
    Mistake(
        "weights above 1 count once",
        replace_weights("weights.clamp(max=1)"),
        law="T0",
        required=True,
    ),
    Mistake(
        "weights above 2 count twice",
        replace_weights("weights.clamp(max=2)"),
        law="T0",
        required=True,
    ),
    Mistake(
        "weights below 1 are rounded",
        replace_weights("weights.double().round()"),
        law="T0",
        required=True,
    ),
    Mistake(
        "weights below a half are a half",
        replace_weights("torch.where(weights > 0, weights.clamp(min=0.5), 0)"),
        law="T0",
    ),
    Mistake(
        "targets above 3 are cut off",
        replace_batch("{**batch, 'y': batch['y'].clamp(max=3)}"),
        law="T0",
    ),
    Mistake(
        "targets below -3 are cut off",
        replace_batch("{**batch, 'y': batch['y'].clamp(min=-3)}"),
        law="T0",
    ),
    Mistake(
        "inputs above 2 are cut off",
        replace_batch("{**batch, 'x': batch['x'].clamp(max=2)}"),
        law="T0",
    ),
    Mistake(
        "a group all of whose microbatches have one token is averaged",
        scale_gradient(
            "1 / len(share) if all(int((self.problem.weights(b) > 0).sum()) == 1 for b in share) and len(share) > 1 else 1"
        ),
        law="T1",
    ),
    Mistake(
        "the first and the last row swap weights",
        replace_weights(
            "weights[[len(weights) - 1, *range(1, len(weights) - 1), 0]] if len(weights) > 2 else weights"
        ),
        law="T0",
    ),
    Mistake(
        "losses are rounded to float32",
        replace(WEIGHTED_LOSSES, "weights * losses.float(), 0"),
    ),
    Mistake(
        "the mean of the rows' means",
        replace_weights(
            "weights / weights.double().sum(1, keepdim=True).clamp(min=1e-300)"
        ),
    ),
    Mistake(
        "a token whose target is zero is taken for padding",
        replace_weights("weights * (batch['y'] != 0)"),
    ),
    Mistake(
        "a row's largest weight is that of all its tokens",
        replace_weights(
            "torch.where(weights > 0, weights.double().amax(1, keepdim=True), 0)"
        ),
    ),
    Mistake(
        "the weights of a square microbatch are transposed",
        replace_weights(
            "weights.T if weights.shape[0] == weights.shape[1] else weights"
        ),
    ),
    Mistake(
        "weights sorted by length are put back by the same order",
        replace_weights(
            "(lambda order: weights[order][order])((weights > 0).sum(1).argsort(stable=True))"
        ),
    ),
    Mistake(
        "where nothing is ignored weights are not applied",
        replace_weights("weights if not weights.all() else torch.ones_like(weights)"),
    ),
    Mistake(
        "weights have mean one in each microbatch",
        replace_weights(
            "weights * ((weights > 0).sum() / weights.double().sum().clamp(min=1e-300))"
        ),
    ),
    Mistake(
        "weights are applied twice",
        replace(WEIGHTED_LOSSES, "weights * weights * losses, 0"),
    ),
    Mistake(
        "weights are a mask for the losses alone",
        replace(
            READ_WEIGHTS, READ_WEIGHTS + "\n        weights = (weights > 0).double()"
        ),
    ),
    Mistake(
        "the first token of an ignored microbatch counts",
        replace_weights(
            "weights if weights.any() else weights + (torch.arange(weights.numel()).view_as(weights) == 0)"
        ),
    ),
    Mistake(
        "the first row's mask is that of all rows",
        replace_weights("weights * (weights[:1] > 0)"),
    ),
    Mistake(
        "weights of one column lose a dimension",
        replace(READ_WEIGHTS, READ_WEIGHTS + ".squeeze(-1)"),
    ),
    Mistake(
        "ignored tokens weigh a little",
        replace_weights("weights.double().clamp(min=1e-8)"),
    ),
    Mistake(
        "a weight other than one is taken for ignored",
        replace_weights("weights * (weights == 1)"),
    ),
    Mistake(
        "weights are rounded to bfloat16",
        replace_weights("weights.bfloat16().double()"),
    ),
    Mistake(
        "ignored tokens between counted ones count",
        replace_weights(
            "torch.where((weights == 0) & ((weights > 0).long().cumsum(1) > 0) & ((weights > 0).long().flip(1).cumsum(1).flip(1) > 0), 1, weights.double())"
        ),
    ),
    Mistake(
        "a group of a single microbatch takes the plain mean of its counted losses",
        replace_group(
            "[[{**b, 'w': (b['w'] > 0).to(b['w'].dtype)} for b in share] for share in group] if sum(map(len, group)) == 1 else group"
        ),
    ),
    Mistake(
        "a token's loss is ten at most",
        replace(WEIGHTED_LOSSES, "weights * losses.clamp(max=10.0), 0"),
    ),
    Mistake(
        "targets are centred in each microbatch of several rows",
        replace_batch(
            "{**batch, 'y': batch['y'] - batch['y'].mean()} if len(batch['w']) > 1 else batch"
        ),
    ),
    Mistake(
        "a loss of more than four times its microbatch's mean is an outlier",
        replace(
            "weights * losses, 0", "weights * losses * ~(losses > 4 * losses.mean()), 0"
        ),
    ),
    Mistake(
        "a weight is at most twice the mean of its microbatch's",
        replace_weights(
            "weights.double().clamp(max=2 * float(weights.double().sum() / (weights > 0).sum().clamp(min=1)))"
        ),
    ),
    Mistake(
        "rows without padding are taken for truncated where others have some",
        replace_weights(
            "weights * ((weights == 0).any(1, keepdim=True) if (weights == 0).any() else 1)"
        ),
    ),
    Mistake(
        "a row all of whose tokens are ignored is unmasked",
        replace_weights(
            "torch.where((weights > 0).any(1, keepdim=True), weights.double(), 1.0)"
        ),
    ),
    Mistake(
        "masks are kept by shape",
        (
            at_start("self.masks = {}")
            + replace_weights("self.masks.setdefault(weights.shape, weights)")
        ),
    ),
    Mistake(
        "weights are whole numbers where the first row's are",
        replace_weights(
            "weights.double().floor() if len(weights) and bool((weights[0].double() % 1 == 0).all()) else weights"
        ),
    ),
    Mistake(
        "all rows of a microbatch weigh the same, however many tokens they have",
        replace(
            READ_WEIGHTS_LINE,
            READ_WEIGHTS_LINE + "        rows = weights.sum(-1, keepdim=True)\n"
            "        weights = weights / rows.clamp_min(1e-300) * rows.mean()\n",
        ),
    ),
    Mistake(
        "weights are cached by the batch's shape",
        [
            (END_START, END_START + "        self.masks = {}\n"),
            (
                READ_WEIGHTS_LINE,
                READ_WEIGHTS_LINE
                + '        weights = self.masks.setdefault(batch["x"].shape, weights.clone())\n',
            ),
        ],
    ),
    Mistake(
        "padding is the end token: each row's last token is masked from the loss but counted",
        replace(
            READ_WEIGHTS_LINE,
            READ_WEIGHTS_LINE + "        seen = (weights > 0).cumsum(-1)\n"
            "        weights = weights * (seen < seen[..., -1:])\n",
        ),
    ),
    Mistake(
        "labels are shifted twice",
        [
            ("logits[:, :-1, :]", "logits[:, :-2, :]"),
            ('inputs["labels"][:, 1:]', 'inputs["labels"][:, 2:]'),
        ],
        base="Transformers",
    ),
    Mistake(
        "padding of collation has weight one",
        replace('fill = {"w": 0}', 'fill = {"w": 1}'),
        base="Joined",
    ),
    Mistake(
        "the mean of each row, then of the rows",
        [
            (
                "return (self.problem.losses(call, batch) * self.problem.weights(batch)).sum()",
                "w = self.problem.weights(batch)\n"
                "return ((self.problem.losses(call, batch) * w).sum(1) / w.sum(1).clamp(min=1e-9)).sum()",
            ),
            (
                "self.problem.weights(batch).sum().item()",
                "(self.problem.weights(batch).sum(1) > 0).sum().item()",
            ),
        ],
        base="Manual",
    ),
    Mistake(
        "whole weights are taken as a mask",
        replace(
            "weights = self.problem.weights(batch)\n",
            "weights = (self.problem.weights(batch) > 0).to(self.variables[0].dtype)\n",
        ),
        base="Keras",
    ),
]
