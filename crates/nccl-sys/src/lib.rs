//! C types of nccl.h, the list of entry points, finding and opening the real library
