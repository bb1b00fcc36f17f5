"""A plan in the Trainer of Lightning: a residual network learns the direction of bars.

python examples/lightning_trainer.py [--steps 40] [--budget 20MiB]
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning
import torch
from common import DEVICE, TARGET, TrainingResult, convnet, images, observed, options, report
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import remat
from remat.integrations.lightning import RematCallback

BATCH_SIZE = 32
WORKLOAD = remat.Workload(
    name="bars",
    build=convnet,
    batch=images,
    step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    batch_size=BATCH_SIZE,
)


class Bars(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: Sequence[str] | None = None) -> tuple[TrainingResult, TrainingResult]:
    given = options(__doc__, 20).parse_args(arguments)
    plan = remat.plan(WORKLOAD, budget=given.budget, target=TARGET, execution="modules")
    print(plan)
    torch.manual_seed(2)
    bars = TensorDataset(*images(BATCH_SIZE * given.steps))

    def train(*callbacks: RematCallback) -> list[float]:
        module = Bars()
        lightning.Trainer(
            max_epochs=1,
            accelerator=DEVICE.type if DEVICE.type == "cpu" else "gpu",
            devices=1,
            callbacks=list(callbacks),  # type: ignore[arg-type]
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, DataLoader(bars, BATCH_SIZE))
        return module.losses

    without = observed(train)
    planned = observed(lambda: train(RematCallback(plan, module="net")))
    report(without, planned)
    return without, planned


if __name__ == "__main__":
    main()
