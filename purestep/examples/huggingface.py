"""Trains a small Llama of transformers on Python's docstrings, and a LoRA of peft on torch's.

Nothing is downloaded: the tokenizer is trained on the spot. Docstrings are packed, several in a
row. The picture shows what both models have learned, and that packing changes no document's loss.
What is saved loads in plain transformers and peft.

It takes the extra: ``pip install 'purestep[huggingface]'``.

    python -m purestep.examples.huggingface --help
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from purestep.examples.docstrings import docstrings, docstrings_of, folder_of_python

Params = dict[str, Tensor]
Batch = dict[str, Tensor]

CONTEXT = 256
DOCUMENTS = 8  # in a microbatch
MICROBATCHES = 2  # in an update
PYTHON, TORCH = "Python's docstrings", "torch's docstrings"


def torch_docstrings() -> list[str]:
    """Those of the parts that people call most."""
    folder = Path(torch.__file__).parent
    parts = ("nn", "optim", "distributions")
    return docstrings_of(
        file for part in parts for file in (folder / part).rglob("*.py")
    )


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level pairs, learned from the texts."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<end>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def small_llama(vocabulary: int) -> LlamaForCausalLM:
    """A Llama with half a million parameters, its embedding tied to its output."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        initializer_range=0.07, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def examples_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> list[Batch]:
    """Each text as the model takes it, and what each token is to predict."""
    examples = []
    for ids in tokenizer(list(texts))["input_ids"]:
        input_ids = torch.tensor([*ids, tokenizer.eos_token_id][:CONTEXT])
        examples.append({"input_ids": input_ids, "labels": ps.shift_labels(input_ids)})
    return examples


def packed(examples: Sequence[Batch], generator: torch.Generator) -> Iterator[Batch]:
    """Microbatches of documents in random order, again and again, several documents to a row."""
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for documents in ps.group(order, DOCUMENTS):
            yield ps.pack_documents(
                [examples[i] for i in documents], row_tokens=CONTEXT
            )


def loss_of(apply: Any) -> Callable[[Params, Batch], Tensor]:
    """The loss of each token. Where positions begin again at 0, a document begins."""

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        output = apply(
            params,
            input_ids=batch["input_ids"],
            position_ids=batch["positions"],
            use_cache=False,
        )
        return ps.losses.cross_entropy(output.logits, batch["labels"])

    return loss_fn


def train(
    params: Params,
    apply: Any,
    examples: Sequence[Batch],
    held_out: Mapping[str, Sequence[Batch]],
    steps: int,
    peak_rate: float,
) -> tuple[Params, dict[str, list[tuple[int, float]]]]:
    """The trained params, and the loss per token of held-out documents after so many steps."""
    rate = ps.optim.warmup_cosine_decay_schedule(
        0.0, peak_rate, steps // 10 + 1, steps + 1, peak_rate / 10
    )
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.adamw(rate))
    opt_state = optimizer.init(params)
    size, state = (
        sum(leaf.numel() for leaf in tree.leaves(t)) for t in (params, opt_state)
    )
    print(f"{size:,} parameters train, the optimizer keeps {state:,} numbers")
    update_step = ps.make_update_step(loss_of(apply), optimizer, donate=True)
    eval_step = ps.make_eval_step(loss_of(apply.eval))
    losses: dict[str, list[tuple[int, float]]] = {name: [] for name in held_out}

    def evaluate(step: int) -> None:
        for name, documents in held_out.items():
            group = [ps.pack_documents(documents, row_tokens=CONTEXT)]
            losses[name].append((step, float(eval_step(params, group).loss)))

    evaluate(0)
    stream = ps.group(packed(examples, torch.Generator().manual_seed(0)), MICROBATCHES)
    bar = tqdm(range(1, steps + 1), unit="step")
    for step, group in zip(bar, stream, strict=False):
        params, opt_state, metrics = update_step(params, opt_state, group)
        bar.set_postfix_str(f"loss {metrics.loss:.3f}")
        if step % max(1, steps // 8) == 0 or step == steps:
            evaluate(step)
    for name, values in losses.items():
        print(
            f"loss per token of {name} held out: {values[0][1]:.3f} -> {values[-1][1]:.3f}"
        )
    return params, losses


def check_loaded(
    loaded: Any, params: Params, apply: Any, example: Batch, folder: Path
) -> None:
    """What was loaded gives the logits of what was trained, to the bit."""
    ids = example["input_ids"][None]
    with torch.no_grad():
        trained, found = apply.eval(params, ids).logits, loaded.eval()(ids).logits
    assert torch.equal(trained, found), (
        f"{folder}: the logits differ by {(trained - found).abs().max()}"
    )
    print(
        f"{folder} loads as {type(loaded).__name__}, with the same {found.numel():,} logits"
    )


def changes(
    params: Params, apply: Any, documents: Sequence[Batch]
) -> dict[str, list[float]]:
    """By how much the loss per token of two documents changes when they share a row."""
    loss_fn = loss_of(apply.eval)

    @torch.no_grad()
    def total(batch: Batch) -> float:
        return float(loss_fn(params, batch).sum(dtype=torch.float64))

    alone = [total(ps.pack_documents([each], row_tokens=CONTEXT)) for each in documents]
    found: dict[str, list[float]] = {"tokens": [], "packed": [], "joined": []}
    for i, pair in enumerate(pairwise(documents)):
        row = ps.pack_documents(pair, row_tokens=2 * CONTEXT)
        tokens = int(ps.label_weights(row).sum())
        # Texts that are just put one after the other: the second sees the first.
        joined = {**row, "positions": torch.arange(2 * CONTEXT)[None]}
        found["tokens"].append(tokens)
        for name, batch in {"packed": row, "joined": joined}.items():
            found[name].append(abs(total(batch) - alone[i] - alone[i + 1]) / tokens)
    return found


def draw(
    path: Path,
    scratch: Mapping[str, Any],
    lora: Mapping[str, Any],
    rows: Mapping[str, Any],
) -> None:
    """What was learned on the left, what packing changes on the right."""
    figure, (left, right) = picture.panels(
        "Loss per token, held out", "Loss per token: |in a shared row − alone|"
    )
    begin = scratch[PYTHON][-1][0]
    for name, color in {PYTHON: picture.BLUE, TORCH: picture.ORANGE}.items():
        points = [*scratch[name], *[(begin + step, loss) for step, loss in lora[name]]]
        left.plot(
            *zip(*points, strict=True),
            color=color,
            linewidth=1.8,
            marker="o",
            markersize=3,
        )
        picture.say(left, name, points[-1], color)
    left.axvline(begin, color="0.8", zorder=0)
    for words, side, shift in [
        ("a Llama learns Python's", "right", -5),
        ("a LoRA learns torch's", "left", 5),
    ]:
        where = {
            "xytext": (shift, 0),
            "xycoords": ("data", "axes fraction"),
            "va": "top",
        }
        picture.say(left, words, (begin, 1), picture.GREY, ha=side, **where)
    left.set_xlabel("update")

    for name, words, color in [
        ("joined", "one after the other, no borders", picture.GREY),
        ("packed", "ps.pack_documents", picture.GREEN),
    ]:
        right.semilogy(
            rows["tokens"], [max(x, 1e-10) for x in rows[name]], ".", color=color
        )
        where = {"xytext": (0, 8), "xycoords": ("axes fraction", "data"), "ha": "right"}
        picture.say(right, words, (1, max(rows[name])), color, **where)
    powers = range(-8, 1, 2)
    right.set_yticks(
        [1e-10, *[10.0**n for n in powers]], ["0", *[f"$10^{{{n}}}$" for n in powers]]
    )
    right.set_xlabel("tokens of two documents")
    picture.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a Llama, and a LoRA on it; saves and loads both; draws."""
    parser = picture.parser(__doc__, "huggingface", 300)
    parser.add_argument("--lora-steps", type=picture.positive, default=100)
    parser.add_argument("--held-out", type=int, default=60, help="docstrings of each")
    parser.add_argument(
        "--docstrings-of", type=folder_of_python, help="instead of Python's own"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("huggingface"), help="folder of models"
    )
    options = parser.parse_args(arguments)
    llama, adapters = options.out / "llama", options.out / "lora"
    llama.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    python = [text.decode() for text in docstrings(options.docstrings_of)]
    texts = {PYTHON: python, TORCH: torch_docstrings()}
    tokenizer = tokenizer_of(texts[PYTHON])
    examples, held_out = {}, {}
    for name, each in texts.items():
        order = torch.randperm(len(each)).tolist()
        every = examples_of([each[i] for i in order], tokenizer)
        if not 1 < options.held_out < len(every):
            parser.error(
                f"--held-out {options.held_out} of {len(every)} of {name}: 2 at least, not all"
            )
        held_out[name] = every[: options.held_out]
        examples[name] = every[options.held_out :]
        print(f"{name}: {len(every)}, {sum(len(e['labels']) for e in every):,} tokens")

    model = small_llama(len(tokenizer))
    params, apply = ps.from_module(model)
    params, scratch = train(
        params, apply, examples[PYTHON], held_out, options.steps, 5e-3
    )
    ps.to_module(params, model)
    model.save_pretrained(llama)
    tokenizer.save_pretrained(llama)
    rows = changes(params, apply, held_out[PYTHON])

    loaded = AutoModelForCausalLM.from_pretrained(llama)
    check_loaded(loaded, params, apply, held_out[PYTHON][0], llama)

    adapted = get_peft_model(
        loaded, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    )
    params, apply = ps.from_module(adapted)
    params, lora = train(
        params, apply, examples[TORCH], held_out, options.lora_steps, 1e-2
    )
    ps.to_module(params, adapted)
    adapted.save_pretrained(adapters)

    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(llama), adapters
    )
    check_loaded(loaded, params, apply, held_out[TORCH][0], adapters)

    reader = AutoTokenizer.from_pretrained(llama)
    prompt = reader("Args:\n    input (Tensor):", return_tensors="pt")
    (text,) = loaded.generate(**prompt, max_new_tokens=60, do_sample=True, top_k=20)
    print("---", reader.decode(text), "---", sep="\n")
    draw(options.picture, scratch, lora, rows)


if __name__ == "__main__":
    main()
