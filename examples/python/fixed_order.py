r"""Tensor-parallel inference that must give a request the same logits, bit by bit, in every batch:

    NCCL_NVLS_ENABLE=0 WINDLASS_ORDER=fixed WINDLASS_REPORT=text windlass run -- torchrun --nproc-per-node 4 fixed_order.py

Nothing here is Windlass's own: the script is written for NCCL. It does not run on the simulator: PyTorch computes on GPUs.

Every request passes all products, attentions and norms alone, in one shape, whatever the batch is. Only an all-reduce takes the whole
batch: 512 KiB of one request, 32 MiB of 64. So nothing but the all-reduces can make logits depend on the batch. The script shows this first:
with all-gathers and a fold over the ranks in their place, nothing may differ.

Did it work? Rank 0 prints "logits same: True" and the status is 0. The report at the end says:

    order: fixed; all 792 reductions that round were in fixed order

Over NCCL alone (WINDLASS=off) logits differ, if there are more than 2 ranks: a sum of two values has only one order. With
--expect-differences the status is 0 if they differ. Equal digests of two runs mean equal logits.
"""

import argparse
import hashlib
import os

try:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention, silu
except ImportError:
    torch = None  # read_options says so

HEAD = 128  # elements of an attention head


def main():
    options = read_options()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products are the same bits in every run
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with torch.no_grad():
        failed = compare(options, device)
    dist.destroy_process_group()
    return failed


def compare(options, device):
    """Runs all requests in batches of every size; whether the outcome is another than the expected one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks have the same requests
    requests = torch.randn(options.requests, options.tokens, options.hidden).bfloat16().to(device)
    torch.manual_seed(1 + rank)  # and each its own part of the weights
    model = Model(options, ranks, device)

    sizes = [1 << power for power in range(options.requests.bit_length())]
    folded = run(model, requests, 1, fold)
    alone = run(model, requests, 1, dist.all_reduce)
    kinds = [(size, graphs) for size in sizes for graphs in (False, True)]
    found = [different(run(model, requests, size, dist.all_reduce, graphs), alone) for size, graphs in kinds]
    found += [different(run(model, requests, sizes[-1], fold), folded), different(alone, folded)]
    found = torch.stack(found)
    dist.all_reduce(found)
    *differing, of_products, of_fold = found.tolist()

    parts = [torch.empty_like(alone) for _ in range(ranks)]
    dist.all_gather(parts, alone)
    digest = hashlib.sha256(bits(torch.cat(parts)).cpu().numpy().tobytes()).hexdigest()[:16]
    logits, same = alone.numel() * ranks, not any(differing)
    if rank == 0:
        for (size, graphs), count in zip(kinds, differing):
            print(f"batches of {size}, {'graph' if graphs else 'eager'}: {count} of {logits} logits differ")
        print(f"a fold over the ranks in their order has the same bits: {of_fold == 0}")
        print(f"{options.requests} requests on {ranks} GPUs, digest {digest}, logits same: {same}")
        if of_products:
            print(f"this says nothing: without all-reduces {of_products} logits depend on the batch, too")
    return bool(of_products) or same == options.expect_differences


def run(model, requests, size, reduce, graphs=False):
    """The logits of all requests, in batches of a size."""
    if not graphs:
        return torch.cat([model(batch, reduce) for batch in requests.split(size)])
    given = requests[:size].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        computed = model(given, reduce)
    logits = []
    for batch in requests.split(size):
        given.copy_(batch)
        graph.replay()
        logits.append(computed.clone())
    torch.cuda.synchronize()  # the graph ends here
    return torch.cat(logits)


def fold(partial):
    """What WINDLASS_ORDER=fixed guarantees of an all-reduce of a 16-bit float, made of a call that only moves."""
    parts = [torch.empty_like(partial) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, partial)
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    partial.copy_(total)


def different(logits, others):
    return (bits(logits) != bits(others)).sum()


def bits(tensor):
    return tensor.view(torch.int16)


class Model:
    """A transformer of which each rank has a share of the heads, of the inner elements and of the vocabulary."""

    def __init__(self, options, ranks, device):
        hidden, share = options.hidden, options.hidden // ranks

        def weights(rows, columns):
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / hidden**0.5

        self.layers = [
            (weights(hidden, 3 * share), weights(share, hidden), weights(hidden, share), weights(share, hidden))
            for _ in range(options.layers)
        ]
        self.vocabulary = weights(hidden, share)

    def __call__(self, states, reduce):
        for heads, joined, inner, outer in self.layers:
            # Each request alone, in the shape that all of them have: so every kernel is the same one, whatever the batch is.
            partial = torch.stack([attention(norm(state) @ heads) @ joined for state in states])
            reduce(partial)  # the whole batch
            states = states + partial
            partial = torch.stack([silu(norm(state) @ inner) @ outer for state in states])
            reduce(partial)
            states = states + partial
        return torch.stack([norm(state) @ self.vocabulary for state in states])


def norm(state):
    state = state.float()
    return (state * torch.rsqrt(state.square().mean(dim=-1, keepdim=True) + 1e-6)).bfloat16()


def attention(heads):
    tokens = heads.shape[0]
    queries, keys, values = heads.view(1, tokens, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return mixed[0].transpose(0, 1).reshape(tokens, -1)


def read_options():
    """What the command line says; ends the program where the script cannot run."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--layers", type=int, default=2, help="layers of the model [default: 2]")
    arguments.add_argument("--hidden", type=int, default=8192, help=f"elements of a token's state; {HEAD} times the ranks divide them [default: 8192]")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of a request [default: 32]")
    arguments.add_argument("--requests", type=int, default=64, help="the largest batch, a power of two [default: 64]")
    arguments.add_argument("--expect-differences", action="store_true", help="the status is 0 if logits differ, and 1 if they are the same")
    options = arguments.parse_args()
    if torch is None:
        arguments.exit(1, "PyTorch is missing: pip install torch\n")
    if "LOCAL_RANK" not in os.environ:
        arguments.exit(1, "no LOCAL_RANK: start it with torchrun --nproc-per-node 4\n")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        arguments.exit(1, f"a GPU is needed for each process, and PyTorch sees {torch.cuda.device_count()}\n")
    if options.requests < 1 or options.requests & (options.requests - 1):
        arguments.error(f"--requests {options.requests}: expected a power of two")
    if options.hidden % (HEAD * int(os.environ["WORLD_SIZE"])):
        arguments.error(f"--hidden {options.hidden}: expected a multiple of {HEAD} times the ranks")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
