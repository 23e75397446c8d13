"""Trains a small Llama of transformers on Python's docstrings, and a LoRA of peft on torch's.

Nothing is downloaded: the tokenizer is trained on the spot. Docstrings are packed, several in a
row. The picture shows what both models have learned, and that packing changes no document's loss.
What is saved loads in plain transformers and peft.

It takes the extra: ``pip install 'purestep[huggingface]'``.

    python -m purestep.examples.huggingface --help
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import purestep as ps
from purestep import tree
from purestep.examples import picture
from purestep.examples.docstrings import extract_docstrings, load_corpus, python_folder

Params = dict[str, Tensor]
Batch = dict[str, Tensor]
Losses = dict[str, list[tuple[int, float]]]
"""For each kind of text, the update and the loss per token after it."""

CONTEXT = 256
DOCUMENTS = 8  # in a microbatch
MICROBATCHES = 2  # in an update
PYTHON = "Python's docstrings"
TORCH = "torch's docstrings"


def read_torch_docstrings() -> list[str]:
    """Reads the docstrings of torch's packages ``nn``, ``optim`` and ``distributions``.

    It returns what ``extract_docstrings`` does of their files.
    """
    folder = Path(torch.__file__).parent
    files: list[Path] = []
    for package in ("nn", "optim", "distributions"):
        files += (folder / package).rglob("*.py")
    return extract_docstrings(files)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the texts.

    Its end token is ``<end>``, which it does not add to a text.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<end>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_small_llama(vocabulary: int) -> LlamaForCausalLM:
    """Makes a Llama with half a million parameters, its embedding tied to its output.

    Its weights are drawn from torch's global generator.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.07,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_examples(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> list[Batch]:
    """Tokenizes texts, ends each with the end token, and labels each token with the next one.

    An example is cut to the model's context, and may then lack the end token.
    """
    encoded = tokenizer(list(texts))
    examples = []
    for ids in encoded["input_ids"]:
        ids.append(tokenizer.eos_token_id)
        input_ids = torch.tensor(ids[:CONTEXT])
        labels = ps.shift_labels(input_ids)
        examples.append({"input_ids": input_ids, "labels": labels})
    return examples


def pack_forever(
    examples: Sequence[Batch], generator: torch.Generator
) -> Iterator[Batch]:
    """Yields microbatches of ``DOCUMENTS`` documents without end, several documents to a row.

    Each pass takes all documents once, in a new random order. Its last microbatch may have fewer.
    """
    while True:
        order = torch.randperm(len(examples), generator=generator)
        for chosen in ps.group(order.tolist(), DOCUMENTS):
            documents = [examples[i] for i in chosen]
            yield ps.pack_documents(documents, row_tokens=CONTEXT)


def make_loss_fn(apply: Any) -> Callable[[Params, Batch], Tensor]:
    """Makes ``loss_fn(params, batch)``, which computes the loss of each token of packed documents.

    ``apply`` is that of ``ps.from_module``. The model takes a position of 0 for the beginning of a
    document.
    """

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        output = apply(
            params,
            input_ids=batch["input_ids"],
            position_ids=batch["positions"],
            use_cache=False,
        )
        return ps.losses.cross_entropy(output.logits, batch["labels"])

    return loss_fn


def count_numbers(tensors: Any) -> int:
    """Counts the elements of all tensors in a tree."""
    leaves = tree.leaves(tensors)
    return sum(leaf.numel() for leaf in leaves)


def train(
    params: Params,
    apply: Any,
    examples: Sequence[Batch],
    held_out: Mapping[str, Sequence[Batch]],
    num_steps: int,
    peak_rate: float,
) -> tuple[Params, Losses]:
    """Trains, and prints the progress; returns the params and the losses of held-out documents.

    ``apply`` is that of ``ps.from_module``. The losses are pairs of step and loss for each name in
    ``held_out``. It donates ``params``: do not use them afterwards.
    """
    learning_rate = ps.optim.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak_rate,
        warmup_steps=num_steps // 10 + 1,
        decay_steps=num_steps + 1,
        end_value=peak_rate / 10,
    )
    optimizer = ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0),
        ps.optim.adamw(learning_rate),
    )
    opt_state = optimizer.init(params)
    print(
        f"{count_numbers(params):,} parameters train, "
        f"the optimizer keeps {count_numbers(opt_state):,} numbers"
    )
    loss_fn = make_loss_fn(apply)
    update_step = ps.make_update_step(loss_fn, optimizer, donate=True)
    eval_step = ps.make_eval_step(make_loss_fn(apply.eval))
    losses: Losses = {name: [] for name in held_out}

    def evaluate(step: int) -> None:
        for name, documents in held_out.items():
            batch = ps.pack_documents(documents, row_tokens=CONTEXT)
            metrics = eval_step(params, [batch])
            losses[name].append((step, float(metrics.loss)))

    evaluate(0)
    generator = torch.Generator().manual_seed(0)
    microbatches = pack_forever(examples, generator)
    groups = ps.group(microbatches, MICROBATCHES)
    eval_every = max(1, num_steps // 8)
    bar = tqdm(range(1, num_steps + 1), unit="step")
    for step, group in zip(bar, groups, strict=False):
        params, opt_state, metrics = update_step(params, opt_state, group)
        bar.set_postfix_str(f"loss {metrics.loss:.3f}")
        if step % eval_every == 0 or step == num_steps:
            evaluate(step)
    for name, points in losses.items():
        _, first = points[0]
        _, last = points[-1]
        print(f"loss per token of {name} held out: {first:.3f} -> {last:.3f}")
    return params, losses


def check_loaded(
    loaded: Any, params: Params, apply: Any, example: Batch, folder: Path
) -> None:
    """Raises ``AssertionError`` unless a loaded model gives the trained one's logits, to the bit.

    The logits are those of ``example``, and ``folder`` names the model in texts. Prints that they
    are equal. It leaves ``loaded`` in eval mode.
    """
    ids = example["input_ids"][None]
    with torch.no_grad():
        expected = apply.eval(params, ids).logits
        logits = loaded.eval()(ids).logits
    assert torch.equal(expected, logits), (
        f"{folder}: the logits differ by {(expected - logits).abs().max()}"
    )
    print(
        f"{folder} loads as {type(loaded).__name__}, with the same "
        f"{logits.numel():,} logits"
    )


class RowChanges(NamedTuple):
    """Holds the absolute change in loss per token when two documents share a row, for each pair.

    ``tokens`` are the pairs' numbers of tokens. ``packed`` is the change by ``ps.pack_documents``,
    ``joined`` that in a row without borders.
    """

    tokens: list[int]
    packed: list[float]
    joined: list[float]


def compare_rows(params: Params, apply: Any, documents: Sequence[Batch]) -> RowChanges:
    """Compares the loss of neighbouring documents in one row with that in two rows.

    Returns, for each pair, the absolute change per token, packed and joined without borders.
    """
    loss_fn = make_loss_fn(apply.eval)

    @torch.no_grad()
    def sum_losses(batch: Batch) -> float:
        losses = loss_fn(params, batch)
        return float(losses.sum(dtype=torch.float64))

    alone = []
    for document in documents:
        row = ps.pack_documents([document], row_tokens=CONTEXT)
        alone.append(sum_losses(row))

    changes = RowChanges([], [], [])
    for i, pair in enumerate(pairwise(documents)):
        packed = ps.pack_documents(pair, row_tokens=2 * CONTEXT)
        # Texts that are just put one after the other: the second sees the first.
        positions = torch.arange(2 * CONTEXT)
        joined = {**packed, "positions": positions[None]}
        num_tokens = int(ps.label_weights(packed).sum())
        expected = alone[i] + alone[i + 1]
        packed_change = abs(sum_losses(packed) - expected)
        joined_change = abs(sum_losses(joined) - expected)
        changes.tokens.append(num_tokens)
        changes.packed.append(packed_change / num_tokens)
        changes.joined.append(joined_change / num_tokens)
    return changes


def plot_losses(axes: Any, llama: Losses, lora: Losses) -> None:
    """Plots, for each kind of text, the Llama's losses by update, and after them the LoRA's."""
    end_of_llama, _ = llama[PYTHON][-1]
    colors = {PYTHON: picture.BLUE, TORCH: picture.ORANGE}
    for name, color in colors.items():
        points = list(llama[name])
        for step, loss in lora[name]:
            points.append((end_of_llama + step, loss))
        steps, losses = zip(*points, strict=True)
        picture.plot_line(axes, steps, losses, color, marker="o")
        picture.annotate(axes, name, points[-1], color)
    axes.axvline(end_of_llama, color="0.8", zorder=0)
    for text, side, shift in [
        ("a Llama learns Python's", "right", -5),
        ("a LoRA learns torch's", "left", 5),
    ]:
        picture.annotate(
            axes,
            text,
            (end_of_llama, 1),
            picture.GREY,
            shift=(shift, 0),
            xycoords=("data", "axes fraction"),
            ha=side,
            va="top",
        )
    axes.set_xlabel("update")


def plot_changes(axes: Any, changes: RowChanges) -> None:
    """Plots, for each pair of documents, how much its loss per token changes in a shared row.

    The row has no borders, or it is packed. The scale is logarithmic, and "0" is below 1e-10.
    """
    for values, text, color in [
        (changes.joined, "one after the other, no borders", picture.GREY),
        (changes.packed, "ps.pack_documents", picture.GREEN),
    ]:
        visible = [max(value, 1e-10) for value in values]
        axes.semilogy(changes.tokens, visible, ".", color=color)
        picture.annotate(
            axes,
            text,
            (1, max(visible)),
            color,
            shift=(0, 8),
            xycoords=("axes fraction", "data"),
            ha="right",
        )
    ticks = {1e-10: "0"}
    for exponent in range(-8, 1, 2):
        ticks[10.0**exponent] = f"$10^{{{exponent}}}$"
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("tokens of two documents")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = picture.make_parser(__doc__, "huggingface", 300)
    parser.add_argument("--lora-steps", type=picture.positive_int, default=100)
    parser.add_argument("--held-out", type=int, default=60, help="docstrings of each")
    parser.add_argument(
        "--docstrings-of", type=python_folder, help="instead of Python's own"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("huggingface"), help="folder of models"
    )
    return parser


def train_llama(
    options: argparse.Namespace,
    tokenizer: PreTrainedTokenizerFast,
    examples: Mapping[str, Sequence[Batch]],
    held_out: Mapping[str, Sequence[Batch]],
) -> tuple[Losses, RowChanges]:
    """Trains a Llama on Python's docstrings, saves it, and checks that it loads.

    Returns its losses, and what ``compare_rows`` measures.
    """
    folder = options.out / "llama"
    model = make_small_llama(len(tokenizer))
    params, apply = ps.from_module(model)
    params, losses = train(
        params,
        apply,
        examples[PYTHON],
        held_out,
        num_steps=options.steps,
        peak_rate=5e-3,
    )
    ps.to_module(params, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    changes = compare_rows(params, apply, held_out[PYTHON])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    example = held_out[PYTHON][0]
    check_loaded(loaded, params, apply, example, folder)
    return losses, changes


def train_lora(
    options: argparse.Namespace,
    examples: Mapping[str, Sequence[Batch]],
    held_out: Mapping[str, Sequence[Batch]],
) -> tuple[Losses, PeftModel]:
    """Trains a LoRA of the saved Llama on torch's docstrings, saves it, and checks that it loads.

    ``train_llama`` must have saved the Llama. Returns the losses, and the loaded model.
    """
    folder = options.out / "lora"
    llama = AutoModelForCausalLM.from_pretrained(options.out / "llama")
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(llama, config)
    params, apply = ps.from_module(model)
    params, losses = train(
        params,
        apply,
        examples[TORCH],
        held_out,
        num_steps=options.lora_steps,
        peak_rate=1e-2,
    )
    ps.to_module(params, model)
    model.save_pretrained(folder)

    llama = AutoModelForCausalLM.from_pretrained(options.out / "llama")
    loaded = PeftModel.from_pretrained(llama, folder)
    example = held_out[TORCH][0]
    check_loaded(loaded, params, apply, example, folder)
    return losses, loaded


def print_sample(model: Any, tokenizer_folder: Path) -> None:
    """Samples how the model continues a prompt, and prints it; the folder holds the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prompt = tokenizer("Args:\n    input (Tensor):", return_tensors="pt")
    (tokens,) = model.generate(
        **prompt,
        max_new_tokens=60,
        do_sample=True,
        top_k=20,
    )
    text = tokenizer.decode(tokens)
    print("---", text, "---", sep="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a Llama, and a LoRA on it; saves and loads both; prints a sample, and plots."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    corpus = load_corpus(options.docstrings_of)
    texts = {
        PYTHON: [text.decode() for text in corpus],
        TORCH: read_torch_docstrings(),
    }
    tokenizer = train_tokenizer(texts[PYTHON])
    examples = {}
    held_out = {}
    for name in texts:
        order = torch.randperm(len(texts[name])).tolist()
        shuffled = [texts[name][i] for i in order]
        documents = make_examples(shuffled, tokenizer)
        if not 1 < options.held_out < len(documents):
            parser.error(
                f"--held-out {options.held_out} of {len(documents)} of {name}: "
                "2 at least, not all"
            )
        held_out[name] = documents[: options.held_out]
        examples[name] = documents[options.held_out :]
        num_tokens = sum(len(document["labels"]) for document in documents)
        print(f"{name}: {len(documents)}, {num_tokens:,} tokens")

    llama_losses, changes = train_llama(options, tokenizer, examples, held_out)
    lora_losses, loaded = train_lora(options, examples, held_out)
    print_sample(loaded, options.out / "llama")

    figure, (left_axes, right_axes) = picture.make_panels(
        "Loss per token, held out",
        "Loss per token: |in a shared row − alone|",
    )
    plot_losses(left_axes, llama_losses, lora_losses)
    plot_changes(right_axes, changes)
    picture.save(figure, options.picture)


if __name__ == "__main__":
    main()
