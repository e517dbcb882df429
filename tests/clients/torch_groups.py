"""Makes process groups as PyTorch offers them, and checks sums and gathers of each: new_group, split_group, groups of one rank.

Run one process a GPU. MODE=lazy makes communicators at their first call, MODE=eager binds them to the device at once.
Each rank prints how many results were wrong; the program fails if any was.
"""

import os
import sys

import torch
import torch.distributed as dist

COUNTS = (1, 1000, 4096, 100000, 1 << 20)


def wrong(group, members, device):
    """How many results of a group differ from what its ranks have given."""
    rank, found = dist.get_rank(), 0
    if rank not in members:
        return 0
    for count in COUNTS:
        summed = torch.full((count,), float(rank + 1), device=device)
        dist.all_reduce(summed, group=group)
        gathered = torch.zeros(count * len(members), device=device)
        dist.all_gather_into_tensor(gathered, torch.full((count,), float(rank), device=device), group=group)
        expected = torch.tensor([float(member) for member in members], device=device).repeat_interleave(count)
        found += not bool(torch.all(summed == sum(member + 1 for member in members)))
        found += not torch.equal(gathered, expected)
    return found


def main():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    is_eager = os.environ.get("MODE", "eager") == "eager"
    dist.init_process_group("nccl", device_id=device if is_eager else None)
    rank, everybody = dist.get_rank(), list(range(dist.get_world_size()))
    halves = [everybody[: len(everybody) // 2], everybody[len(everybody) // 2 :]]
    found = wrong(None, everybody, device)
    for members in [everybody] * 4 + [everybody[::-1]] + [[member] for member in everybody]:
        found += wrong(dist.new_group(members), sorted(members), device)
    for parts in ([[everybody]] * 3 + [halves]) if is_eager else []:
        members = next(part for part in parts if rank in part)
        found += wrong(dist.split_group(split_ranks=parts), members, device)
    torch.cuda.synchronize()
    print(f"rank {rank} of {len(everybody)}: {found} wrong results", flush=True)
    dist.destroy_process_group()
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
