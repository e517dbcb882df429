"""Holds that PyTorch trains the same over Windlass: DDP, FSDP2, send/recv, all-to-all, sub-groups, CUDA graphs.

Run one process a GPU (`torchrun --nproc-per-node N torch_training.py`). Rank 0 prints one line a part with a
digest of its results on all ranks; the lines must be equal with and without Windlass.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def digest(*tensors):
    """A digest of the bytes of these tensors on every rank, in rank order."""
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own.hexdigest())
    return hashlib.sha256("".join(everyone).encode()).hexdigest()[:16]


def model():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)]
    return torch.nn.Sequential(*layers).cuda()


def train(network, steps=8):
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        loss = network(torch.randn(64, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def ddp():
    network = DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()])
    loss = train(network)
    return digest(loss, *network.parameters())


def fsdp():
    network = model()
    for layer in network:
        fully_shard(layer)
    fully_shard(network)
    loss = train(network)
    return digest(loss, *[parameter.full_tensor() for parameter in network.parameters()])


def ring():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for count in (1, 1000, 1 << 20):
        mine = torch.arange(count, device="cuda", dtype=torch.float32) + rank
        theirs = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(theirs, torch.arange(count, device="cuda", dtype=torch.float32) + (rank - 1) % ranks)
        results.append(theirs)
    if rank == 0:
        dist.send(results[0], 1)
    if rank == 1:
        dist.recv(results[0], 0)
    return digest(*results)


def all_to_all():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    even = torch.arange(ranks * 1024, device="cuda") + 10000 * rank
    received = torch.empty_like(even)
    dist.all_to_all_single(received, even)
    parts = [torch.full((100 * (rank + peer + 1),), float(rank), device="cuda") for peer in range(ranks)]
    uneven = [torch.empty(100 * (rank + peer + 1), device="cuda") for peer in range(ranks)]
    dist.all_to_all(uneven, parts)
    gathered = [torch.empty(10 * (peer + 1), device="cuda") for peer in range(ranks)]
    dist.all_gather(gathered, torch.full((10 * (rank + 1),), float(rank), device="cuda"))
    for peer in range(ranks):
        assert torch.all(uneven[peer] == peer) and torch.all(gathered[peer] == peer)
    return digest(received, *uneven, *gathered)


def sub_groups():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for members in ([0, 1], list(range(ranks)), list(range(ranks))[::-1]):
        group = dist.new_group(sorted(members))
        if rank in members:
            value = torch.full((4096,), float(rank + 1), device="cuda")
            dist.all_reduce(value, group=group)
            results.append(value)
    dist.barrier()
    return digest(*results)


def graph():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    value = torch.ones(1 << 16, device="cuda")
    total = torch.empty_like(value)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(value.clone())
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        total.copy_(value)
        dist.all_reduce(total)
    results = []
    for step in range(5):
        value.fill_(float(rank + step))
        captured.replay()
        torch.cuda.synchronize()
        assert torch.all(total == sum(range(ranks)) + ranks * step)
        results.append(total.clone())
        dist.all_reduce(value)
        results.append(value.clone())
    return digest(*results)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.backends.cudnn.deterministic = True
    eager = {"device_id": torch.device("cuda", local)} if os.environ.get("EAGER_INIT") else {}
    dist.init_process_group("nccl", **eager)
    for part in (ddp, fsdp, ring, all_to_all, sub_groups, graph):
        line = f"{part.__name__} {part()}"
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
