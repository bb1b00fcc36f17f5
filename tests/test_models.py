"""The ready-made workloads are the published models, counted exactly, and refuse what they cannot do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from remat import models
from remat.errors import UsageError
from remat.models.adapters import Lora, with_lora
from remat.workload.workload import Workload
from tests.small_models import MORE_TEST_SIZES, TEST_SIZES

pytest.importorskip("transformers")

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # h = 12288: 96 layers of 12hh + 13h; 50257 tokens and 2048 positions of h; a last layer norm of 2h
    "gpt3-175b": 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "bert-large": 335_174_458,
    "t5-base": 222_903_552,
    # h = 512: embeddings; 8 layers of attention (q, o: hh; k, v: hh/4), its two head norms of 64, the router,
    # 8 experts of three 512 x 256 matrices and two norms; a last norm
    "qwen3-moe": 151936 * 512 + 8 * (5 * 512**2 // 2 + 2 * 64 + 8 * 512 + 8 * 3 * 512 * 256 + 2 * 512) + 512,
    # As computed from the configurations
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-3-1b": 999_885_952,
    "qwen3-vl-4b": 4_437_815_808,
    "mistral-7b": 7_248_023_552,
    "nemotron-3-nano": 31_577_937_344,
    "phi-4": 14_659_507_200,
    # Without the vision tower, and the layer that predicts further tokens
    "qwen3.5-9b": 8_953_803_264,
    "glm-4.7-flash": 29_943_390_976,
    "vit-l16": 304_326_632,
    "resnet50": 25_557_032,
    "convnextv2-base": 88_717_800,
    "swin-base": 87_768_224,
}

SMALL = TEST_SIZES | MORE_TEST_SIZES


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(workload: Workload) -> nn.Module:
    with torch.device("meta"):
        return workload.build()


@pytest.mark.parametrize("name", models.names())
def test_has_the_published_parameters_and_needs_no_memory_to_build(name: str) -> None:
    model = on_meta(models.build(name))
    assert parameters(model) == PUBLISHED[name]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.training


@pytest.mark.parametrize("name", models.names())
def test_the_default_batch_fits_the_default_shape(name: str) -> None:
    workload = models.build(name)
    with torch.device("meta"):
        batch = workload.batch(workload.batch_size, workload.seq_len)
    inputs = batch.pop("input_ids" if workload.seq_len else "pixel_values")
    assert list(batch) == ["labels"] or name == "qwen3-vl-4b"
    assert inputs.device.type == "meta"
    assert inputs.shape[0] == batch["labels"].shape[0] == workload.batch_size
    assert workload.seq_len is None or inputs.shape[1] == workload.seq_len


@pytest.mark.fast("gpt2", "resnet50", "qwen3-vl-4b")
@pytest.mark.parametrize("name", SMALL)
def test_a_test_size_trains_a_step(name: str) -> None:
    workload = SMALL[name]()
    torch.manual_seed(0)
    model = workload.build()
    assert workload.optimizer is not None
    optimizer = workload.optimizer(model.parameters())
    with torch.autocast("cpu", workload.autocast):
        loss = workload.step(model, workload.batch(2, workload.seq_len and 32))
    loss.backward()
    optimizer.step()
    assert loss.isfinite() and loss.ndim == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_a_test_size_is_mostly_activations(name: str) -> None:
    # Weights, gradients and two moments in fp32 take at most a sixth of the 250 MiB that a step peaks at.
    assert 16 * parameters(on_meta(SMALL[name]())) < 42 * 2**20


def test_random_regularisation_is_on_as_in_the_original_training() -> None:
    for name in ("gpt2", "bert-large", "t5-base", "vit-l16"):
        rates = {module.p for module in on_meta(models.build(name)).modules() if isinstance(module, nn.Dropout)}
        assert 0.1 in rates, name
    for name in ("convnextv2-base", "swin-base"):
        modules = on_meta(models.build(name)).modules()
        rate = max(vars(module)["drop_prob"] for module in modules if "DropPath" in type(module).__name__)
        assert rate == pytest.approx(0.1), name


@pytest.mark.exhaustive
def test_gpt2_is_captured_as_one_graph() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    workload = TEST_SIZES["gpt2"]()
    torch._dynamo.reset()
    model = workload.build()
    model.compile(backend=count)
    workload.step(model, workload.batch(2, 32))
    assert len(graphs) == 1


def test_gpt3_is_bf16_and_the_others_run_under_autocast() -> None:
    gpt3 = models.build("gpt3-175b")
    assert {parameter.dtype for parameter in on_meta(gpt3).parameters()} == {torch.bfloat16}
    assert gpt3.autocast is None
    assert {models.build(name).autocast for name in models.names() if name != "gpt3-175b"} == {torch.bfloat16}


def test_t5_decodes_a_quarter_of_what_it_encodes() -> None:
    assert models.build("t5-base").batch(2, 510)["labels"].shape == (2, 128)  # 510 / 4 = 127.5, rounded up


def test_an_image_size_changes_the_images_and_the_positions() -> None:
    workload = models.build("vit-l16", image_size=384)
    assert workload.batch(2, None)["pixel_values"].shape == (2, 3, 384, 384)
    more_positions = (384 // 16) ** 2 - (224 // 16) ** 2  # of width 1024
    assert parameters(on_meta(workload)) == PUBLISHED["vit-l16"] + more_positions * 1024


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-2", "'gpt-2' is not known. Did you mean gpt2"),
        ("resnet-50", "Did you mean resnet50"),
        ("xyz", "'xyz' is not known. Choose one of gpt2, gpt2-medium"),
    ],
)
def test_an_unknown_name_is_refused_with_what_was_meant(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        models.build(name)


@pytest.mark.parametrize("name", models.TEXT)
def test_an_image_size_is_refused_for_text(name: str) -> None:
    with pytest.raises(UsageError, match=f"224 was given, but model {name} takes text"):
        models.build(name, image_size=224)


@pytest.mark.parametrize(
    ("name", "image_size", "message"),
    [
        pytest.param("vit-l16", 225, "225 is not a multiple of 16.* Choose 224,", id="one-over"),
        pytest.param("resnet50", 239, "239 is not a multiple of 32.* Choose 224,", id="nearest-below"),
        pytest.param("swin-base", 250, "250 is not a multiple of 32.* Choose 256,", id="nearest-above"),
        pytest.param("resnet50", 0, "0 is not a multiple of 32.* Choose 32,", id="none"),
    ],
)
def test_an_image_size_off_the_stride_is_refused(name: str, image_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        models.build(name, image_size=image_size)


def test_a_sequence_may_be_as_long_as_the_positions_and_no_longer() -> None:
    workload = models.build("gpt2")
    assert workload.batch(1, 1024)["input_ids"].shape == (1, 1024)
    with pytest.raises(UsageError, match="1025 is more than the 1024 positions of model gpt2"):
        workload.batch(1, 1025)


@pytest.mark.parametrize("name", models.IMAGES)
def test_a_sequence_length_is_refused_for_images(name: str) -> None:
    with pytest.raises(UsageError, match=f"128 was given, but model {name} takes images"):
        models.build(name).batch(1, 128)


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r'pip install "remat\[models\]"'):
        models.build("gpt2")


def test_importing_the_package_does_not_import_the_library() -> None:
    code = "import sys, remat.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Images and text


def test_an_image_takes_a_quarter_of_the_tokens_in_front_of_the_text() -> None:
    batch = models.build("qwen3-vl-4b").batch(2, 4096)
    grid, ids = batch["image_grid_thw"], batch["input_ids"]
    assert grid.tolist() == [[1, 64, 64], [1, 64, 64]]  # 64 x 64 patches, merged four to one: 1,024 tokens
    assert batch["pixel_values"].shape == (2 * 64 * 64, 3 * 2 * 16 * 16)
    assert (ids == 151655).sum(1).tolist() == [1024, 1024] and (batch["labels"] == -100).sum() == 2 * 1025
    assert torch.equal(ids == 151655, batch["mm_token_type_ids"] == 1)


# Adapters


@pytest.mark.fast("gpt2", "gpt-oss-20b")
@pytest.mark.parametrize("name", models.TEXT)
def test_adapters_go_on_every_text_model_and_are_all_that_trains(name: str) -> None:
    model = on_meta(with_lora(models.build(name), Lora(16)))
    adapters = {n for n, p in model.named_parameters() if "lora_" in n}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == adapters and adapters
    assert not [n for n in adapters if "experts" in n or "lm_head" in n or "conv1d" in n]
    of_adapters = torch.bfloat16 if name == "gpt3-175b" else torch.float32  # which is trained in 16 bits as it is
    assert {(p.dtype, "lora_" in n) for n, p in model.named_parameters()} == {
        (torch.bfloat16, False),
        (of_adapters, True),
    }


def test_adapters_have_the_size_of_their_rank() -> None:
    # A layer of Llama-3.2-1B: q and o 2048 x 2048, k and v 2048 x 512, gate and up 2048 x 8192, down back
    sides = 2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192)
    model = on_meta(with_lora(models.build("llama-1b"), Lora(16)))
    assert parameters(model) - PUBLISHED["llama-1b"] == 16 * 16 * sides  # 16 layers, rank 16


def test_adapters_keep_the_dtype_that_is_asked_for() -> None:
    workload = with_lora(models.build("llama-1b").with_dtype("bf16"), Lora(8), frozen=None)
    assert {p.dtype for p in on_meta(workload).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("text", ["16", "r=0", "r=x", "alpha=2", "r=8,dropout=1", "r=8;dropout=0"])
def test_adapters_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"not understood; say r=16, or r=16,dropout=0\.05"):
        Lora.parsed(text)


def test_adapters_are_said_as_rank_and_dropout() -> None:
    assert (Lora.parsed("r=16"), Lora.parsed("r=8,dropout=0.05")) == (Lora(16), Lora(8, 0.05))
