/* NCCL's symmetric memory, one process, a thread a GPU: a buffer of ncclMemAlloc, a window over it, an all-reduce in a CUDA graph; then
 * all of it ended, and so again. Says what each step takes in each round.
 *
 *   cc windows.c -o windows -lnccl -lcuda -lpthread
 *   NCCL_NVLS_ENABLE=0 windlass run -- ./windows
 *
 * Nothing here is Windlass's own: the program is written for NCCL, 2.28.3 and later.
 *
 * Did it work? It prints "0 wrong", and from round 2 on alloc and register take less time than in round 1. With WINDLASS_REPORT=text a
 * line near the top counts windows that were found again. The words in front are no part of it:
 *
 *   on the simulator, 2 GPUs: windows: hits 10, made 2
 *   on 2 H100 or H200: windows: hits 10, made 2
 *
 * "windlass stats" shows the same of programs that still run. */
#include <cuda.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DEVICES_MAX = 16, COUNT = 1 << 20, ROUNDS = 6, REPLAYS = 3 };

/* What takes time on the host. */
enum step { ALLOC, REGISTER, CAPTURE, REPLAY, DEREGISTER, FREE, STEPS };
static const char* const NAMES[STEPS] = {"alloc", "register", "capture", "replays", "deregister", "free"};

struct gpu {
  pthread_t thread;
  int rank;
  ncclComm_t communicator;
  int wrong;
  double took[ROUNDS][STEPS]; /* in milliseconds */
};

static int gpus;
static pthread_barrier_t everybody;

static void must(int code, const char* what) {
  if (code == 0) return;
  fprintf(stderr, "%s: code %d\n", what, code);
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

/* All threads come here before each step that allocates, frees or launches: within one process a GPU's allocation may wait for another's
 * kernel, which waits for a third's launch. Programs with a process a GPU need this before a deregistration alone. Returns the time. */
static double begin(void) {
  pthread_barrier_wait(&everybody);
  return now();
}

static void fill(CUdeviceptr data, int rank) {
  float* values = malloc(COUNT * sizeof *values);
  for (int i = 0; i < COUNT; i++) values[i] = (float)(rank + i % 7);
  must(cuMemcpyHtoD(data, values, COUNT * sizeof *values), "cuMemcpyHtoD");
  must(cuCtxSynchronize(), "cuCtxSynchronize");
  free(values);
}

/* After so many replays in place: each sums what the one before has left on all GPUs alike. */
static int count_wrong(CUdeviceptr data) {
  float* values = malloc(COUNT * sizeof *values);
  int wrong = 0, times = 1;
  for (int replay = 1; replay < REPLAYS; replay++) times *= gpus;
  must(cuMemcpyDtoH(values, data, COUNT * sizeof *values), "cuMemcpyDtoH");
  for (int i = 0; i < COUNT; i++) wrong += values[i] != (float)(times * (gpus * (gpus - 1) / 2 + gpus * (i % 7)));
  free(values);
  return wrong;
}

static void reduce(const struct gpu* gpu, void* data, CUstream stream) {
  must(ncclAllReduce(data, data, COUNT, ncclFloat, ncclSum, gpu->communicator, (cudaStream_t)stream), "ncclAllReduce");
}

static void run_round(struct gpu* gpu, CUstream stream, double* took) {
  void* data = NULL;
  ncclWindow_t window = NULL;
  CUgraph graph;
  CUgraphExec executable;

  double start = begin();
  must(ncclMemAlloc(&data, COUNT * sizeof(float)), "ncclMemAlloc");
  took[ALLOC] = now() - start;

  /* All ranks come, in the same order, each with as large an allocation. */
  start = begin();
  must(ncclCommWindowRegister(gpu->communicator, data, COUNT * sizeof(float), &window, NCCL_WIN_COLL_SYMMETRIC),
       "ncclCommWindowRegister");
  took[REGISTER] = now() - start;

  start = begin();
  must(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  reduce(gpu, data, stream);
  must(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
  must(cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  took[CAPTURE] = now() - start;

  fill((CUdeviceptr)(size_t)data, gpu->rank);
  start = begin();
  for (int replay = 0; replay < REPLAYS; replay++) must(cuGraphLaunch(executable, stream), "cuGraphLaunch");
  must(cuStreamSynchronize(stream), "cuStreamSynchronize");
  took[REPLAY] = now() - start;
  gpu->wrong += count_wrong((CUdeviceptr)(size_t)data);

  /* Graphs first, then windows, once no rank uses them any more, then memory. */
  must(cuGraphExecDestroy(executable), "cuGraphExecDestroy");
  must(cuGraphDestroy(graph), "cuGraphDestroy");
  start = begin();
  must(ncclCommWindowDeregister(gpu->communicator, window), "ncclCommWindowDeregister");
  took[DEREGISTER] = now() - start;
  start = begin();
  must(ncclMemFree(data), "ncclMemFree");
  took[FREE] = now() - start;
}

static void* run(void* argument) {
  struct gpu* gpu = argument;
  CUdevice device;
  CUcontext context;
  CUstream stream;
  CUdeviceptr other;
  must(cuDeviceGet(&device, gpu->rank), "cuDeviceGet");
  must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  must(cuMemAlloc(&other, COUNT * sizeof(float)), "cuMemAlloc");

  /* What NCCL does once, at its first call, is no part of a round. */
  fill(other, gpu->rank);
  begin();
  reduce(gpu, (void*)(size_t)other, stream);
  must(cuStreamSynchronize(stream), "cuStreamSynchronize");
  for (int round = 0; round < ROUNDS; round++) run_round(gpu, stream, gpu->took[round]);
  begin();
  must(cuMemFree(other), "cuMemFree");
  must(cuStreamDestroy(stream), "cuStreamDestroy");
  return NULL;
}

int main(void) {
  static struct gpu all[DEVICES_MAX];
  ncclComm_t communicators[DEVICES_MAX];
  int wrong = 0;
  must(cuInit(0), "cuInit");
  must(cuDeviceGetCount(&gpus), "cuDeviceGetCount");
  if (gpus > DEVICES_MAX) gpus = DEVICES_MAX;
  must(ncclCommInitAll(communicators, gpus, NULL), "ncclCommInitAll");
  must(pthread_barrier_init(&everybody, NULL, (unsigned)gpus), "pthread_barrier_init");
  for (int i = 0; i < gpus; i++) {
    all[i].rank = i;
    all[i].communicator = communicators[i];
    must(pthread_create(&all[i].thread, NULL, run, &all[i]), "pthread_create");
  }
  for (int i = 0; i < gpus; i++) must(pthread_join(all[i].thread, NULL), "pthread_join");
  for (int i = 0; i < gpus; i++) wrong += all[i].wrong;
  must(ncclGroupStart(), "ncclGroupStart");
  for (int i = 0; i < gpus; i++) must(ncclCommDestroy(communicators[i]), "ncclCommDestroy");
  must(ncclGroupEnd(), "ncclGroupEnd");

  printf("rank 0, ms ");
  for (int step = 0; step < STEPS; step++) printf(" %10s", NAMES[step]);
  for (int round = 0; round < ROUNDS; round++) {
    printf("\nround %d    ", round + 1);
    for (int step = 0; step < STEPS; step++) printf(" %10.3f", all[0].took[round][step]);
  }
  printf("\nall-reduce in windows over %d GPUs: %d wrong\n", gpus, wrong);
  return wrong != 0;
}
