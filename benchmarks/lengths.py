"""Plans by name at sizes that no model comes with, held to PyTorch's CUDA build: long texts, small and large images.

    python -m benchmarks lengths                        (hours)
    python -m benchmarks lengths:llama-1b-64k,fused     of one size, in one form

As `by_name.py`.
"""

from __future__ import annotations

from benchmarks import by_name

BUDGETS = ("60%step", "least")
FORMS = {"default": "", "fused": "--fuse", "bitwise": "--exact"}
SIZES = {
    "llama-1b-64k": "llama-1b --batch-size 1 --seq-len 65536",
    "gemma-3-1b-32k": "gemma-3-1b --batch-size 1 --seq-len 32768",
    "qwen3-moe-16k": "qwen3-moe --batch-size 1 --seq-len 16384",
    "bert-large-128": "bert-large --batch-size 256 --seq-len 128",
    "gpt2-odd": "gpt2 --batch-size 13 --seq-len 1000",
    "t5-base-2k": "t5-base --batch-size 4 --seq-len 2048",
    "vit-l16-448": "vit-l16 --batch-size 8 --image-size 448",
    "resnet50-96": "resnet50 --batch-size 512 --image-size 96",
    "swin-base-448": "swin-base --batch-size 8 --image-size 448",
}


def main(*names: str) -> None:
    by_name.hold("lengths", names, SIZES, FORMS, BUDGETS, "blind")
