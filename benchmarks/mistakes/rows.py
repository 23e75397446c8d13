"""Lists mistakes that cut, repeat or leave out rows and columns (laws T0, T1 and T4)."""

from benchmarks.mistakes.edits import (
    APPEND_LOSS,
    BEGIN_UPDATE,
    CUT_COLUMNS,
    FOR_BATCH,
    READ_WEIGHTS,
    RETURN_WEIGHTED,
    after_update,
    at_start,
    define_function,
    replace,
    replace_batch,
    replace_group,
    replace_values,
    replace_weights,
    scale_gradient,
)
from benchmarks.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        "rows are cut at eight tokens",
        replace_batch(CUT_COLUMNS % "[:, :8]"),
        law="T0",
        required=True,
    ),
    Mistake(
        "the first microbatch says how long rows are",
        [
            (APPEND_LOSS, APPEND_LOSS + "            self.long = None\n"),
            *replace_batch(CUT_COLUMNS % "[:, :self.long]"),
            (
                FOR_BATCH,
                "            self.long = share[0]['w'].shape[1] if share else None\n"
                + FOR_BATCH,
            ),
            (
                "        total = sum(self.count(share) for share in group)\n",
                "        total = sum(self.count(share) for share in group)\n"
                "        self.long = None\n",
            ),
        ],
        law="T4",
        required=True,
    ),
    Mistake(
        "rows of unequal length lose their last column",
        replace_batch(
            "batch if batch['w'][:, -1].all() or not batch['w'][:, -1].any() or len(batch['w']) < 2 "
            "else " + CUT_COLUMNS % "[:, :-1]"
        ),
        law="T0",
        required=True,
    ),
    Mistake(
        "equal rows of a microbatch count once",
        [
            (
                "        counts = [",
                "        group = [[once(batch) for batch in share] for share in group]\n"
                "        counts = [",
            ),
            (
                "def norm(",
                "def once(batch):\n"
                "    kept = [i for i, row in enumerate(zip(*[x.tolist() for x in batch.values()]))\n"
                "            if row not in list(zip(*[x.tolist() for x in batch.values()]))[:i]]\n"
                "    return {key: x[kept] for key, x in batch.items()}\n\n\ndef norm(",
            ),
        ],
        law="T5",
        required=True,
    ),
    Mistake(
        "rows whose last token is ignored are left out",
        replace_weights("weights * (weights[:, -1:] > 0)"),
        law="T0",
    ),
    Mistake(
        "rows with one counted token are left out",
        replace_weights("weights * ((weights > 0).sum(1, keepdim=True) > 1)"),
        law="T0",
    ),
    Mistake(
        "microbatches of one row are left out",
        scale_gradient("len(batch['w']) != 1"),
        law="T0",
    ),
    Mistake(
        "microbatches of five rows or more count twice",
        scale_gradient("2 if len(batch['w']) > 4 else 1"),
        law="T0",
    ),
    Mistake(
        "the first token of rows of more than five is left out",
        replace_weights(
            "torch.cat([0 * weights[:, :1], weights[:, 1:]], 1) if weights.shape[1] > 5 else weights"
        ),
        law="T0",
    ),
    Mistake(
        "rows of the second microbatch above six tokens are cut",
        replace(
            FOR_BATCH,
            "            for at, batch in enumerate(share):\n"
            "                batch = {k: x[:, :6] if x.ndim > 1 and at == 1 else x for k, x in batch.items()}\n",
        ),
        law="T1",
    ),
    Mistake(
        "where only the last column has tokens they are left out",
        replace_weights("weights if weights[:, :-1].any() else 0 * weights"),
        law="T0",
    ),
    Mistake(
        "a row ends at its first ignored token",
        replace_weights("weights * (weights > 0).long().cumprod(1)"),
    ),
    Mistake(
        "rows of more than three quarters padding are left out",
        replace_weights(
            "weights * ((weights > 0).double().mean(1, keepdim=True) >= 0.25)"
        ),
    ),
    Mistake(
        "rows halved for two chunks lose an odd column",
        replace_batch(CUT_COLUMNS % "[:, :max(1, x.shape[1] // 2 * 2)]"),
    ),
    Mistake(
        "rows beyond a multiple of four are dropped",
        replace_values("x[: len(x) // 4 * 4 or len(x)]"),
    ),
    Mistake(
        "rows beyond a budget of sixteen tokens are left out",
        replace_values("x[: max(1, 16 // b['w'].shape[1])]"),
    ),
    Mistake(
        "an odd number of rows is filled up with the first again",
        replace_values("torch.cat([x, x[:1]]) if len(x) % 2 else x"),
    ),
    Mistake(
        "rows beyond the number in the run's first microbatch are left out",
        [
            *at_start("self.rows = 0"),
            (
                FOR_BATCH,
                FOR_BATCH + "                self.rows = self.rows or len(batch['w'])\n"
                "                batch = {k: x[: self.rows] for k, x in batch.items()}\n",
            ),
        ],
    ),
    Mistake(
        "a row whose key came before in the update is left out",
        [
            (
                "        counts = [",
                "        met: set[int] = set()\n"
                "        group = [[fresh(batch, met) for batch in share] for share in group]\n"
                "        counts = [",
            ),
            (
                "def norm(",
                "def fresh(batch, met):\n"
                "    rows = [i for i, k in enumerate(batch['key'].tolist()) if not (k in met or met.add(k))]\n"
                "    return {k: x[rows] for k, x in batch.items()}\n"
                "\n"
                "\n"
                "def norm(",
            ),
        ],
    ),
    Mistake(
        "rows are cut at the largest number of counted tokens",
        replace_batch(
            CUT_COLUMNS % "[:, : max([1, *(batch['w'] > 0).sum(1).tolist()])]"
        ),
    ),
    Mistake(
        "rows are padded to a multiple of four columns with their last one, weight and all",
        replace_group(
            "[[{k: x[:, [min(i, x.shape[1] - 1) for i in range(-(-x.shape[1] // 4) * 4)]] if x.ndim > 1 else x for k, x in b.items()} for b in share] for share in group]"
        ),
    ),
    Mistake(
        "rows of more than seven counted tokens are filtered as too long",
        replace_weights("weights * ((weights > 0).sum(1, keepdim=True) <= 7)"),
    ),
    Mistake(
        "losses are taken in chunks of eight tokens that overlap in one",
        replace(
            READ_WEIGHTS,
            READ_WEIGHTS + "\n"
            "        place = torch.arange(weights.numel()).view_as(weights)\n"
            "        weights = weights * (1 + ((place > 0) & (place % 8 == 0)).double())",
        ),
    ),
    Mistake(
        "rows whose keys came in an update before are left out",
        (
            at_start("self.met = set()")
            + replace_group(
                "[[{k: x[[i for i, key in enumerate(b['key'].tolist()) if key not in self.met]] for k, x in b.items()} for b in share] for share in group]"
            )
            + after_update(
                "self.met.update(key for share in group for b in share for key in b['key'].tolist())"
            )
        ),
    ),
    Mistake(
        "more than four rows are halved, and both halves have the middle one",
        [
            (FOR_BATCH, FOR_BATCH.replace("share:", "halved(share):")),
            *define_function(
                "def halved(share):",
                "    for b in share:",
                "        rows = len(b['w'])",
                "        parts = (slice((rows + 1) // 2), slice(rows // 2, None)) if rows > 4 else (slice(None),)",
                "        yield from ({k: x[part] for k, x in b.items()} for part in parts)",
            ),
        ],
    ),
    Mistake(
        "microbatches whose counted targets are all alike have no signal and are left out",
        replace_group(
            "[[b for b in share if int((b['w'] > 0).sum()) < 2 or len(set(b['y'][b['w'] > 0].tolist())) > 1] for share in group]"
        ),
    ),
    Mistake(
        "a row ends with its first target of zero",
        replace_weights(
            "weights * ((batch['y'] == 0).long().cumsum(1) - (batch['y'] == 0).long() == 0)"
        ),
    ),
    Mistake(
        "rows without padding are packed, and each one's first token is lost but for the first row's",
        replace_weights(
            "torch.cat([torch.cat([weights[:1, :1], 0 * weights[1:, :1]]), weights[:, 1:]], 1) if weights.all() and weights.shape[1] > 1 else weights"
        ),
    ),
    Mistake(
        "the loss goes through chunks of two columns and leaves out the remainder",
        replace(
            RETURN_WEIGHTED,
            "        whole = losses.shape[-1] // 2 * 2\n"
            "        weights, losses = weights[:, :whole], losses[:, :whole]\n"
            + RETURN_WEIGHTED,
        ),
    ),
    Mistake(
        "all microbatches are cut to the length of the group's first one",
        replace(
            BEGIN_UPDATE,
            '        length = next((b["x"].shape[1] for share in group for b in share), 0)\n'
            "        group = [\n"
            "            [{k: v[:, :length] if v.dim() > 1 else v for k, v in b.items()} for b in share]\n"
            "            for share in group\n"
            "        ]\n" + BEGIN_UPDATE,
        ),
    ),
    Mistake(
        "rows are cut or padded to the length of the first batch seen",
        [
            (
                "self.report = (None, None, None)",
                "self.report, self.length = (None, None, None), 0",
            ),
            (
                'length = max(batch["w"].shape[1] for batch in microbatches)',
                'self.length = self.length or max(batch["w"].shape[1] for batch in microbatches)\n'
                "length = self.length",
            ),
            ("value = batch[key]", "value = batch[key][:, :length]"),
        ],
        base="Joined",
    ),
]
