"""Holds that PyTorch's sends and receives move the same bytes over Windlass: isend and irecv alone, a ring of them,
batches of every pattern, all-to-all, deferred waits, CUDA graphs.

Run one process a GPU (`torchrun --nproc-per-node N pytorch_p2p.py`). Rank 0 prints one line a part with a digest of
what all ranks received; the lines must be equal with and without Windlass.
"""

import hashlib
import os

import torch
import torch.distributed as dist

SIZES = (1, 1000, 1 << 20, 16 << 20)  # bytes


def digest(*tensors):
    """A digest of the bytes of these tensors on every rank, in rank order."""
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own.hexdigest())
    return hashlib.sha256("".join(everyone).encode()).hexdigest()[:16]


def place():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return rank, ranks, (rank + 1) % ranks, (rank - 1) % ranks


def filled(count, *key):
    """`count` bytes that depend on the key alone."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (count,), device="cuda", dtype=torch.uint8, generator=generator)


def received(tensor, *key):
    torch.cuda.synchronize()
    assert torch.equal(tensor, filled(tensor.numel(), *key)), f"wrong bytes: {key}, {tensor.numel()} bytes"
    return tensor


def finish(operations):
    for work in operations:
        work.wait()


def alone():
    """From each rank to each higher one and back, one message after the other: this also makes all pairs' connections."""
    rank, ranks, _, _ = place()
    results = []
    for low in range(ranks):
        for high in range(low + 1, ranks):
            for count in SIZES:
                there, back = ("there", low, high, count), ("back", low, high, count)
                got = torch.zeros(count, device="cuda", dtype=torch.uint8)
                if rank == low:
                    dist.isend(filled(count, *there), high).wait()
                    dist.irecv(got, high).wait()
                    results.append(received(got, *back))
                elif rank == high:
                    dist.irecv(got, low).wait()
                    results.append(received(got, *there))
                    dist.isend(filled(count, *back), low).wait()
    return digest(*results)


def ring():
    """isend to the next and irecv from the one before, unbatched. Where each pair has a communicator of its own, which is
    so unless they are bound to devices at once, and each rank two pairs, also more than any connection absorbs."""
    rank, ranks, after, before = place()
    counts = SIZES if os.environ.get("EAGER_INIT") or ranks == 2 else (*SIZES, 96 << 20)
    results = []
    for count in counts:
        got = torch.zeros(count, device="cuda", dtype=torch.uint8)
        mine = filled(count, "ring", rank, count)
        torch.cuda.synchronize()
        finish([dist.isend(mine, after), dist.irecv(got, before)])
        results.append(received(got, "ring", before, count))
    return digest(*results)


def batches():
    """Both neighbours, everybody, one rank to all, all to one rank: each pattern in one batch."""
    rank, ranks, after, before = place()
    results = []
    for count in (*SIZES, 64 << 20):
        patterns = {
            "both neighbours": [(a, (a + step) % ranks) for a in range(ranks) for step in ((1, -1) if ranks > 2 else (1,))],
            "scatter": [(0, b) for b in range(1, ranks)],
            "gather": [(a, ranks - 1) for a in range(ranks - 1)],
        }
        if count <= 16 << 20:
            patterns["everybody"] = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        for name, pairs in patterns.items():
            operations, expected = [], []
            for a, b in pairs:
                key = (name, a, b, count)
                if rank == a:
                    operations.append(dist.P2POp(dist.isend, filled(count, *key), b))
                if rank == b:
                    got = torch.zeros(count, device="cuda", dtype=torch.uint8)
                    operations.append(dist.P2POp(dist.irecv, got, a))
                    expected.append((got, key))
            torch.cuda.synchronize()
            if operations:
                finish(dist.batch_isend_irecv(operations))
            results.extend(received(got, *key) for got, key in expected)
    return digest(*results)


def all_to_all():
    rank, ranks, _, _ = place()
    results = []
    for count in SIZES:
        sent = torch.cat([filled(count, "even", rank, peer, count) for peer in range(ranks)])
        got = torch.zeros_like(sent)
        dist.all_to_all_single(got, sent)
        results.extend(received(part, "even", peer, rank, count) for peer, part in enumerate(got.split(count)))
        lengths = [[count * (a + 2 * b) // 3 for b in range(ranks)] for a in range(ranks)]
        parts = [filled(lengths[rank][peer], "uneven", rank, peer, count) for peer in range(ranks)]
        there = [torch.zeros(lengths[peer][rank], device="cuda", dtype=torch.uint8) for peer in range(ranks)]
        dist.all_to_all(there, parts)
        results.extend(received(part, "uneven", peer, rank, count) for peer, part in enumerate(there))
    return digest(*results)


def deferred():
    """Sends whose waits come late, as pipelines have them: six microbatches go before the first is waited for."""
    rank, ranks, after, before = place()
    results, works = [], []
    sent = [filled(1 << 20, "deferred", rank, step) for step in range(6)]
    got = [torch.zeros(1 << 20, device="cuda", dtype=torch.uint8) for _ in sent]
    torch.cuda.synchronize()
    for mine, theirs in zip(sent, got):
        works += dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)])
    finish(works)
    results.extend(received(theirs, "deferred", before, step) for step, theirs in enumerate(got))
    return digest(*results)


def graph():
    """A batch captured once and replayed with new bytes."""
    rank, ranks, after, before = place()
    mine = torch.zeros(1 << 20, device="cuda", dtype=torch.uint8)
    theirs = torch.zeros_like(mine)

    def exchange():
        operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]
        finish(dist.batch_isend_irecv(operations))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        exchange()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        exchange()
    results = []
    for step in range(4):
        mine.copy_(filled(1 << 20, "graph", rank, step))
        torch.cuda.synchronize()
        captured.replay()
        results.append(received(theirs, "graph", before, step).clone())
        mine.copy_(filled(1 << 20, "eager", rank, step))
        torch.cuda.synchronize()
        exchange()
        results.append(received(theirs, "eager", before, step).clone())
    return digest(*results)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    eager = {"device_id": torch.device("cuda", local)} if os.environ.get("EAGER_INIT") else {}
    dist.init_process_group("nccl", **eager)
    for part in (alone, ring, batches, all_to_all, deferred, graph):
        line = f"{part.__name__} {part()}"
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
