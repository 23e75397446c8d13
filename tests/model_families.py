"""Defines tiny models of transformers, every setting of a step, and their reference gradients.

1. **One big batch**: ‖gradient − g‖ ≤ 2 γₙ Σ‖gₘ‖. g is from ``loss.backward()`` of the plain model in float64 on one padded
   batch, gₘ from text m alone, and γₙ from ``purestep/testing/bounds.py``. Most families compute norms or softmax in
   float32 whatever their dtype is, so that u is float32's for them.
2. **Bits**: the gradient is that of the plain model on each microbatch, in the same dtype, summed in the order of microbatches
   and ranks; in float32 where it is of half precision. Here nothing is rounded otherwise, however many roundings there are.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.testing import ThreadAxis
from purestep.testing.bounds import rounding_bound

VOCABULARY = 64
WIDTH = 16
LAYERS = 2
HEADS = 2
CONTEXT = 32
WINDOW = 4
LENGTHS = [10, 4, 7, 9, 3, 6]
"""So that the number of tokens is no power of two, which would hide in what dtype it divides."""
ROW = 12
"""The longest row, of packed texts."""

TOKENS = sum(LENGTHS)
BLOCKS = 3 * LAYERS
"""Of T5, which has most: its encoder's, its decoder's, and as many attentions from one to the other."""
OPERATIONS = 30
"""Of a block: two norms of 5, projections, rotation, scores, softmax, values, activation, gate, and residual sums."""
SUMMANDS = 2 * WIDTH + 4 * WIDTH + 2 * WIDTH + WIDTH + 2 * ROW
"""Of its sums: of two norms, of four projections, of the last, of scores, of softmax and values."""
HEAD = 12 + WIDTH + WIDTH + 2 * VOCABULARY
ROUNDINGS = 3 * (BLOCKS * (OPERATIONS + SUMMANDS) + HEAD) + TOKENS
"""That can follow one another: forward and, at twice the cost, backward; then those of the sum over tokens."""

Example = dict[str, Tensor]
Grads = dict[str, Tensor]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROTARY: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 1,
    "attention_dropout": 0.0,
}


class Family(NamedTuple):
    """A model, its mask, and whether it computes parts in float32 whatever its dtype."""

    make: Callable[[], Any]
    causal: bool = True
    window: int | None = None
    """How many tokens back a token attends to."""
    float32: bool = True


def build_model(name: str, shape: Mapping[str, Any] = ROTARY, **config: Any) -> Any:
    """Builds a model of transformers with these settings."""
    model_class = getattr(transformers, name)
    settings = {**shape, **config}
    return model_class(model_class.config_class(**settings))


def build_t5() -> Any:
    """Builds T5, whose settings have other names."""
    shape = {
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 2 * WIDTH,
        "num_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "num_heads": HEADS,
        "decoder_start_token_id": 0,
    }
    return build_model("T5ForConditionalGeneration", shape, dropout_rate=0.0)


def build_lora() -> Any:
    """Builds adapters on a Llama, past the zero at which they begin."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(build_model("LlamaForCausalLM"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


NO_DROPOUT = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
NO_NOISE = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
FAMILIES = {
    "GPT-2": Family(
        lambda: build_model("GPT2LMHeadModel", SHAPE, **NO_DROPOUT),
        float32=False,
    ),
    "Llama": Family(lambda: build_model("LlamaForCausalLM")),
    "Llama, tied": Family(
        lambda: build_model("LlamaForCausalLM", tie_word_embeddings=True)
    ),
    "Qwen3": Family(lambda: build_model("Qwen3ForCausalLM", head_dim=8)),
    "Mistral": Family(
        lambda: build_model("MistralForCausalLM", sliding_window=WINDOW),
        window=WINDOW,
    ),
    "Gemma": Family(lambda: build_model("GemmaForCausalLM", head_dim=8)),
    "T5": Family(build_t5),
    "BERT": Family(
        lambda: build_model("BertForMaskedLM", SHAPE, **NO_NOISE),
        causal=False,
        float32=False,
    ),
    "LoRA on Llama": Family(build_lora),
}


def make_model(
    family: str,
    attention: str = "sdpa",
    checkpoints: bool = False,
    dtype: Any = torch.float64,
) -> Any:
    """Makes the family's model, with the same random weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = FAMILIES[family].make().to(dtype).train()
    module.set_attn_implementation(attention)
    if checkpoints:
        # transformers warns that it then keeps no cache.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        enable_checkpoints(module, {"use_reentrant": False})
    return module


def enable_checkpoints(module: Any, *settings: Any) -> None:
    """Turns activation checkpoints on.

    The method's name depends on the version: transformers 5.17 has the second one alone.
    """
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(*settings)
    else:
        module.gradient_checkpointing_enable(*settings)


def with_large_weights(module: Any) -> Any:
    """Sets weights that are large enough to attend to more than the last token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in module.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return module.to(torch.float64).train()


def with_dropout(model: Any, rate: float = 0.5) -> Any:
    """Sets the rate of every dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    return model


def make_example(family: str, ids: Tensor, other: Tensor) -> Example:
    """Makes one text, as the family trains on it, of these random tokens."""
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "BERT":
        masked = other % 2 == other[0] % 2  # One at least.
        example["input_ids"] = torch.where(masked, 3, ids)
        example["labels"] = torch.where(masked, ids, -100)
    elif family == "T5":
        start = other.new_zeros(1)
        example["decoder_input_ids"] = torch.cat([start, other[:-1]])
        example["labels"] = other
    else:
        example["labels"] = ps.shift_labels(ids)
    return example


def make_examples(family: str) -> list[Example]:
    """Makes texts of uneven length, as the family trains on them."""
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in LENGTHS:
        ids, other = torch.randint(1, VOCABULARY, (2, length), generator=generator)
        texts.append(make_example(family, ids, other))
    return texts


Form = Literal["2D mask", "position_ids", "4D mask", "packed, 4D mask"]
PACKED: list[Form] = ["position_ids", "packed, 4D mask"]


class Setting(NamedTuple):
    """Settings of a step, of its model and of its data."""

    form: Form = "2D mask"
    attention: str = "sdpa"
    checkpoints: bool = False
    dtype: torch.dtype = torch.float64
    axis: Any = None
    step: Mapping[str, Any] = MappingProxyType({})
    units: Mapping[str, Any] = MappingProxyType({})


def is_block(name: str, module: nn.Module) -> bool:
    """Tells one of many equal layers by its name: ``model.layers.0``, ``transformer.h.0``."""
    return re.fullmatch(r".*(layers?|h|block)\.\d+", name) is not None


def is_block_or_mlp(name: str, module: nn.Module) -> bool:
    """Chooses also a part of each layer, so that units are within units."""
    return is_block(name, module) or name.endswith(".mlp")


GATHERING: dict[str, Any] = {"axis": ThreadAxis(2), "step": {"gather": "loss"}}


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
    "`ThreadAxis(2)`": Setting(axis=ThreadAxis(2)),
    '`gather="microbatch"`, checkpoints': Setting(
        checkpoints=True, axis=ThreadAxis(2), step={"gather": "microbatch"}
    ),
    "`units`": Setting(**GATHERING, units={"units": is_block}),
    "`units`, checkpoints": Setting(
        **GATHERING, checkpoints=True, units={"units": is_block}
    ),
    "`units` within units, packed": Setting(
        "position_ids", **GATHERING, units={"units": is_block_or_mlp}
    ),
    "`units`, `remat=True`": Setting(
        **GATHERING, units={"units": is_block, "remat": True}
    ),
    "`VmapAxis(2)`, 4D mask": Setting("4D mask", axis=ps.VmapAxis(2)),
    "`VmapAxis(2)`, 4D mask, eager": Setting("4D mask", "eager", axis=ps.VmapAxis(2)),
    "bfloat16": Setting(dtype=torch.bfloat16),
    "bfloat16, packed": Setting("position_ids", dtype=torch.bfloat16),
    "`compile=True`": Setting(step={"compile": True}),
    "`compile=True`, packed": Setting("position_ids", step={"compile": True}),
}


def supported_cases() -> Iterator[tuple[str, str]]:
    """Yields each family in each setting that it supports."""
    for name, setting in SETTINGS.items():
        for family, properties in FAMILIES.items():
            if setting.form == "position_ids" and family in ("BERT", "T5"):
                # An encoder's mask does not follow positions, and T5 has none.
                continue
            adds_mask = setting.form == "2D mask" and setting.attention == "eager"
            if properties.window and adds_mask:
                # Where a row may attend to padding alone, transformers in float64 adds
                # its lowest number, which is infinite to the softmax in float32: NaN.
                continue
            yield family, name


def make_inputs(
    family: str, setting: Setting, microbatch: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Makes the keyword arguments for the family's model."""
    arguments: dict[str, Any] = {"input_ids": microbatch["input_ids"]}
    if family != "BERT":
        arguments["use_cache"] = False
    if family == "T5":
        arguments["decoder_input_ids"] = microbatch["decoder_input_ids"]
    if setting.form == "2D mask":
        arguments["attention_mask"] = microbatch["attention_mask"]
        return arguments
    if "segments" in microbatch and family != "T5":
        arguments["position_ids"] = microbatch["positions"]
    if setting.form != "position_ids":
        arguments.update(make_4d_masks(family, setting, microbatch))
    return arguments


def make_4d_masks(
    family: str, setting: Setting, microbatch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Makes masks that the eager attention adds, and others of bools."""
    segments = microbatch.get("segments", microbatch["attention_mask"])
    dtype = setting.dtype if setting.attention == "eager" else None
    make_mask = partial(ps.segment_mask, segments, dtype)
    if family == "T5":
        return {
            "attention_mask": make_mask(causal=False),
            "decoder_attention_mask": make_mask(),
        }
    properties = FAMILIES[family]
    mask = make_mask(causal=properties.causal, window=properties.window)
    return {"attention_mask": mask}


def make_groups(family: str, setting: Setting) -> list[list[Any]]:
    """Makes the group of each rank.

    Sizes and numbers of microbatches differ, except on simulated ranks.
    """
    texts = make_examples(family)
    if isinstance(setting.axis, ps.VmapAxis):
        first = ps.pack(texts[:3], max_tokens=100, multiple_of=ROW)
        second = ps.pack(texts[3:], max_tokens=100, multiple_of=ROW)
        return [first, second]
    if setting.form in PACKED:
        group = [
            ps.pack_documents(texts[:4], row_tokens=ROW),
            ps.pack_documents(texts[4:], row_tokens=ROW),
        ]
    else:
        group = ps.pack(texts, max_tokens=20)
    if setting.axis:
        return [group[:1], group[1:]]
    return [group]


def count_labels(microbatch: Mapping[str, Tensor]) -> Tensor:
    return (microbatch["labels"] != -100).sum()


def plain_grads(
    module: nn.Module, microbatch: Mapping[str, Tensor], arguments: Any, tokens: Any
) -> Grads:
    """Runs ``loss.backward()`` of the model itself.

    Each token's loss is in float32 where it is of half precision.
    """
    module.zero_grad()
    logits = module(**arguments).logits
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(wide_dtype).flatten(0, 1)
    labels = microbatch["labels"].flatten()
    losses = functional.cross_entropy(wide, labels, reduction="none")
    (losses.sum() / tokens).backward()
    grads = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad
    return grads


@cache
def reference(family: str) -> tuple[Grads, float]:
    """Computes the gradient of one big batch, and Σ‖gₘ‖ over its texts.

    By the plain model, in float64, padded.
    """
    module = make_model(family)
    (big,) = ps.pack(make_examples(family), max_tokens=1000)
    tokens = count_labels(big)

    def compute_grads(batch: Any) -> Grads:
        arguments = make_inputs(family, Setting(), batch)
        return plain_grads(module, batch, arguments, tokens)

    big_grads = compute_grads(big)
    norms = 0.0
    for text in make_examples(family):
        (alone,) = ps.pack([text], max_tokens=100)
        norms += _norm(compute_grads(alone))
    return big_grads, norms


def _norm(grads: Grads) -> float:
    norms = [grad.to(torch.float64).norm() for grad in grads.values()]
    return torch.stack(norms).norm().item()


def make_model_for(family: str, setting: Setting) -> Any:
    """Makes the family's model in this setting."""
    return make_model(family, setting.attention, setting.checkpoints, setting.dtype)


def compute_step_grads(family: str, setting: Setting, group: list[list[Any]]) -> Grads:
    """Computes the gradient of a step: the first momentum of SGD."""
    module = make_model_for(family, setting)
    params, apply = ps.from_module(module, **setting.units)

    def loss_fn(params: Any, microbatch: Any) -> Tensor:
        arguments = make_inputs(family, setting, microbatch)
        logits = apply(params, **arguments).logits
        return ps.losses.cross_entropy(logits, microbatch["labels"])

    optimizer = ps.optim.sgd(0.1, momentum=0.9)
    axis = setting.axis or ps.LocalAxis()
    step: Any = ps.make_update_step(loss_fn, optimizer, axis=axis, **setting.step)
    state = (params, optimizer.init(params))
    if isinstance(axis, ps.VmapAxis):
        opt_state = _run_on_vmap_ranks(step, axis, state, group)
    elif isinstance(axis, ThreadAxis):
        sharded = "gather" in setting.step
        opt_state = _run_on_threads(step, axis, state, group, sharded=sharded)
    else:
        _, opt_state, _ = step(*state, group[0])
    momentum, *_ = opt_state
    grads: Grads = momentum.trace
    return grads


def _run_on_vmap_ranks(
    step: Any, axis: ps.VmapAxis, state: Any, group: list[list[Any]]
) -> Any:
    """Runs a step on the ranks of ``vmap``, and returns the optimizer's state."""
    stacked = []
    for microbatches in zip(*group, strict=True):
        stacked.append(tree.map(lambda *leaves: torch.stack(leaves), *microbatches))
    on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    _, opt_state, _ = on_ranks(*state, stacked)
    return opt_state


def _run_on_threads(
    step: Any, axis: Any, state: Any, group: list[list[Any]], *, sharded: bool
) -> Any:
    """Runs a step on threads, and returns the optimizer's state of the first rank."""

    def run(microbatches: list[Any]) -> Any:
        rank_state = ps.shard(state, axis) if sharded else state
        _, opt_state, _ = step(*rank_state, microbatches)
        return ps.unshard(opt_state)

    first, *_ = axis.map(run)(group)
    return first


class Measurement(NamedTuple):
    """A step's gradient: its relative error, the bound by rounding, and whether its bits agree.

    In half precision so many roundings in a row have no bound: it is infinite, and the bits tell. They are None
    where vmap or a compiler runs other operations than the plain model.
    """

    error: float
    bound: float
    same_bits: bool | None


def measure_step(family: str, setting: Setting) -> Measurement:
    """Measures a step of the family in this setting."""
    group = make_groups(family, setting)
    expected, norms = reference(family)
    grads = compute_step_grads(family, setting, group)
    assert grads.keys() == expected.keys()
    errors = {}
    for name, grad in grads.items():
        errors[name] = grad.to(torch.float64) - expected[name]
    size = _norm(expected)
    return Measurement(
        error=_norm(errors) / size,
        bound=norms / size * _relative_bound(family, setting),
        same_bits=_has_same_bits(family, setting, group, grads),
    )


def _relative_bound(family: str, setting: Setting) -> float:
    """Bounds both gradients' roundings, in the narrowest dtype in which the model computes."""
    if setting.dtype.itemsize < 4:
        return torch.inf
    dtype = torch.float32 if FAMILIES[family].float32 else setting.dtype
    return 2 * rounding_bound(ROUNDINGS, dtype)


def _has_same_bits(
    family: str, setting: Setting, group: list[list[Any]], grads: Grads
) -> bool | None:
    # With gather, each microbatch is summed over ranks: that is another order.
    if "compile" in setting.step or "gather" in setting.step:
        return None
    if isinstance(setting.axis, ps.VmapAxis):
        return None
    expected = _summed(family, setting, group)
    return all(torch.equal(grads[name], grad) for name, grad in expected.items())


def _sum_grads(grads: list[Grads]) -> Grads:
    """Adds gradients in their order."""
    first, *others = grads
    total = dict(first)
    for other in others:
        for name in total:
            total[name] = total[name] + other[name]
    return total


def _summed(family: str, setting: Setting, group: list[list[Any]]) -> Grads:
    """Sums the plain model's gradients of each microbatch, on each rank, then over ranks."""
    module = make_model_for(family, setting)
    for parameter in module.parameters():
        # What a leaf in several places receives is added up in float32, as in a step.
        parameter.grad_dtype = tree.accumulation_dtype(parameter.dtype)
    tokens = sum(count_labels(part) for rank in group for part in rank)
    of_ranks = []
    for rank in group:
        of_microbatches = []
        for microbatch in rank:
            arguments = make_inputs(family, setting, microbatch)
            grads = plain_grads(module, microbatch, arguments, tokens)
            of_microbatches.append(grads)
        of_ranks.append(_sum_grads(of_microbatches))
    return _sum_grads(of_ranks)
