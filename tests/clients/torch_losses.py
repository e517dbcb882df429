"""Trains with DDP and with FSDP2 and prints what came out, to be compared between libraries (`loss_differences.py`).

Run one process a GPU (`torchrun --nproc-per-node N torch_losses.py`). Rank 0 prints a JSON line a way of training: the
loss of every step, averaged by an all-reduce, as each rank has it, and a digest of the parameters of each rank.
"""

import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH, STEPS = 2048, 6, 32, 30


def model():
    """Its layers have 16 MiB of weights and 8 KiB of biases each, as large and as small as collectives come."""
    torch.manual_seed(1)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 16)).cuda()


def train(network):
    """The losses, as this rank has them."""
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(1000 * step + rank)
        inputs = torch.randn(BATCH, WIDTH, device="cuda")
        loss = (network(inputs).float() - inputs[:, :16].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.AVG)
        losses.append(shown)
    return torch.stack(losses).tolist()


def digest(tensors):
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return own.hexdigest()[:16]


def ddp():
    network = DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()])
    return train(network), digest(network.parameters())


def fsdp():
    network = model()
    for layer in network:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(network)
    return train(network), digest([parameter.full_tensor() for parameter in network.parameters()])


def fsdp_bf16():
    network = model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in network:
        if list(layer.parameters()):
            fully_shard(layer, mp_policy=policy)
    fully_shard(network, mp_policy=policy)
    return train(network), digest([parameter.full_tensor() for parameter in network.parameters()])


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    for way in (ddp, fsdp, fsdp_bf16):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, way())
        if dist.get_rank() == 0:
            losses, digests = zip(*everyone)
            print(json.dumps({"way": way.__name__, "losses": losses, "digests": digests}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
