"""Published training speeds, with the settings that they were obtained with, and workloads that run the same kernels.

Only eager runs whose hardware, batch, sequence, precision and checkpointing are stated. Each
`PublishedRun` says what its workload here does differently. `split` is "fit" for those that parameters of
`remat/costing/roofline.py` were fitted to, and "check" for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from remat.models import llama, resnet
from remat.models.common import text_model, transformers
from remat.workload.target import TARGETS, Target
from remat.workload.workload import Workload

LLM_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
LAMBDA = "lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-v2-fp{}.csv, LambdaOD 192-222-52-154"
NVIDIA = "NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md"
TIMM = "huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
TORCHTITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
TORCHTITAN_A100 = "pytorch/torchtitan, docs/performance.md at 1ea476e, April 2024"
FMS = "foundation-model-stack/fms-fsdp, README.md at 4ffb9bd, March 2024"
SQUAD = "NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md, container 21.11"
THUNDER = "Lightning-AI/lightning-thunder, issue 1506, comment of 4 December 2024"

Checkpointing = Literal["none", "products", "every second layer", "every layer"]


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """One published speed.

    per_second     what the source prints: tokens, images or sequences, per second and GPU
    step_items     how many of those one micro-batch has
    optimizer_share  of the optimizer's time, what falls on one micro-batch of one rank
    checkpointing  which layers are; "products": all, and each saves attention and every other product (torchtitan)
    differs        what the workload here does otherwise than the source's program
    """

    name: str
    split: Literal["fit", "check"]
    workload: Workload
    target: Target
    per_second: float
    step_items: int
    source: str
    settings: str
    differs: str
    optimizer_share: float = 1.0
    checkpointing: Checkpointing = "none"

    @property
    def published_ms(self) -> float:
        return 1e3 * self.step_items / self.per_second


# Hardware


def _card(known: str, torch: str, **changes: Any) -> Target:
    """A target as the source's torch trains on it. All are older than torch's preference for cuDNN's attention."""
    return dataclasses.replace(TARGETS[known].with_versions(torch, (8, 9)), **changes)


def _tf32(target: Target) -> Target:
    """NVIDIA's containers multiply float32 by TF32, which torch by itself does not."""
    return dataclasses.replace(target, flops_per_us={**target.flops_per_us, "float32": target.flops_per_us["tf32"]})


def rtx3090() -> Target:
    """GA102 whitepaper: 936 GB/s, 6 MB of L2, 82 processors.

    35.6 teraflops in fp32 and TF32, 71 dense in fp16 added up in fp32.
    """
    rates = {"float32": 35.6e6, "tf32": 35.6e6, "float16": 71e6, "bfloat16": 71e6}
    return dataclasses.replace(
        TARGETS["rtx4090"],
        name="rtx3090",
        bytes_per_us=0.936e6,
        flops_per_us=rates,
        capability=86,
        processors=82,
        l2_bytes=6 << 20,
        torch="1.12",
        cudnn=(8, 3),
    )


# Models


class _Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class _Decoder(nn.Module):
    """MPT's shape: learned positions, layer norms before, GELU, tied embeddings, vocabulary of 50368."""

    def __init__(self, width: int, layers: int, heads: int, positions: int, vocab: int = 50368):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _mpt(width: int, layers: int, heads: int, batch_size: int, length: int, vocab: int = 50368) -> Workload:
    def batch(samples: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert seq_len is not None
        return torch.randint(0, vocab, (samples, seq_len)), torch.randint(0, vocab, (samples, seq_len))

    return Workload(
        f"mpt-{width}x{layers}",
        lambda: _Decoder(width, layers, heads, length),
        batch,
        lambda model, given: model(*given),
        batch_size,
        length,
        autocast=torch.bfloat16,
    )


class _ProductsBlock(_Block):
    """The same with attention in products and a softmax, and the GELU of GPT-2."""

    mask: torch.Tensor

    def __init__(self, width: int, heads: int, positions: int):
        super().__init__(width, heads)
        self.register_buffer("mask", torch.ones(positions, positions).tril().view(1, 1, positions, positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, 2))
        scores = (q @ k.transpose(-2, -1)) * k.shape[-1] ** -0.5
        length = x.shape[1]
        weights = F.softmax(scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).contiguous().flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def _llama(
    width: int,
    layers: int,
    heads: tuple[int, int],
    mlp: int,
    batch_size: int,
    length: int,
    *,
    vocab: int = 32000,
    fused_norms: bool = False,
) -> Workload:
    """Llama 2, or 3 by its vocabulary, with weights in bf16; `fused_norms`: each RMS norm is one kernel."""
    shape = {
        **llama.SHAPE,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": mlp,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    base = text_model(f"llama-{width}x{layers}", "Llama", shape, batch_size=batch_size, seq_len=length)

    def build() -> nn.Module:
        model = base.build()
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(parent, name, nn.RMSNorm(width, eps=1e-5))
        return model

    return (dataclasses.replace(base, build=build) if fused_norms else base).with_dtype("bf16")


def _squad(width: int, layers: int, heads: int, batch_size: int, dtype: torch.dtype) -> Workload:
    """Fine-tuning BERT for SQuAD at 384 tokens, attention in products and a softmax, every weight in `dtype`."""
    library = transformers()

    def build() -> nn.Module:
        config = library.BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            attn_implementation="eager",
        )
        return library.BertForQuestionAnswering(config).to(dtype).train()

    def batch(samples: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        assert seq_len is not None
        return {
            "input_ids": torch.randint(0, 30522, (samples, seq_len)),
            "start_positions": torch.randint(0, seq_len, (samples,)),
            "end_positions": torch.randint(0, seq_len, (samples,)),
        }

    return Workload(
        f"bert-{width}x{layers}-squad",
        build,
        batch,
        lambda model, given: model(**given).loss,
        batch_size,
        384,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )


def _images(workload: Workload, batch_size: int, autocast: torch.dtype | None, *, last: bool) -> Workload:
    """An image classifier trained by SGD; `last`: channels last."""
    layout = torch.channels_last if last else torch.contiguous_format
    build, batch = workload.build, workload.batch

    def laid_out(samples: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        given = batch(samples, seq_len)
        return {**given, "pixel_values": given["pixel_values"].contiguous(memory_format=layout)}

    return dataclasses.replace(
        workload,
        build=lambda: build().to(memory_format=layout),  # type: ignore[call-overload]
        batch=laid_out,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=batch_size,
        autocast=autocast,
    )


def _resnet101() -> Workload:
    return resnet.workload(
        "resnet101",
        embedding_size=64,
        hidden_sizes=(256, 512, 1024, 2048),
        depths=(3, 4, 23, 3),
        batch_size=256,
        image_size=224,
        labels=1000,
    )


def _timm(model: str, batch_size: int) -> Workload:
    """ConvNeXt-Base and ViT-Base as transformers has them; attention in products and a softmax, as timm 0.6 has it."""
    library = transformers()

    def build() -> nn.Module:
        kind = {"num_labels": 1000, "problem_type": "single_label_classification"}
        if model == "convnext_base":
            config = library.ConvNextConfig(hidden_sizes=[128, 256, 512, 1024], depths=[3, 3, 27, 3], **kind)
            return library.ConvNextForImageClassification(config).train()
        config = library.ViTConfig(hidden_dropout_prob=0.0, attn_implementation="eager", **kind)
        return library.ViTForImageClassification(config).train()

    base = resnet.resnet50()
    return dataclasses.replace(base, name=model, build=build, batch_size=batch_size)


# The runs

_FSDP = "8 GPUs, FSDP full shard, amp_bf16, no checkpointing, flash-attn, eager"
_MPT_DIFFERS = "flash-attn 1 or 2 and a fused cross entropy there; communication is not in the estimate"
_A100 = "a100-80gb"
_H100 = "h100-80gb"

_MPT_RUNS: list[tuple[str, Literal["fit", "check"], str, tuple[int, int, int], int, int, int, float]] = [
    # name, split, GPU, (width, layers, heads), micro-batch, sequence, accumulation, tokens per second and GPU
    ("mpt-125m", "fit", _A100, (768, 12, 12), 32, 2048, 2, 141737),
    ("mpt-350m", "check", _A100, (1024, 24, 16), 32, 2048, 2, 58782),
    ("mpt-760m", "check", _A100, (1536, 24, 12), 24, 2048, 2, 32434),
    ("mpt-1b", "fit", _A100, (2048, 24, 16), 14, 2048, 4, 20513),
    ("mpt-1b-8k", "check", _A100, (2048, 24, 16), 3, 8192, 4, 13814),
    ("mpt-3b", "check", _A100, (2560, 32, 20), 10, 2048, 2, 10811),
    ("mpt-7b", "fit", _A100, (4096, 32, 32), 6, 2048, 2, 4641),
    ("mpt-760m", "fit", _H100, (1536, 24, 12), 24, 2048, 2, 63147),
    ("mpt-1b", "check", _H100, (2048, 24, 16), 14, 2048, 1, 45455),
    ("mpt-1b-8k", "check", _H100, (2048, 24, 16), 3, 8192, 4, 29157),
    ("mpt-7b", "fit", _H100, (4096, 32, 32), 6, 2048, 1, 10643),
]


def _mpt_run(
    name: str,
    split: Literal["fit", "check"],
    card: str,
    shape: tuple[int, int, int],
    batch_size: int,
    length: int,
    accumulation: int,
    per_second: float,
) -> PublishedRun:
    date = "October 2023" if card == _A100 else "January 2024"
    return PublishedRun(
        f"{name} {card}",
        split,
        _mpt(*shape, batch_size, length),
        _card(card, "2.1"),
        per_second,
        batch_size * length,
        f"{LLM_FOUNDRY}, {date}",
        f"{batch_size} x {length}, accumulated over {accumulation}, {_FSDP}",
        _MPT_DIFFERS,
        optimizer_share=1 / (8 * accumulation),
    )


def _torchtitan() -> PublishedRun:
    width = "96 GB of HBM2e at 2.4 TB/s, 500 W"
    card = _card(_H100, "2.6", name="h100-96gb-500w", bytes_per_us=2.4e6)
    return PublishedRun(
        "llama-3.1-8b h100-96gb-500w",
        "check",
        dataclasses.replace(llama.llama_8b().with_dtype("bf16"), batch_size=2, seq_len=8192),
        card,
        5762,
        2 * 8192,
        f"{TORCHTITAN}, December 2024",
        f"2 x 8192, 8 GPUs ({width}), FSDP2, bf16, selective checkpointing by operator, eager",
        "transformers' Llama; the card's clock under 500 W is not known: rates are those of 700 W",
        optimizer_share=1 / 8,
        checkpointing="products",
    )


_13B, _70B, _34B = (5120, 40, (40, 40), 13824), (8192, 80, (64, 8), 28672), (8192, 48, (64, 8), 22016)
_7B, _LLAMA3_8B = (4096, 32, (32, 32), 11008), (4096, 32, (32, 8), 14336)

_TITAN_RUNS: list[tuple[str, Workload, Checkpointing, float]] = [
    ("llama-2-13b", _llama(*_13B, 2, 4096, fused_norms=True), "none", 2162),
    ("llama-2-13b", _llama(*_13B, 2, 4096, fused_norms=True), "every second layer", 1914),
    ("llama-2-13b", _llama(*_13B, 2, 4096, fused_norms=True), "products", 1904),
    ("llama-2-70b", _llama(*_70B, 1, 4096), "products", 355),
    ("llama-2-70b", _llama(*_70B, 2, 4096), "every layer", 353),
    ("llama-3-8b", _llama(*_LLAMA3_8B, 1, 8192, vocab=128256, fused_norms=True), "every second layer", 2904),
    ("llama-3-8b", _llama(*_LLAMA3_8B, 1, 8192, vocab=128256, fused_norms=True), "products", 2973),
    ("llama-3-70b", _llama(*_70B, 1, 8192, vocab=128256), "every layer", 331),
]
_FMS_RUNS: list[tuple[str, str, Workload, Checkpointing, float]] = [
    ("llama-2-7b", _A100, _llama(*_7B, 2, 4096), "none", 3700),
    ("llama-2-7b", _H100, _llama(*_7B, 2, 4096), "none", 7500),
    ("llama-34b", _A100, _llama(*_34B, 2, 4096), "every layer", 700),
    ("llama-34b", _H100, _llama(*_34B, 2, 4096), "every layer", 1550),
    ("llama-2-70b", _A100, _llama(*_70B, 2, 4096), "every layer", 370),
    ("llama-2-70b", _H100, _llama(*_70B, 2, 4096), "every layer", 800),
]


def _sharded_llamas() -> Iterator[PublishedRun]:
    """Llamas in bf16 on 64 to 128 GPUs: all of two tables but what one does not say the checkpointing of."""
    for name, workload, checkpointing, per_second in _TITAN_RUNS:
        norms = "" if "70b" in name else "fused RMS norms, "
        yield PublishedRun(
            f"{name}{'' if checkpointing == 'none' else f' {checkpointing}'} a100-80gb",
            "check",
            workload,
            _card(_A100, "2.4"),
            per_second,
            workload.batch_size * (workload.seq_len or 1),
            TORCHTITAN_A100,
            f"{workload.batch_size} x {workload.seq_len}, 64 GPUs, FSDP2, bf16, {norms}checkpointing: {checkpointing}, "
            "eager",
            "transformers' Llama; positions are turned by complex numbers there; communication is not in the estimate",
            optimizer_share=1 / 64,
            checkpointing=checkpointing,
        )
    for name, card, workload, checkpointing, per_second in _FMS_RUNS:
        ranks = 128 if card == _A100 else 96
        sharded = "HSDP" if "7b" in name else "FSDP"
        yield PublishedRun(
            f"{name} fms {card}",
            "check",
            workload,
            _card(card, "2.3"),
            per_second,
            workload.batch_size * (workload.seq_len or 1),
            FMS,
            f"2 x 4096, {ranks} GPUs, {sharded}, bf16, checkpointing: {checkpointing}, eager",
            "transformers' Llama in place of theirs; communication is not in the estimate",
            optimizer_share=1 / (8 if sharded == "HSDP" else ranks),
            checkpointing=checkpointing,
        )


def _single_cards() -> Iterator[PublishedRun]:
    """Language models on one GPU."""
    yield PublishedRun(
        "llama-3.2-1b h100-80gb",
        "check",
        dataclasses.replace(llama.llama_1b().with_dtype("bf16"), batch_size=1, seq_len=2048),
        _card(_H100, "2.6"),
        1e3 * 2048 / 53.6,
        2048,
        THUNDER,
        "1 x 2048, bf16 weights, forward and backward, 1 GPU, eager",
        "which H100 is not said; an older transformers there, which fills a cache",
        optimizer_share=0.0,
    )
    for name, dtype, target, per_second in (
        ("bert-large-squad", torch.float16, _card(_A100, "1.11"), 110.5),
        ("bert-large-squad-tf32", torch.float32, _tf32(_card(_A100, "1.11")), 61.5),
    ):
        yield PublishedRun(
            f"{name} a100-80gb",
            "check",
            _squad(1024, 24, 16, 32, dtype),
            target,
            per_second,
            32,
            SQUAD,
            f"32 x 384, {'TF32' if dtype == torch.float32 else 'fp16 weights (apex O2)'}, 1 GPU, eager",
            "apex's fused Adam and a padding mask there; master weights and loss scaling are not in the estimate",
        )


def published_runs() -> list[PublishedRun]:
    """All of them; the workloads are made, not built."""
    fp16 = torch.float16
    lambda_differs = (
        "apex's fused Adam and layer norm, bias and GELU fused, a padding mask there; master weights and loss scaling "
        "are not in the estimate"
    )
    dali = "synthetic images; label smoothing and DALI there"
    mpt = [_mpt_run(*row) for row in _MPT_RUNS]
    h100 = _card(_H100, "2.5")
    a100 = _card(_A100, "1.9")
    return [
        *mpt,
        PublishedRun(
            "bert-large-squad h100-80gb",
            "fit",
            _squad(1024, 24, 16, 112, fp16),
            h100,
            310,
            112,
            f"{LAMBDA.format(16)}, September 2024",
            "112 x 384, fp16 weights (apex O2), container 24.08 or 24.10, 1 GPU, eager",
            lambda_differs,
        ),
        PublishedRun(
            "bert-base-squad h100-80gb",
            "check",
            _squad(768, 12, 12, 320, fp16),
            h100,
            856,
            320,
            f"{LAMBDA.format(16)}, September 2024",
            "320 x 384, fp16 weights (apex O2), 1 GPU, eager",
            lambda_differs,
        ),
        PublishedRun(
            "bert-large-squad-tf32 h100-80gb",
            "check",
            _squad(1024, 24, 16, 64, torch.float32),
            _tf32(h100),
            149,
            64,
            f"{LAMBDA.format(32)}, September 2024",
            "64 x 384, TF32, 1 GPU, eager",
            lambda_differs,
        ),
        PublishedRun(
            "resnet50 a100-80gb",
            "fit",
            _images(resnet.resnet50(), 256, fp16, last=True),
            a100,
            2470,
            256,
            f"{NVIDIA}, container 21.03",
            "256 images, fp16 autocast, channels last, 1 GPU, eager",
            dali,
        ),
        PublishedRun(
            "resnet50-tf32 a100-80gb",
            "fit",
            _images(resnet.resnet50(), 256, None, last=False),
            _tf32(a100),
            938,
            256,
            f"{NVIDIA}, container 21.03",
            "256 images, TF32, channels first, 1 GPU, eager",
            dali,
        ),
        *(
            PublishedRun(
                f"{name} rtx3090",
                split,
                _images(workload, batch_size, fp16, last=True),
                rtx3090(),
                per_second,
                batch_size,
                f"{TIMM}, torch 1.12, CUDA 11.3",
                f"{batch_size} images of 224 x 224, fp16 autocast, channels last, 1 GPU, eager",
                "transformers' model in place of timm's",
            )
            for name, split, workload, batch_size, per_second in _timm_rows()
        ),
        _torchtitan(),
        *_sharded_llamas(),
        *_single_cards(),
    ]


def _timm_rows() -> list[tuple[str, Literal["fit", "check"], Workload, int, float]]:
    return [
        ("resnet50", "fit", resnet.resnet50(), 512, 1218.01),
        ("resnet101", "check", _resnet101(), 256, 747.89),
        ("convnext_base", "check", _timm("convnext_base", 128), 128, 338.68),
        ("vit_base_patch16_224", "fit", _timm("vit_base", 192), 192, 392.99),
    ]
