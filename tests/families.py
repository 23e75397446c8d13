"""Models of transformers as they come, tiny, in each way in which a step may run them, and what its gradient must equal.

1. **One big batch**: ‖gradient − g‖ ≤ 2 γₙ Σ‖gₘ‖. g is from ``loss.backward()`` of the plain model in float64 on one padded
   batch, gₘ from text m alone, and γₙ from ``proofs/strategies.py``. Most families compute norms or softmax in
   float32 whatever their dtype is, so that u is float32's for them.
2. **Bits**: the gradient is that of the plain model on each microbatch, in the same dtype, summed in the order of microbatches
   and ranks; in float32 where it is of half precision. Here nothing is rounded otherwise, however many roundings there are.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, reduce
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.testing.bounds import gamma

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, WINDOW = 64, 16, 2, 2, 32, 4
LENGTHS = [10, 4, 7, 9, 3, 6]
"""So that the number of tokens is no power of two, which would hide in what dtype it divides."""
ROW = 12
"""The longest row, of packed texts."""

TOKENS = sum(LENGTHS)
BLOCKS = 3 * LAYERS
"""Of T5, which has most: its encoder's, its decoder's, and as many attentions from one to the other."""
OPERATIONS = 30
"""Of a block: two norms of 5, projections, rotation, scores, softmax, values, activation, gate, and what is added up."""
SUMMANDS = 2 * WIDTH + 4 * WIDTH + 2 * WIDTH + WIDTH + 2 * ROW
"""Of its sums: of two norms, of four projections, of the last, of scores, of softmax and values."""
HEAD = 12 + WIDTH + WIDTH + 2 * VOCABULARY
ROUNDINGS = 3 * (BLOCKS * (OPERATIONS + SUMMANDS) + HEAD) + TOKENS
"""That can follow one another: there and, at twice the cost, back; then those of the sum over tokens."""

Example = dict[str, Tensor]
Grads = dict[str, Tensor]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": CONTEXT,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROTARY: dict[str, Any] = {**SHAPE, "num_key_value_heads": 1, "attention_dropout": 0.0}


class Family(NamedTuple):
    """A model; whether it attends to what comes later; how far back; whether it computes parts in float32 whatever its dtype."""

    make: Callable[[], Any]
    causal: bool = True
    window: int | None = None
    float32: bool = True


def built(name: str, shape: Mapping[str, Any] = ROTARY, **config: Any) -> Any:
    """A model of transformers with these settings."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**shape, **config}))


def t5() -> Any:
    """Its settings have other names."""
    shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": LAYERS}
    config = {"vocab_size": VOCABULARY, "num_heads": HEADS, "decoder_start_token_id": 0}
    return built("T5ForConditionalGeneration", shape, dropout_rate=0.0, **config)


def lora() -> Any:
    """Adapters on a Llama, past the zero at which they begin."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(built("LlamaForCausalLM"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


NO_DROPOUT = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
NO_NOISE = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
FAMILIES = {
    "GPT-2": Family(
        partial(built, "GPT2LMHeadModel", SHAPE, **NO_DROPOUT), float32=False
    ),
    "Llama": Family(partial(built, "LlamaForCausalLM")),
    "Llama, tied": Family(partial(built, "LlamaForCausalLM", tie_word_embeddings=True)),
    "Qwen3": Family(partial(built, "Qwen3ForCausalLM", head_dim=8)),
    "Mistral": Family(
        partial(built, "MistralForCausalLM", sliding_window=WINDOW), window=WINDOW
    ),
    "Gemma": Family(partial(built, "GemmaForCausalLM", head_dim=8)),
    "T5": Family(t5),
    "BERT": Family(
        partial(built, "BertForMaskedLM", SHAPE, **NO_NOISE), False, float32=False
    ),
    "LoRA on Llama": Family(lora),
}


def model(
    family: str,
    attention: str = "sdpa",
    checkpoints: bool = False,
    dtype: Any = torch.float64,
) -> Any:
    """The family's model: the same random weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = FAMILIES[family].make().to(dtype).train()
    made.set_attn_implementation(attention)
    if checkpoints:
        # transformers warns that it then keeps no cache.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        enable_checkpoints(made, {"use_reentrant": False})
    return made


def enable_checkpoints(own: Any, *settings: Any) -> None:
    """Turns activation checkpoints on, by the name that they have in this transformers: 5.17 has the second one alone."""
    named = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    enable = next(getattr(own, name) for name in named if hasattr(own, name))
    enable(*settings)


def looking_back(own: Any) -> Any:
    """The model, with weights that are not too small for it to look beyond the last token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in own.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return own.to(torch.float64).train()


def with_dropout(own: Any, rate: float = 0.5) -> Any:
    """The model, which now drops."""
    for module in own.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    return own


def examples(family: str) -> list[Example]:
    """Texts of uneven length, as the family trains on them."""
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in LENGTHS:
        ids, other = torch.randint(1, VOCABULARY, (2, length), generator=generator)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if family == "BERT":
            masked = other % 2 == other[0] % 2  # One at least.
            labels = torch.where(masked, ids, -100)
            example |= {"input_ids": torch.where(masked, 3, ids), "labels": labels}
        elif family == "T5":
            shifted = torch.cat([other.new_zeros(1), other[:-1]])
            example |= {"decoder_input_ids": shifted, "labels": other}
        else:
            example["labels"] = ps.shift_labels(ids)
        texts.append(example)
    return texts


Form = Literal["2D mask", "position_ids", "4D mask", "packed, 4D mask"]


class Setting(NamedTuple):
    """A way to run a step."""

    form: Form = "2D mask"
    attention: str = "sdpa"
    checkpoints: bool = False
    dtype: torch.dtype = torch.float64
    axis: Any = None
    step: Mapping[str, Any] = MappingProxyType({})


SETTINGS = {
    "padded": Setting(),
    "padded, eager": Setting(attention="eager"),
    "checkpoints": Setting(checkpoints=True),
    "checkpoints, packed": Setting("position_ids", checkpoints=True),
    "packed, `position_ids`": Setting("position_ids"),
    "packed, `position_ids`, eager": Setting("position_ids", "eager"),
    "packed, 4D mask": Setting("packed, 4D mask"),
    "packed, 4D mask, eager": Setting("packed, 4D mask", "eager"),
    "`donate=True`": Setting(step={"donate": True}),
    "`ThreadAxis(2)`": Setting(axis=ps.testing.ThreadAxis(2)),
    '`gather="microbatch"`, checkpoints': Setting(
        checkpoints=True, axis=ps.testing.ThreadAxis(2), step={"gather": "microbatch"}
    ),
    "`VmapAxis(2)`, 4D mask": Setting("4D mask", axis=ps.VmapAxis(2)),
    "`VmapAxis(2)`, 4D mask, eager": Setting("4D mask", "eager", axis=ps.VmapAxis(2)),
    "bfloat16": Setting(dtype=torch.bfloat16),
    "bfloat16, packed": Setting("position_ids", dtype=torch.bfloat16),
    "`compile=True`": Setting(step={"compile": True}),
    "`compile=True`, packed": Setting("position_ids", step={"compile": True}),
}


def cases() -> Iterator[tuple[str, str]]:
    """Each family in each setting that it knows."""
    for name, (form, attention, *_) in SETTINGS.items():
        for family, known in FAMILIES.items():
            # An encoder's mask does not follow positions, and T5 has none. Where a row may attend to padding alone,
            # transformers in float64 adds its lowest number, which is infinite to the softmax in float32: NaN.
            follows = form != "position_ids" or family not in ("BERT", "T5")
            if follows and not (
                known.window and (form, attention) == ("2D mask", "eager")
            ):
                yield family, name


def inputs(
    family: str, setting: Setting, microbatch: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the family's model is called with."""
    causal, window = FAMILIES[family].causal, FAMILIES[family].window
    given: dict[str, Any] = {"input_ids": microbatch["input_ids"]}
    if family != "BERT":
        given["use_cache"] = False
    if family == "T5":
        given["decoder_input_ids"] = microbatch["decoder_input_ids"]
    if setting.form == "2D mask":
        return {**given, "attention_mask": microbatch["attention_mask"]}
    if "segments" in microbatch and family != "T5":
        given["position_ids"] = microbatch["positions"]
    if setting.form == "position_ids":
        return given
    segments = microbatch.get("segments", microbatch["attention_mask"])
    dtype = setting.dtype if setting.attention == "eager" else None
    mask = partial(ps.segment_mask, segments, dtype)
    if family == "T5":
        return {
            **given,
            "attention_mask": mask(causal=False),
            "decoder_attention_mask": mask(),
        }
    return {**given, "attention_mask": mask(causal=causal, window=window)}


def microbatches(family: str, setting: Setting) -> list[list[Any]]:
    """The group, for each rank: some of unequal sizes and numbers, but for simulated ranks."""
    texts = examples(family)
    if setting.form in ("position_ids", "packed, 4D mask"):
        parts = [
            ps.pack_documents(part, row_tokens=ROW) for part in (texts[:4], texts[4:])
        ]
    elif isinstance(setting.axis, ps.VmapAxis):
        return [
            ps.pack(part, max_tokens=100, multiple_of=ROW)
            for part in (texts[:3], texts[3:])
        ]
    else:
        parts = ps.pack(texts, max_tokens=20)
    return [parts[:1], parts[1:]] if setting.axis else [parts]


def plain(
    own: nn.Module, microbatch: Mapping[str, Tensor], given: Any, tokens: Any
) -> Grads:
    """``loss.backward()`` of the model itself, each token's loss in float32 where it is of half precision."""
    own.zero_grad()
    logits, labels = own(**given).logits, microbatch["labels"]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    losses = functional.cross_entropy(wide, labels.flatten(), reduction="none")
    (losses.sum() / tokens).backward()
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


@cache
def reference(family: str) -> tuple[Grads, float]:
    """The gradient of one big batch, by the plain model, in float64, padded; and Σ‖gₘ‖ over its texts."""
    own = model(family)
    (big,) = ps.pack(examples(family), max_tokens=1000)
    tokens = (big["labels"] != -100).sum()

    def grads(batch: Any) -> Grads:
        return plain(own, batch, inputs(family, Setting(), batch), tokens)

    alone = [ps.pack([text], max_tokens=100)[0] for text in examples(family)]
    return grads(big), sum(_norm(grads(text)) for text in alone)


def _norm(grads: Grads) -> float:
    return (
        torch.stack([grad.to(torch.float64).norm() for grad in grads.values()])
        .norm()
        .item()
    )


def step_grads(family: str, setting: Setting, group: list[list[Any]]) -> Grads:
    """What a step hands its optimizer: the first momentum of SGD."""
    params, apply = ps.from_module(model(family, *setting[1:4]))

    def loss_fn(params: Any, microbatch: Any) -> Tensor:
        logits = apply(params, **inputs(family, setting, microbatch)).logits
        return ps.losses.cross_entropy(logits, microbatch["labels"])

    optimizer = ps.optim.sgd(0.1, momentum=0.9)
    axis = setting.axis or ps.LocalAxis()
    step: Any = ps.make_update_step(loss_fn, optimizer, axis=axis, **setting.step)
    state = params, optimizer.init(params)
    if isinstance(axis, ps.VmapAxis):
        stacked = [
            tree.map(lambda *x: torch.stack(x), *each)
            for each in zip(*group, strict=True)
        ]
        on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
        _, opt_state, _ = on_ranks(*state, stacked)
    elif isinstance(axis, ps.testing.ThreadAxis):
        pieces: Any = (
            partial(ps.shard, axis=axis) if "gather" in setting.step else tuple
        )
        opt_state = axis.map(lambda mine: ps.unshard(step(*pieces(state), mine)[1]))(
            group
        )[0]
    else:
        _, opt_state, _ = step(*state, group[0])
    return opt_state[0].trace


class Measured(NamedTuple):
    """A step's gradient: its relative error, what rounding explains of that, and whether it has the plain model's bits.

    In half precision so many roundings in a row have no bound: it is infinite, and the bits tell. They are None
    where vmap or a compiler asks for operations of its own.
    """

    error: float
    bound: float
    same_bits: bool | None


def measure(family: str, setting: Setting) -> Measured:
    """A step of the family in this setting."""
    group, (expected, norms) = microbatches(family, setting), reference(family)
    found = step_grads(family, setting, group)
    assert found.keys() == expected.keys()
    off = _norm(
        {name: found[name].to(torch.float64) - expected[name] for name in expected}
    )
    same_bits = None
    # Where each microbatch is summed over ranks, that is another order.
    if not (
        {"compile", "gather"} & setting.step.keys()
        or isinstance(setting.axis, ps.VmapAxis)
    ):
        summed = _summed(family, setting, group)
        same_bits = all(torch.equal(found[name], grad) for name, grad in summed.items())
    bound = torch.inf
    if setting.dtype.itemsize >= 4:
        # Of both gradients, in the narrowest dtype in which the model computes.
        bound = 2 * gamma(
            ROUNDINGS, torch.float32 if FAMILIES[family].float32 else setting.dtype
        )
    size = _norm(expected)
    return Measured(off / size, norms / size * bound, same_bits)


def _summed(family: str, setting: Setting, group: list[list[Any]]) -> Grads:
    """The plain model's gradients, on each microbatch by itself, summed on each rank, then over ranks."""
    own = model(family, *setting[1:4])
    for p in own.parameters():
        # What a leaf in several places receives is added up in float32, as in a step.
        p.grad_dtype = ps.tree.accumulation_dtype(p.dtype)
    tokens = sum((part["labels"] != -100).sum() for rank in group for part in rank)

    def total(parts: list[Grads]) -> Grads:
        return {
            name: reduce(torch.add, [part[name] for part in parts]) for name in parts[0]
        }

    def grads(part: Any) -> Grads:
        return plain(own, part, inputs(family, setting, part), tokens)

    return total([total([grads(part) for part in rank]) for rank in group])
