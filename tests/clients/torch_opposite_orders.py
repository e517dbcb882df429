"""Collectives and messages of six process groups of the same ranks, a stream each, which even and odd ranks issue in opposite orders while
both GPUs are full: each needs its peer's, so what a library keeps from running for the others' sake may hang.

Run one process a GPU (`torchrun --nproc-per-node 2 torch_opposite_orders.py`). In each round a product fills the GPU, all streams wait
for it, and then every group gets one call, from the first group on even ranks and from the last on odd ones. Rank 0 prints a JSON line at the
end: rounds, seconds, how many results were checked. Where nothing moves for a minute a rank says at which round and ends itself.
PROCESS_GROUPS: 6 unless said otherwise. ROUNDS: 10000, of which every LARGE_EVERY-th (4) is of 16 MiB. GRAPH_ROUNDS (0): so many replays, after these, of a
graph of a small round and one of a large round in turn. CHECK_EVERY: rounds between two of known values (500). STILL_SECONDS (60).
"""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

GROUPS = int(os.environ.get("PROCESS_GROUPS", 6))
KIB, MIB = 1 << 10, 1 << 20
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "messages")
SMALL, LARGE = (KIB, 64 * KIB), 16 * MIB


def number(name, usual):
    return int(os.environ.get(name, usual))


class Watch:
    """Ends this process alone when a round takes too long: its peer sees so by its own."""

    def __init__(self, seconds):
        self.seconds, self.round, self.moved = seconds, 0, time.monotonic()
        threading.Thread(target=self.look, daemon=True).start()

    def at(self, round_number):
        self.round, self.moved = round_number, time.monotonic()

    def look(self):
        while time.monotonic() - self.moved < self.seconds:
            time.sleep(0.5)
        print(f"HANG at round {self.round}", flush=True)
        os._exit(3)  # nothing that waits for the device may be waited for


class Lane:
    """One group, its stream, and buffers that no other has."""

    def __init__(self, place):
        self.place = place
        self.group = dist.new_group(list(range(dist.get_world_size())))
        self.stream = torch.cuda.Stream()
        self.whole = torch.zeros(LARGE, device="cuda", dtype=torch.uint8).view(torch.float32)
        self.share = torch.zeros_like(self.whole)

    def part(self, size):
        """Of a call of so many bytes in all: the whole, and this rank's share."""
        count = size // 4
        return self.whole[:count], self.share[: count // dist.get_world_size()]

    def issue(self, kind, size):
        whole, share = self.part(size)
        if kind == "all_reduce":
            return [dist.all_reduce(whole, group=self.group, async_op=True)]
        if kind == "all_gather":
            return [dist.all_gather_into_tensor(whole, share, group=self.group, async_op=True)]
        if kind == "reduce_scatter":
            return [dist.reduce_scatter_tensor(share, whole, group=self.group, async_op=True)]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return dist.batch_isend_irecv([dist.P2POp(dist.isend, whole, (rank + 1) % ranks, group=self.group),
                                       dist.P2POp(dist.irecv, self.share[: whole.numel()], (rank - 1) % ranks, group=self.group)])

    def fill(self, size, key):
        """Whatever the kind reads, and what it shall replace."""
        whole, _ = self.part(size)
        for buffer in (whole, self.share[: whole.numel()]):
            buffer.fill_(value(dist.get_rank(), self.place, key))

    def is_right(self, kind, size, key):
        ranks = range(dist.get_world_size())
        whole, share = self.part(size)
        values = [value(rank, self.place, key) for rank in ranks]
        if kind == "all_reduce":
            return bool((whole == sum(values)).all())
        if kind == "all_gather":
            return all(bool((piece == seen).all()) for piece, seen in zip(whole.chunk(len(ranks)), values))
        if kind == "reduce_scatter":
            return bool((share == sum(values)).all())
        return bool((self.share[: whole.numel()] == values[dist.get_rank() - 1]).all())


def value(rank, place, key):
    """Small whole numbers, whose sums are exact."""
    return float(1 + rank + 3 * place + key % 1000)


def calls_of(round_number, large_every):
    """Kind and bytes for each group: the same on all ranks."""
    size = LARGE if round_number % large_every == large_every - 1 else SMALL[round_number % len(SMALL)]
    return [(KINDS[(place + round_number // len(SMALL)) % len(KINDS)], size) for place in range(GROUPS)]


class Product:
    """Takes about a millisecond of all multiprocessors."""

    def __init__(self, side=7168):
        self.left, self.right, self.out = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def run(self):
        torch.mm(self.left, self.right, out=self.out)


def issue_round(lanes, product, calls):
    """From the first group on even ranks, from the last on odd ones. PyTorch has each group's calls on a stream of that group's own, which
    waits for the stream that is current at the call: that is the lane's, and so no group waits for another."""
    product.run()
    begun = torch.cuda.Event()
    begun.record()
    order = lanes[::-1] if dist.get_rank() % 2 else lanes
    works = []
    for lane in order:
        lane.stream.wait_event(begun)
        with torch.cuda.stream(lane.stream):
            works += lane.issue(*calls[lane.place])
    for work in works:  # the current stream waits, the next product after all calls
        work.wait()
    for lane in lanes:  # which a capture asks for
        torch.cuda.current_stream().wait_stream(lane.stream)


def check_round(lanes, product, calls, key):
    """A round of known values; how many of its results are wrong."""
    for lane in lanes:
        lane.fill(calls[lane.place][1], key)
    torch.cuda.synchronize()
    issue_round(lanes, product, calls)
    torch.cuda.synchronize()
    wrong = [lane.place for lane in lanes if not lane.is_right(*calls[lane.place], key)]
    for place in wrong:
        print(f"WRONG at round {key}: group {place}, {calls[place][0]} of {calls[place][1]} bytes", flush=True)
    return len(wrong)


def eager_rounds(lanes, product, watch, rounds):
    """Rounds run ahead of the GPU, by as many as lie between two that wait for it."""
    large_every, check_every = number("LARGE_EVERY", 4), number("CHECK_EVERY", 500)
    checked = wrong = 0
    for round_number in range(rounds):
        calls = calls_of(round_number, large_every)
        if round_number % check_every == check_every - 1:
            wrong += check_round(lanes, product, calls, round_number)
            checked += len(lanes)
        else:
            issue_round(lanes, product, calls)
        if round_number % 20 == 19:
            torch.cuda.synchronize()
        watch.at(round_number + 1)
    torch.cuda.synchronize()
    return checked, wrong


def graph_rounds(lanes, product, watch, replays):
    """One graph of a round for each size."""
    graphs = []
    for round_number in (0, 1):
        calls = calls_of(round_number, large_every=2)
        issue_round(lanes, product, calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            issue_round(lanes, product, calls)
        graphs.append(graph)
    for replay in range(replays):
        graphs[replay % 2].replay()
        if replay % 20 == 19:
            torch.cuda.synchronize()
        watch.at(replay + 1)
    torch.cuda.synchronize()


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    watch = Watch(number("STILL_SECONDS", 60))
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    if dist.get_world_size() < 2:
        sys.exit("of two ranks or more")
    lanes, product = [Lane(place) for place in range(GROUPS)], Product()
    for kind in KINDS:  # connections are made group by group, in one order
        for size in (*SMALL, LARGE):
            for lane in lanes:
                [work.wait() for work in lane.issue(kind, size)]
            torch.cuda.synchronize()
    rounds, replays = number("ROUNDS", 10000), number("GRAPH_ROUNDS", 0)
    watch.at(0)
    began = time.monotonic()
    checked, wrong = eager_rounds(lanes, product, watch, rounds)
    seconds = time.monotonic() - began
    if dist.get_rank() == 0:
        print(json.dumps({"mode": "eager", "rounds": rounds, "seconds": round(seconds, 2), "checked": checked, "wrong": wrong}), flush=True)
    began = time.monotonic()
    if replays:
        graph_rounds(lanes, product, watch, replays)
        if dist.get_rank() == 0:
            print(json.dumps({"mode": "graph", "rounds": replays, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    wrongs = torch.tensor([float(wrong)], device="cuda")
    dist.all_reduce(wrongs)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    sys.exit(4 if wrongs.item() else 0)


if __name__ == "__main__":
    main()
