"""Lightning's DDP on two GPUs: the loss after some steps."""

import sys
import time

sys.path.pop(0)
import lightning
import torch


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
        self.loss = None

    def training_step(self, batch, _):
        self.loss = self.layers(batch).square().mean()
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.manual_seed(0)
network, data = Network(), torch.randn(2048, 1024)
trainer = lightning.Trainer(accelerator="gpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
began = time.perf_counter()
trainer.fit(network, torch.utils.data.DataLoader(data, batch_size=32))
if trainer.global_rank == 0:
    print("time", (time.perf_counter() - began) * 1e3)
    print("result", network.loss.item())
