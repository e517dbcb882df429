"""Says what PyTorch's steps cost in time and GPU memory: lazy initialisation, the first all_reduce, an unbatched ring of
sends and receives, a batched exchange, a second group over the same ranks. With --p2p-only sends, receives and
all_to_all_single alone. Holds that what arrives is right.

Run one process a GPU (`torchrun --nproc-per-node N pytorch_memory.py [--p2p-only]`). Rank 0 prints one line a step: the
milliseconds, and by how many MiB the memory used on its GPU grew, then the most of both over all ranks. Memory is the
whole device's, so nothing else may run on these GPUs. The numbers differ from run to run.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

BYTES = 4 << 20  # a message


def used_bytes():
    free, total = torch.cuda.mem_get_info()
    return total - free


class Steps:
    """Runs one step after the other, each begun by all ranks together, and says what it cost."""

    def __init__(self, cpu_group):
        self.cpu_group = cpu_group  # a group of CPU tensors: NCCL knows nothing of it
        dist.barrier(group=cpu_group)
        self.first = self.before = used_bytes()

    def run(self, name, step):
        dist.barrier(group=self.cpu_group)
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took = (time.perf_counter() - began) * 1e3
        dist.barrier(group=self.cpu_group)  # what the others map of this GPU is there, too
        now = used_bytes()
        self.say(name, took, now - self.before)
        self.before = now

    def say(self, name, took, grown):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (took, grown), group=self.cpu_group)
        if dist.get_rank() == 0:
            most_took, most_grown = (max(column) for column in zip(*everyone))
            print(f"{name:<24} {took:8.1f} ms {grown / 2**20:+9.1f} MiB   (most {most_took:8.1f} ms "
                  f"{most_grown / 2**20:+9.1f} MiB)", flush=True)

    def total(self):
        self.say("all together", 0.0, used_bytes() - self.first)


class Tensors:
    """All memory of the steps, made before the first of them, and the kernels that fill and check it, loaded."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.sent = torch.full((BYTES // 4,), float(rank), device="cuda")
        self.got = torch.full((BYTES // 4,), -1.0, device="cuda")
        self.small = torch.ones(1024, device="cuda")
        self.every = torch.full((ranks, BYTES // 4), float(rank), device="cuda")
        self.theirs = torch.full((ranks, BYTES // 4), -1.0, device="cuda")
        self.holds(self.sent, rank)
        self.holds(self.theirs[0], -1.0)
        torch.cuda.synchronize()

    def holds(self, tensor, value):
        assert bool((tensor == float(value)).all()), f"rank {self.rank}: expected {value}"

    def arrived(self):
        """What came from the rank before is its own number."""
        self.holds(self.got, (self.rank - 1) % self.ranks)
        self.got.fill_(-1.0)
        torch.cuda.synchronize()


def ring(tensors):
    """Each on the communicator of that pair. Such a communicator is made at its first call, by both: if all ranks began with
    sending, all would wait for the next one."""
    rank, ranks = tensors.rank, tensors.ranks
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    if rank % 2 == 0:
        works = [dist.isend(tensors.sent, after), dist.irecv(tensors.got, before)]
    else:
        works = [dist.irecv(tensors.got, before), dist.isend(tensors.sent, after)]
    for work in works:
        work.wait()


def batch(tensors):
    rank, ranks = tensors.rank, tensors.ranks
    operations = [dist.P2POp(dist.isend, tensors.sent, (rank + 1) % ranks),
                  dist.P2POp(dist.irecv, tensors.got, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def all_reduce(tensors, group=None):
    dist.all_reduce(tensors.small, group=group)


def second_group(tensors):
    all_reduce(tensors, dist.new_group(list(range(tensors.ranks))))


def with_collectives(steps, tensors):
    ranks = tensors.ranks
    steps.run("first all_reduce", lambda: all_reduce(tensors))
    tensors.holds(tensors.small, ranks)
    steps.run("unbatched ring", lambda: ring(tensors))
    tensors.arrived()
    steps.run("unbatched ring again", lambda: ring(tensors))
    tensors.arrived()
    steps.run("batched exchange", lambda: batch(tensors))
    tensors.arrived()
    steps.run("batched exchange again", lambda: batch(tensors))
    tensors.arrived()
    steps.run("second group all_reduce", lambda: second_group(tensors))
    tensors.holds(tensors.small, ranks * ranks)


def messages_only(steps, tensors):
    steps.run("unbatched ring", lambda: ring(tensors))
    tensors.arrived()
    steps.run("batched exchange", lambda: batch(tensors))
    tensors.arrived()
    steps.run("all_to_all_single", lambda: dist.all_to_all_single(tensors.theirs, tensors.every))
    for peer in range(tensors.ranks):
        tensors.holds(tensors.theirs[peer], peer)
    steps.run("all of it again", lambda: (ring(tensors), batch(tensors),
                                          dist.all_to_all_single(tensors.theirs, tensors.every)))
    tensors.arrived()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Without a device: communicators are made when they are first needed.
    dist.init_process_group("nccl")
    cpu_group = dist.new_group(backend="gloo")
    tensors = Tensors(dist.get_rank(), dist.get_world_size())
    steps = Steps(cpu_group)
    (messages_only if "--p2p-only" in sys.argv[1:] else with_collectives)(steps, tensors)
    steps.total()
    began = time.perf_counter()
    last = dist.get_rank() == 0
    dist.destroy_process_group()
    if last:
        print(f"{'destroy_process_group':<24} {(time.perf_counter() - began) * 1e3:8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
