"""Holds that PyTorch's large all-gathers give the same over Windlass whatever allocator their memory comes from, with
`torch.cuda.empty_cache` between: plain gathers, and steps as FSDP does them. All is integers, so every result is exact
and each rank checks it against what it computes alone.

Run one process a GPU (`torchrun --nproc-per-node N torch_registered.py MODE`). MODE is one of `default`, `expandable`
(expandable segments), `async` (cudaMallocAsync) and `pool` (a MemPool over ncclMemAlloc: of these only its memory can be
registered). Rank 0 prints one line a part with a digest of its results on all ranks; the lines must be equal with and
without Windlass, and in all modes. Each rank says on standard error how much memory is free before and after.
"""

import contextlib
import hashlib
import os
import sys

MODES = {"default": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync", "pool": ""}
MODE = sys.argv[1]
os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # read when torch first sees CUDA
if MODES[MODE]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = MODES[MODE]

import torch
import torch.distributed as dist

ROUNDS = 5  # each with a memory pool of its own
MODULUS = 1000003


class Memory:
    """Where the tensors of collectives come from."""

    def __init__(self):
        self.pool = None

    def renew(self):
        """Gives the pool back with all that it holds; the next one begins empty."""
        torch.cuda.synchronize()
        self.pool = None
        if MODE == "pool":
            backend = dist.group.WORLD._get_backend(torch.device("cuda"))
            self.pool = torch.cuda.MemPool(backend.mem_allocator)

    def used(self):
        return contextlib.nullcontext() if self.pool is None else torch.cuda.use_mem_pool(self.pool)

    def empty(self, count):
        with self.used():
            return torch.empty(count, dtype=torch.int32, device="cuda")


def digest(own):
    """A digest of every rank's bytes, in rank order."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own.hexdigest())
    return hashlib.sha256("".join(everyone).encode()).hexdigest()[:16]


def add(own, tensor):
    own.update(tensor.cpu().numpy().tobytes())


def share(bytes_in_total):
    """Elements that each rank gives, of so many bytes and a few more: their number is odd."""
    return (bytes_in_total // 4 // dist.get_world_size()) | 1


def whole(count, key):
    """What all ranks together give."""
    return (torch.arange(count * dist.get_world_size(), dtype=torch.int32, device="cuda") + key) * 7919 % MODULUS


def gathers(memory):
    """Sizes around and above what is registered; out of place, in place, and at addresses that no page begins with."""
    rank, own = dist.get_rank(), hashlib.sha256()
    for round in range(ROUNDS):
        memory.renew()
        for step in range(8):
            for mebibytes in (4, 8, 12, 40):
                count = share(mebibytes << 20)
                wanted = whole(count, 100 * round + step)
                room = memory.empty(wanted.numel() + 3)
                output = room[step % 3:][: wanted.numel()].fill_(-1)
                given = output[rank * count:][:count] if step % 2 else memory.empty(count)
                given.copy_(wanted[rank * count:][:count])
                dist.all_gather_into_tensor(output, given)
                assert torch.equal(output, wanted), f"rank {rank}, round {round}, step {step}, {mebibytes} MiB"
                del room, given
            if step % 2:
                torch.cuda.empty_cache()
            add(own, output[::1009])
            del output
    return digest(own)


def sharded_steps(memory):
    """Each layer is gathered while the one before is computed, freed after use, and what comes of it is reduced and
    scattered."""
    rank, ranks, own = dist.get_rank(), dist.get_world_size(), hashlib.sha256()
    memory.renew()
    counts = [share(mebibytes << 20) for mebibytes in (8, 24, 9, 2, 16)]
    references = [whole(count, layer) for layer, count in enumerate(counts)]
    shards = []
    for count, reference in zip(counts, references):
        shards.append(memory.empty(count).copy_(reference[rank * count:][:count]))

    def gather(layer):
        full = memory.empty(counts[layer] * ranks)
        return full, dist.all_gather_into_tensor(full, shards[layer], async_op=True)

    for step in range(12):
        ahead = gather(0)
        for layer, count in enumerate(counts):
            full, work = ahead
            if layer + 1 < len(counts):
                ahead = gather(layer + 1)
            work.wait()
            assert torch.equal(full, references[layer]), f"rank {rank}, step {step}, layer {layer}"
            gradient = memory.empty(full.numel()).copy_(full % 7 + rank)
            del full, work
            reduced = memory.empty(count)
            dist.reduce_scatter_tensor(reduced, gradient)
            shards[layer].add_(reduced).remainder_(MODULUS)
            gains = references[layer] % 7 * ranks + ranks * (ranks - 1) // 2
            references[layer] = (references[layer] + gains) % MODULUS
            del gradient, reduced, gains
            if (step + layer) % 3 == 0:
                torch.cuda.empty_cache()
        del ahead
        if step == 6:
            # As after a checkpoint: the shards move, and with them all that was cached.
            kept = [shard.cpu() for shard in shards]
            shards.clear()
            memory.renew()
            torch.cuda.empty_cache()
            shards.extend(memory.empty(shard.numel()).copy_(shard) for shard in kept)
    for shard in shards:
        add(own, shard)
    return digest(own)


def say_free(when):
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    print(f"{MODE}, rank {dist.get_rank()}: {free / 2**20:.0f} of {total / 2**20:.0f} MiB free {when}", file=sys.stderr,
          flush=True)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    memory = Memory()
    for part in (gathers, sharded_steps):
        dist.barrier()
        say_free(f"before {part.__name__}")
        line = f"{part.__name__} {part(memory)}"
        torch.cuda.synchronize()
        memory.pool = None
        torch.cuda.empty_cache()
        dist.barrier()
        say_free(f"after {part.__name__}")
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
