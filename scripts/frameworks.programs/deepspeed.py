"""DeepSpeed, ZeRO stage 2: losses of a small network."""

import os
import sys
import time

sys.path.pop(0)
import deepspeed
import torch

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)])
settings = {"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 2}}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
torch.manual_seed(engine.global_rank)
data, losses, began = torch.randn(32, 2048, device="cuda"), [], 0.0
for number in range(21):
    if number == 1:
        torch.cuda.synchronize()
        began = time.perf_counter()
    loss = engine(data).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if engine.global_rank == 0:
    print("time", (time.perf_counter() - began) / 20 * 1e3)
    print("result", losses[-1])
