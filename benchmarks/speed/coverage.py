"""Which public models become one graph, how long does it take, and how fast is it then?

Tiny models of transformers and torch, with the dropout of their default configurations, each in three ways:

torch.compile    of the plain module's losses, full graph, in a loop with ``backward()``
compile=True     the update step with it
whole step       ``ps.compile`` of the step, full graph

A way has a fresh process and no caches. It takes updates of two microbatches, at six lengths; then it is timed against the same
way without a compiler. An encoder of pictures has six numbers of pictures.

graphs     how many inductor has compiled for all six; "no" where there is none, or a warning
s          seconds of the processor for the first update at each of the six, the C++ compiler's included
of eager   time of an update against eager

    python -m benchmarks.speed.coverage                      benchmarks/results/coverage.json
    python -m benchmarks.speed.coverage Llama Swin           these alone, beside others in the report

    python -m benchmarks.speed.coverage --backend aot_eager  only whether there is a graph

All of them take two hours on one core by inductor, and 25 minutes by "aot_eager", which generates no code.
"""

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from benchmarks.speed import stacked, timing
from support.torch_private import count_graphs

WAYS = ["torch.compile", "compile=True", "whole step"]
SECONDS = 240
"""After which a way is given up."""
REPEATS = 21
VOCABULARY = 96
WIDTH = 32
ROWS = 2
LENGTHS = [16, 24, 20, 28, 12, 32]
NUM_PICTURES = [2, 3, 4, 5, 6, 7]
PIXELS = 32
Batch = Mapping[str, Tensor]


class Model(NamedTuple):
    """A model, and on what it trains: text, masked text, pairs, pictures, sound, or a sequence."""

    make: Callable[[], Any]
    data: str


TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 1}
HEADED = {**GROUPED, "head_dim": 16}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH,
}  # fmt: skip
PICTURE: dict[str, Any] = {
    "image_size": PIXELS, "patch_size": 8, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 5,
}  # fmt: skip
STAGES: dict[str, Any] = {
    "image_size": PIXELS, "num_labels": 5, "embed_dim": 16, "depths": [1, 1],
    "num_heads": [2, 2], "window_size": 4, "patch_size": 2,
}  # fmt: skip
SOUND: dict[str, Any] = {
    **TEXT, "conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [2, 2],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False, "mask_time_prob": 0.0, "classifier_proj_size": 16, "num_labels": 5,
}  # fmt: skip
TO_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 1,
    "num_heads": 2, "decoder_start_token_id": 0,
}  # fmt: skip


class Recurrent(nn.Module):
    """Predicts tokens from the states of a recurrent layer."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = layer(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits."""
        states, _ = self.layer(self.embed(ids))
        logits: Tensor = self.head(states)
        return logits


class Encoder(nn.Module):
    """Predicts tokens by ``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits; a token attends to those before it."""
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits: Tensor = self.head(self.layers(self.embed(ids), mask=mask))
        return logits


class Denoiser(nn.Module):
    """Predicts noise as the U-Nets of diffusion do: at a time, over two resolutions, with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.enter = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.leave = nn.Conv2d(2 * WIDTH, 3, 3, padding=1)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Returns the noise in the pictures."""
        frequencies = torch.arange(WIDTH // 2) / 8
        angles = times[:, None] * frequencies
        at_time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        high = functional.silu(self.enter(noisy) + at_time[:, :, None, None])
        low = self.norm(self.down(high))
        flat = low.flatten(2).mT
        mixed, _ = self.attention(flat, flat, flat, need_weights=False)
        low = low + mixed.mT.unflatten(2, low.shape[2:])
        noise: Tensor = self.leave(torch.cat([high, self.up(low)], 1))
        return noise


def of(name: str, settings: Mapping[str, Any], **others: Any) -> Callable[[], Any]:
    """Returns a function that makes this model of transformers."""

    def make() -> Any:
        model_class = getattr(transformers, name)
        config = model_class.config_class(**{**settings, **others})
        return model_class(config)

    return make


def text(name: str, settings: Mapping[str, Any] = TEXT, **others: Any) -> Model:
    """A language model."""
    return Model(of(f"{name}ForCausalLM", settings, **others), "text")


def masked(name: str, settings: Mapping[str, Any] = TEXT, **others: Any) -> Model:
    """An encoder of text."""
    return Model(of(f"{name}ForMaskedLM", settings, **others), "masked text")


def pairs(name: str, settings: Mapping[str, Any], **others: Any) -> Model:
    """An encoder and a decoder."""
    make = of(f"{name}ForConditionalGeneration", settings, **others)
    return Model(make, "pairs")


def pictures(name: str, settings: Mapping[str, Any], **others: Any) -> Model:
    """A classifier of pictures."""
    return Model(of(f"{name}ForImageClassification", settings, **others), "pictures")


MODELS: dict[str, Model] = {
    "GPT-2": Model(of("GPT2LMHeadModel", TEXT), "text"),
    "GPT-Neo": text("GPTNeo", TEXT, attention_types=[[["global"], 1]], num_layers=1),
    "GPT-NeoX": text("GPTNeoX"),
    "GPT-J": text("GPTJ", TEXT, rotary_dim=8),
    "OPT": text("OPT", TEXT, ffn_dim=64, word_embed_proj_dim=WIDTH),
    "BLOOM": text("Bloom", TEXT, n_head=2, n_layer=1),
    "Falcon": text("Falcon"),
    "Llama": text("Llama", GROUPED),
    "Mistral": text("Mistral", GROUPED, sliding_window=8),
    "Qwen 2": text("Qwen2", GROUPED),
    "Qwen 3": text("Qwen3", HEADED),
    "Gemma": text("Gemma", HEADED),
    "Gemma 2": text("Gemma2", HEADED, sliding_window=8),
    "Gemma 3": text("Gemma3", HEADED, sliding_window=8),
    "Phi": text("Phi", GROUPED),
    "Phi-3": text("Phi3", GROUPED),
    "StableLM": text("StableLm", GROUPED),
    "Cohere": text("Cohere", GROUPED),
    "OLMo 2": text("Olmo2", GROUPED),
    "Granite": text("Granite", GROUPED),
    "StarCoder 2": text("Starcoder2", GROUPED),
    "SmolLM 3": text("SmolLM3", GROUPED),
    "GLM 4": text("Glm4", HEADED),
    "Mixtral": text("Mixtral", {**GROUPED, **EXPERTS}),
    "Qwen 2, experts": text("Qwen2Moe", {**GROUPED, **EXPERTS}),
    "Qwen 3, experts": text("Qwen3Moe", {**HEADED, **EXPERTS}),
    "OLMoE": text("Olmoe", {**GROUPED, **EXPERTS}),
    "gpt-oss": text("GptOss", {**HEADED, **EXPERTS}, sliding_window=8),
    "DeepSeek V3": text(
        "DeepseekV3", {**TEXT, "num_key_value_heads": 2}, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=WIDTH, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=0,
    ),
    "Mamba": text("Mamba", TEXT, state_size=8),
    "Mamba 2": text("Mamba2", TEXT, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
    "RecurrentGemma": text("RecurrentGemma", HEADED, num_hidden_layers=3, lru_width=WIDTH, attention_window_size=8),
    "BERT": masked("Bert"),
    "RoBERTa": masked("Roberta", TEXT, max_position_embeddings=72),
    "DistilBERT": masked("DistilBert"),
    "ALBERT": masked("Albert", TEXT, embedding_size=16),
    "ELECTRA": masked("Electra", TEXT, embedding_size=16),
    "DeBERTa v2": masked("DebertaV2", TEXT, relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"]),
    "ModernBERT": masked("ModernBert", TEXT, num_hidden_layers=2, global_attn_every_n_layers=2, local_attention=8),
    "T5": pairs("T5", T5),
    "BART": pairs("Bart", TO_TEXT),
    "Pegasus": pairs("Pegasus", TO_TEXT),
    "ViT": pictures("ViT", PICTURE),
    "DeiT": pictures("DeiT", PICTURE),
    "BEiT": pictures("Beit", PICTURE),
    "DINOv2": pictures("Dinov2", PICTURE),
    "Swin": pictures("Swin", STAGES),
    "ConvNeXt": pictures("ConvNext", {}, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5),
    "wav2vec 2": Model(of("Wav2Vec2ForSequenceClassification", SOUND), "sound"),
    "HuBERT": Model(of("HubertForSequenceClassification", SOUND), "sound"),
    "nn.TransformerEncoder": Model(Encoder, "sequence"),
    "U-Net of diffusion": Model(Denoiser, "noise"),
    "nn.GRU": Model(lambda: Recurrent(nn.GRU), "sequence"),
}  # fmt: skip


def make_batch(data: str, number: int, seed: int) -> dict[str, Tensor]:
    """Makes the batch at one of the six lengths."""
    generator = torch.Generator().manual_seed(seed)
    length = LENGTHS[number]
    if data in ("pictures", "noise", "sound"):
        rows = NUM_PICTURES[number]
        pixels = torch.randn(rows, 3, PIXELS, PIXELS, generator=generator)
        if data == "noise":
            return {"noisy": pixels, "times": torch.rand(rows, generator=generator)}
        labels = torch.randint(0, 5, (rows,), generator=generator)
        if data == "sound":
            return {"input_values": pixels.flatten(1)[:, :400], "labels": labels}
        return {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    if data in ("text", "sequence"):
        batch["labels"] = ps.shift_labels(ids)
    if data == "pairs":
        batch["decoder_input_ids"] = ids.flip(1)
    return batch


def weigh(batch: Batch) -> Tensor:
    """Counts labels, or each picture with noise as one."""
    if "labels" in batch:
        return ps.label_weights(batch)
    return torch.ones_like(batch["times"], dtype=torch.bool)


def losses_of(module: Callable[..., Any], data: str, batch: Batch) -> Tensor:
    """Returns the loss of each token or picture."""
    if data == "noise":
        noise: Tensor = module(batch["noisy"], batch["times"])
        return (noise - batch["noisy"]).square().mean((1, 2, 3))
    if data == "sequence":
        return ps.losses.cross_entropy(module(batch["input_ids"]), batch["labels"])
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    if data in ("text", "pairs"):
        inputs["use_cache"] = False  # type: ignore[assignment]
    return ps.losses.cross_entropy(module(**inputs).logits, batch["labels"])


def make_updates(model: Model, way: str, backend: str) -> list[Callable[[], Any]]:
    """Makes six functions, one for each length, of which each takes an update of this way.

    Without a ``backend``, nothing is compiled.
    """
    torch.manual_seed(0)
    module = model.make().train()
    data = model.data
    groups = []
    for number in range(len(LENGTHS)):
        groups.append([make_batch(data, number, seed) for seed in range(2)])
    if way == "torch.compile":
        return [make_loop(module, data, group, backend) for group in groups]
    params, apply = ps.from_module(module)
    optimizer = ps.optim.sgd(0.01)

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return losses_of(lambda *xs, **kw: apply(params, *xs, **kw), data, batch)

    settings: dict[str, Any] = {}
    if backend and way == "compile=True":
        settings["compile"] = partial(torch.compile, backend=backend)
        if backend == "inductor":
            settings["compile"] = True
    step: Any = ps.make_update_step(loss_fn, optimizer, weight_fn=weigh, **settings)
    # The module is checked at its first call, which must not be a compiler's.
    loss_fn(params, groups[0][0])
    if backend and way == "whole step":
        step = ps.compile(step, fullgraph=True, backend=backend)
    opt_state = optimizer.init(params)
    return [lambda group=group: step(params, opt_state, group) for group in groups]  # type: ignore[misc]


def make_loop(
    module: nn.Module, data: str, group: list[Any], backend: str
) -> Callable[[], Any]:
    """Makes an update of the plain module by hand."""
    compute = _losses_by(module, data, backend)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)

    def update() -> None:
        num_tokens = sum(weigh(batch).sum() for batch in group)
        optimizer.zero_grad()
        for batch in group:
            ((compute(batch) * weigh(batch)).sum() / num_tokens).backward()
        optimizer.step()

    return update


_compiled: dict[tuple[int, str], Any] = {}


def _losses_by(module: nn.Module, data: str, backend: str) -> Any:
    """Returns the module's losses, compiled once for all lengths."""
    key = id(module), backend
    if key not in _compiled:

        def losses(batch: Batch) -> Tensor:
            return losses_of(module, data, batch)

        _compiled[key] = losses
        if backend:
            _compiled[key] = torch.compile(losses, fullgraph=True, backend=backend)
    return _compiled[key]


def measure(name: str, way: str, backend: str) -> dict[str, Any]:
    """Compiles one model in one way; returns the figures, or why there are none."""
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches = True
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    eager = make_updates(MODELS[name], way, "")
    for update in eager:
        update()
    updates = make_updates(MODELS[name], way, backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = stacked.processor_seconds()
        try:
            for update in updates:
                update()
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return {"no": f"{type(error).__name__}: {' '.join(lines)[:600]}"}
        seconds = stacked.processor_seconds() - before
    texts = [str(warning.message) for warning in caught]
    fallbacks = [text for text in texts if "compile=True" in text]
    if fallbacks:
        return {"no": fallbacks[0][:600]}
    graphs = count_graphs()
    ratios = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        eager[-1]()
        middle = time.perf_counter()
        updates[-1]()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return {
        "graphs": graphs,
        "seconds": seconds,
        "of eager": statistics.median(ratios),
    }


def measure_apart(name: str, way: str, backend: str) -> dict[str, Any]:
    """Measures in a fresh process, which has ``SECONDS``."""
    command = [sys.executable, "-m", "benchmarks.speed.coverage", "--one"]
    command += [name, way, backend]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"no": f"not compiled within {SECONDS} seconds"}
    if ended.returncode:
        return {"failed": without_folders(ended.stderr[-800:])}
    figures: dict[str, Any] = json.loads(without_folders(ended.stdout.splitlines()[-1]))
    return figures


def without_folders(text: str) -> str:
    """Returns a text whose paths begin at a package.

    >>> without_folders("At /home/me/.venv/lib/python3.11/site-packages/torch/nn.py, line 3")
    'At torch/nn.py, line 3'
    """
    return re.sub(r"/[^\s\"]*/(site-packages|purestep|benchmarks)/", _begin_at, text)


def _begin_at(match: re.Match[str]) -> str:
    folder = match.group(1)
    return "" if folder == "site-packages" else f"{folder}/"


def cell(figures: Mapping[str, Any]) -> str:
    """Formats what ``measure`` returns."""
    if "graphs" not in figures:
        return "no" if "no" in figures else "failed"
    seconds, ratio = figures["seconds"], figures["of eager"]
    return f"{figures['graphs']}, {seconds:.0f} s, {ratio:.2f}"


def main() -> None:
    """Prints a table line by line, and writes the report."""
    parser = timing.arguments(__doc__, repeats=REPEATS, launches=1)
    parser.add_argument("names", nargs="*", help="models; all")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = {*options.names} - MODELS.keys()
    if unknown:
        parser.error(f"no models are called {sorted(unknown)}: {', '.join(MODELS)}")
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    print(f"| | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    path = options.results / "coverage.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in options.names or MODELS:
        report[name] = {way: measure_apart(name, way, options.backend) for way in WAYS}
        print(f"| {name} | {' | '.join(map(cell, report[name].values()))} |")
        for way, figures in report[name].items():
            for problem in ("no", "failed"):
                if problem in figures:
                    print(f"    {way}: {figures[problem]}", file=sys.stderr)
        sys.stdout.flush()
    timing.write(options.results, "coverage", report)


if __name__ == "__main__":
    main()
