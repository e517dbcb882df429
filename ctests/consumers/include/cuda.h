/* Stands for CUDA's cuda.h where CUDA is not installed: the names that the examples use, as cuda.h maps them. */
#ifndef WINDLASS_CTESTS_CUDA_H
#define WINDLASS_CTESTS_CUDA_H
#include "../../support/cuda_driver.h"

#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemcpyHtoD cuMemcpyHtoD_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2

#endif
