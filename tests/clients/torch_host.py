"""What PyTorch's own calls cost the host, microseconds: a matrix product, an all-gather, and one beside four products. Small enough that
the GPU is ahead; nothing waits within a batch.

Run one process a GPU (`torchrun --nproc-per-node 2 torch_host.py NAME`), over NCCL and over Windlass in turn and several times: the same
library's runs differ by half between processes. Rank 0 prints a JSON line, before and after a graph was captured.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

CALLS, BATCHES = 100, 30
COUNT = 32 << 10  # of bf16, 64 KiB in all


def host_us(call):
    """The median over batches of a call's time on this rank's host."""
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(times), 2)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    share = torch.zeros(COUNT // dist.get_world_size(), device="cuda", dtype=torch.bfloat16)
    whole = torch.zeros(len(share) * dist.get_world_size(), device="cuda", dtype=torch.bfloat16)
    left, right, out = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def product():
        torch.mm(left, right, out=out)

    def beside(products):
        work = dist.all_gather_into_tensor(whole, share, async_op=True)
        for _ in range(products):
            product()
        work.wait()

    calls = {"product": product, "all_gather": lambda: beside(0), "beside_4_products": lambda: beside(4)}
    for _ in range(20):
        beside(4)
    before = {name: host_us(call) for name, call in calls.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside(4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            beside(4)
    graph.replay()
    after = {name: host_us(call) for name, call in calls.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"run": sys.argv[1], "before": before, "after_capture": after}), flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    del graph
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
