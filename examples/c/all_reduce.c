/* One process, all GPUs: every GPU ends with the sum of all inputs.
 *
 *   cc all_reduce.c -o all_reduce -lnccl -lcuda
 *   windlass run -- ./all_reduce
 *
 * Nothing here is Windlass's own: the program is written for NCCL.
 *
 * Did it work? It prints "0 wrong". With WINDLASS_REPORT=text each communicator has one line for its calls. Path native says that
 * Windlass's kernel ran them, path forward that NCCL did: 4 MiB are above the simulator's limit. The words in front are no part of it:
 *
 *   on the simulator: ncclAllReduce forward 1 4.0 MiB
 *   on 2 H100 or H200 with NCCL_NVLS_ENABLE=0: ncclAllReduce native 1 4.0 MiB
 *
 * "windlass stats" shows the same of programs that still run. */
#include <cuda.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

enum { DEVICES_MAX = 16, COUNT = 1 << 20 };

static void must(int code, const char* what) {
  if (code == 0) return;
  fprintf(stderr, "%s: code %d\n", what, code);
  exit(1);
}

struct gpu {
  CUcontext context;
  CUstream stream;
  CUdeviceptr data;
};

static float values[COUNT];

static void prepare(struct gpu* gpu, int ordinal) {
  CUdevice device;
  must(cuDeviceGet(&device, ordinal), "cuDeviceGet");
  must(cuDevicePrimaryCtxRetain(&gpu->context, device), "cuDevicePrimaryCtxRetain");
  must(cuCtxSetCurrent(gpu->context), "cuCtxSetCurrent");
  must(cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  must(cuMemAlloc(&gpu->data, sizeof values), "cuMemAlloc");
  for (int i = 0; i < COUNT; i++) values[i] = (float)(ordinal + i % 7);
  must(cuMemcpyHtoD(gpu->data, values, sizeof values), "cuMemcpyHtoD");
}

/* Waits for a GPU and counts the wrong elements of its result. */
static int count_wrong(struct gpu* gpu, int gpus) {
  int wrong = 0;
  must(cuCtxSetCurrent(gpu->context), "cuCtxSetCurrent");
  must(cuStreamSynchronize(gpu->stream), "cuStreamSynchronize");
  must(cuMemcpyDtoH(values, gpu->data, sizeof values), "cuMemcpyDtoH");
  for (int i = 0; i < COUNT; i++) wrong += values[i] != (float)(gpus * (gpus - 1) / 2 + gpus * (i % 7));
  return wrong;
}

int main(void) {
  struct gpu gpus[DEVICES_MAX];
  ncclComm_t communicators[DEVICES_MAX];
  int count = 0, wrong = 0;
  must(cuInit(0), "cuInit");
  must(cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (count > DEVICES_MAX) count = DEVICES_MAX;
  for (int i = 0; i < count; i++) prepare(&gpus[i], i);
  must(ncclCommInitAll(communicators, count, NULL), "ncclCommInitAll");

  /* One thread speaks for several ranks: their calls stand in one group, or the first would wait for the others. */
  must(ncclGroupStart(), "ncclGroupStart");
  for (int i = 0; i < count; i++) {
    void* data = (void*)(size_t)gpus[i].data;
    must(ncclAllReduce(data, data, COUNT, ncclFloat, ncclSum, communicators[i], (cudaStream_t)gpus[i].stream),
         "ncclAllReduce");
  }
  must(ncclGroupEnd(), "ncclGroupEnd");

  for (int i = 0; i < count; i++) wrong += count_wrong(&gpus[i], count);
  for (int i = 0; i < count; i++) must(ncclCommDestroy(communicators[i]), "ncclCommDestroy");
  for (int i = 0; i < count; i++) {
    must(cuCtxSetCurrent(gpus[i].context), "cuCtxSetCurrent");
    must(cuMemFree(gpus[i].data), "cuMemFree");
    must(cuStreamDestroy(gpus[i].stream), "cuStreamDestroy");
  }
  printf("all-reduce over %d GPUs: %d wrong\n", count, wrong);
  return wrong != 0;
}
