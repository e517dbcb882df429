//! A stand-in for libnccl.so.2 on host memory, for machines without a GPU
