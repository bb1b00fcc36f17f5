"""Plans of one rank, held to PyTorch's CUDA build: FSDP2 over 2, 8 and 64 ranks, and DistributedDataParallel.

    python -m benchmarks shards             four families, a few layers at real width (an hour)
    python -m benchmarks shards:gpt2,DDP    of some, in some forms, for some budgets

As `by_name.py`; the plain loop runs one rank in a fake process group, whose collectives answer and move nothing.
"""

from __future__ import annotations

from benchmarks import by_name
from remat.models import bert as berts
from remat.models import gpt2 as gpts
from remat.models import llama as llamas
from remat.models.common import text_model
from remat.workload.workload import Workload

VOCAB = 8192  # so that layers, not the loss, are most of the peak
BUDGETS = ("80%step", "60%step", "least")
FORMS = {f"FSDP2 over {ranks}": f"--execution modules --shard zero3 --ranks {ranks}" for ranks in (2, 8, 64)}
FORMS |= {"DDP": "--ddp --ranks 8"}


def gpt2() -> Workload:
    return gpts.workload("gpt2-6", n_embd=768, n_layer=6, n_head=12, batch_size=16, vocab_size=VOCAB)


def llama() -> Workload:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 4, "intermediate_size": 8192, "vocab_size": VOCAB}
    shape = {**llamas.SHAPE, **sizes, "tie_word_embeddings": True}
    return text_model("llama-4", "Llama", shape, batch_size=4, seq_len=2048)


def bert() -> Workload:
    layers = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16}
    return berts.workload("bert-6", **layers, batch_size=32, vocab_size=VOCAB)


def qwen3_moe() -> Workload:
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
    shape = {"vocab_size": VOCAB, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32}
    heads = {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    return text_model("qwen3-moe-4", "Qwen3Moe", {**shape, **heads, **experts}, batch_size=4, seq_len=2048)


MODELS = ("gpt2", "llama", "bert", "qwen3_moe")


def main(*names: str) -> None:
    by_name.hold("shards", names, {name: f"{__file__}:{name}" for name in MODELS}, FORMS, BUDGETS)
