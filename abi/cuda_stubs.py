#!/usr/bin/env python3
"""Writes the little of CUDA's headers that nccl.h needs, so that it compiles where no CUDA is installed.

    cuda_stubs.py DIR
"""

import pathlib
import sys

RUNTIME = """#ifndef WINDLASS_STUB_CUDA_RUNTIME_H
#define WINDLASS_STUB_CUDA_RUNTIME_H
#define CUDART_VERSION 12040
#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#endif
"""

EMPTY = "/* nothing of this header is needed to compile nccl.h */\n"

STUBS = {"cuda_runtime.h": RUNTIME, "cuda_fp16.h": EMPTY, "cuda_bf16.h": EMPTY, "cuda_fp8.h": EMPTY}


def write(directory):
    """Writes the stub headers into `directory`, making it if need be."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in STUBS.items():
        (directory / name).write_text(text)
    return directory


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    write(sys.argv[1])
