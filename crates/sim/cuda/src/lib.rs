//! A stand-in for libcuda.so.1 on host memory, for machines without a GPU
