"""PyTorch data-parallel training, one process a GPU:

    windlass run -- torchrun --nproc-per-node=gpu ddp.py

Nothing here is Windlass's own: the script is written for NCCL.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    model = DistributedDataParallel(model.to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # every rank its own data
    for _ in range(STEPS):
        inputs = torch.randn(64, 256, device=device)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are all-reduced here
        optimizer.step()

    # All ranks hold the same weights, whatever their data was.
    total = torch.stack([parameter.double().sum() for parameter in model.parameters()]).sum()
    lowest, highest = total.clone(), total.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{STEPS} steps on {dist.get_world_size()} GPUs, weights equal: {bool(lowest == highest)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
