#!/usr/bin/env python3
"""Times vLLM offline: decode steps and prefills of Llama-3-8B's shape with random weights, without network or downloads.

    python3 examples/vllm/decode.py --all-reduce custom                  # vLLM's own all-reduce
    python3 examples/vllm/decode.py --all-reduce nccl                    # NCCL's
    windlass run -- python3 examples/vllm/decode.py --all-reduce nccl    # Windlass's kernels

A decode step is the time of a batch's 128 tokens divided by 128; the prefill of its 32-token prompts is a part of it. A time is
the median of five rounds after one that is dropped, the spread is the slowest round less the fastest. `tokens` is a hash of the
greedy tokens. NCCL and Windlass must agree in it at batch 1; a larger batch can be cut into other steps from run to run. Equal tokens
say little: vLLM's random weights are so small that 2 and 32 layers give the same.

NVLink multicast stays off. vLLM 0.26's own all-reduce then takes less than 8 MiB, so all of a decode step's and none of the
prefills', which NCCL has in each of the three. With FlashInfer installed, `custom` also has FlashInfer's, fused with the norm.
VLLM_WORKER_MULTIPROC_METHOD says how workers start, as always.
"""

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",  # the other one needs multicast
}
# Greedy tokens need no sampler of FlashInfer's, which would be compiled first.
DEFAULTS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

for name, expected in MULTICAST_OFF.items():
    found = os.environ.setdefault(name, expected)
    if found != expected:
        sys.exit(f"decode.py: {name} is {found!r}, expected {expected!r}: NVLink multicast must stay off here")
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)

PROMPT, TOKENS, PREFILL_BATCH = 32, 128, 8


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all-reduce", choices=["custom", "fused", "nccl"], default="nccl",
                        help="vLLM's own; FlashInfer's first, as vLLM 0.33 has it; or NCCL's (default)")
    parser.add_argument("--fused-max", type=float, metavar="MIB", help="with fused: the size up to which all-reduces are fused with the norm")
    parser.add_argument("--logprobs", action="store_true", help="also print log-probabilities of a fixed prompt")
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="N", help="GPUs of an engine (2)")
    parser.add_argument("--data-parallel", type=int, default=1, metavar="N", help="engines (1); more need --experts")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="Mixtral's shape with N experts (0: a dense model)")
    parser.add_argument("--layers", type=int, default=32, metavar="N", help="layers of the model (32); 2 for a quick look")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256], metavar="N", help="sequences of a decode step")
    parser.add_argument("--prefills", type=int, nargs="*", default=[256, 2048], metavar="N", help="tokens of each of 8 prompts")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds that count (5)")
    chosen = parser.parse_args()
    if chosen.data_parallel > 1 and not chosen.experts:
        parser.error("--data-parallel needs --experts: engines of a dense model share nothing, and vLLM refuses them offline")
    return chosen


def model(layers: int, experts: int) -> str:
    """A folder with the model's config.json, at the same place each time: vLLM's cache of compiled code stays valid."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 14336 // experts}
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    folder = Path(tempfile.gettempdir()) / f"windlass-decode-{layers}-{experts}"
    folder.mkdir(exist_ok=True)
    fresh = folder / f"{os.getpid()}.tmp"
    fresh.write_text(json.dumps(config))
    fresh.replace(folder / "config.json")
    return str(folder)


def start(chosen: argparse.Namespace):
    """The engine."""
    passes = {}
    if chosen.all_reduce == "nccl":
        # What comes before NCCL in vLLM: its own kernels, FlashInfer's, and FlashInfer's that are fused with the norm.
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
        passes["fuse_allreduce_rms"] = False
    if chosen.all_reduce == "fused":
        os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "1"
        passes["fuse_allreduce_rms"] = True
        if chosen.fused_max is not None:
            passes["fi_allreduce_fusion_max_size_mb"] = chosen.fused_max
    from vllm import LLM

    return LLM(
        model=model(chosen.layers, chosen.experts),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=chosen.tensor_parallel,
        disable_custom_all_reduce=chosen.all_reduce == "nccl",
        compilation_config={"cudagraph_capture_sizes": sorted(chosen.batches) or [1], "pass_config": passes},
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,
        max_model_len=4096,
        max_num_seqs=256,
        seed=0,
    )


def rounds(llm, count: int, batch: int, prompt: int, tokens: int) -> tuple[list[float], set[str]]:
    """Seconds of each round but the first, and the hashes of their tokens: one, if all rounds gave the same."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 31999 + 1 for j in range(prompt)]} for i in range(batch)]
    seconds, hashes = [], set()
    for number in range(count + 1):
        begin = time.perf_counter()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        if number:
            seconds.append(time.perf_counter() - begin)
            chosen = [list(output.outputs[0].token_ids) for output in outputs]
            hashes.add(hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:12])
    return seconds, hashes


def logprobs(llm) -> list[float]:
    """The log-probabilities of a fixed prompt's tokens: comparable where sums have another order, and tokens need not be equal."""
    from vllm import SamplingParams

    prompt = [(7 * j) % 31999 + 1 for j in range(PROMPT)]
    greedy = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
    return [round(entry[token].logprob, 6) for token, entry in zip(prompt[1:], output.prompt_logprobs[1:])]


def measure(chosen: argparse.Namespace) -> None:
    begin = time.perf_counter()
    llm = start(chosen)
    import vllm

    rank = os.environ.get("VLLM_DP_RANK", "0")
    print(f"vLLM {vllm.__version__}, all-reduce {chosen.all_reduce}: started in {time.perf_counter() - begin:.0f} s", flush=True)
    result = {"vllm": vllm.__version__, **vars(chosen), "rank": int(rank), "decode": {}, "prefill": {}}

    def record(kind: str, key: int, unit: str, words: str, seconds: list[float], share: int, hashes: set[str]) -> None:
        times = [1000 * second / share for second in seconds]
        row = {"ms": round(statistics.median(times), 3), "spread": round(max(times) - min(times), 3), "tokens": sorted(hashes)}
        result[kind][key] = row
        print(f"{words}: {row['ms']:.3f} ms{unit}, spread {row['spread']:.3f}, tokens {' '.join(row['tokens'])}", flush=True)

    for batch in chosen.batches:
        seconds, hashes = rounds(llm, chosen.rounds, batch, PROMPT, TOKENS)
        record("decode", batch, " a step", f"decode, batch {batch}", seconds, TOKENS, hashes)
    for length in chosen.prefills:
        seconds, hashes = rounds(llm, chosen.rounds, PREFILL_BATCH, length, 1)
        record("prefill", length, "", f"prefill, {PREFILL_BATCH} x {length}", seconds, 1, hashes)
    if chosen.logprobs:
        result["logprobs"] = logprobs(llm)
    print(json.dumps(result), flush=True)
    if chosen.data_parallel > 1:
        time.sleep(2)  # engines stop together: an early end of one fails the others


def run_engines(count: int) -> int:
    """Runs this script once for each engine, as vLLM's offline data parallelism asks. Returns the first bad exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engines = []
    for rank in range(count):
        place = {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank, "VLLM_DP_SIZE": count}
        place |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        engines.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    while None in (ends := [engine.poll() for engine in engines]) and not any(ends):
        time.sleep(0.2)
    for engine in engines:
        if engine.poll() is None:
            engine.terminate()
    return next((end for end in ends if end), 0)


if __name__ == "__main__":
    arguments = options()
    if arguments.data_parallel > 1 and "VLLM_DP_RANK" not in os.environ:
        sys.exit(run_engines(arguments.data_parallel))
    measure(arguments)
