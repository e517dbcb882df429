/* Holds that in a process with two devices one thread can make, map, give access to, unmap and release memory while kernels of
 * both devices spin, also with peer access between their contexts. Other threads' launches go on meanwhile. Windlass's worker
 * thread does so when a ring grows between two ranks of one process. If it had to wait, it would wait for kernels that wait for
 * that ring.
 *
 * Two GPUs, no NCCL. Prints how long each call took, and the longest launch beside them; for comparison the same of cuMemAlloc
 * and cuMemFree. The kernels end after two seconds in any case. On the simulator, which has no such kernels, a stream waits for
 * a word instead. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "../support/driver_answers.h"

/* Spins until the word is not zero, or until `nanoseconds` have passed; reads memory of the other device meanwhile. */
static const char SPIN[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry spin(.param .u64 at, .param .u64 limit, .param .u64 beside) {\n"
    "  .reg .pred %p<3>; .reg .b32 %r<3>; .reg .b64 %rd<7>;\n"
    "  ld.param.u64 %rd1, [at];\n  ld.param.u64 %rd2, [limit];\n  ld.param.u64 %rd6, [beside];\n  mov.u64 %rd3, %globaltimer;\n"
    "AGAIN:\n"
    "  ld.volatile.global.u32 %r2, [%rd6];\n"
    "  ld.volatile.global.u32 %r1, [%rd1];\n  setp.ne.u32 %p1, %r1, 0;\n  @%p1 bra DONE;\n"
    "  mov.u64 %rd4, %globaltimer;\n  sub.u64 %rd5, %rd4, %rd3;\n  setp.lt.u64 %p2, %rd5, %rd2;\n  @%p2 bra AGAIN;\n"
    "DONE:\n  ret;\n}\n";

enum { DEVICES = 2, SPINS_MS = 2000, BEGUN_AFTER_MS = 50, WITHIN_MS = 1500, WAITED_MS = 500, PORTABLE_MAPPED = 3, RING = 64 * MIB };

struct device {
  void *context, *spin, *spins, *launches;
  word beside; /* memory of the other device */
};

static struct device devices[DEVICES];
/* The first word ends the kernels that spin; the second is never set. */
static volatile unsigned* words;

static double ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static void spin(struct device* device, void* on, volatile unsigned* until) {
  word at = (word)(uintptr_t)until, limit = SPINS_MS * 1000000ull;
  void* parameters[] = {&at, &limit, &device->beside};
  if (device->spin) CU(LaunchKernel(device->spin, 1, 1, 1, 1, 1, 1, 0, on, parameters, NULL));
  else CU(StreamWaitValue32_v2(on, at, 1, 1));
}

/* Memory of one device that both devices can access. */
static word shared_by_both(int device, size_t bytes) {
  struct allocation_kind kind = {PINNED, DESCRIPTOR, {DEVICE, device}, NULL, {0}};
  struct access access[DEVICES] = {{{DEVICE, 0}, READ_WRITE}, {{DEVICE, 1}, READ_WRITE}};
  word handle = 0, at = 0;
  CU(MemCreate(&handle, bytes, &kind, 0));
  CU(MemAddressReserve(&at, bytes, 0, 0, 0));
  CU(MemMap(at, bytes, 0, handle, 0));
  CU(MemSetAccess(at, bytes, access, DEVICES));
  CU(MemRelease(handle));
  return at;
}

/* The calls that Windlass's worker thread makes, for memory of one device. */
enum { STEPS = 8, ALLOCATING = 2 };
static const char* const STEP_NAMES[STEPS] = {"create", "reserve", "map", "own access", "other's access", "unmap", "free addresses", "release"};
static const char* const ALLOCATING_NAMES[ALLOCATING] = {"cuMemAlloc", "cuMemFree"};

struct work {
  int device, steps;
  double took[STEPS];
  atomic_int done;
};

static void map_and_unmap(struct work* work) {
  struct allocation_kind kind = {PINNED, DESCRIPTOR, {DEVICE, work->device}, NULL, {0}};
  struct access own = {{DEVICE, work->device}, READ_WRITE}, other = {{DEVICE, 1 - work->device}, READ_WRITE};
  word handle = 0, at = 0;
  for (int step = 0; step < STEPS; step++) {
    double began = ms();
    switch (step) {
      case 0: CU(MemCreate(&handle, RING, &kind, 0)); break;
      case 1: CU(MemAddressReserve(&at, RING, 0, 0, 0)); break;
      case 2: CU(MemMap(at, RING, 0, handle, 0)); break;
      case 3: CU(MemSetAccess(at, RING, &own, 1)); break;
      case 4: CU(MemSetAccess(at, RING, &other, 1)); break;
      case 5: CU(MemUnmap(at, RING)); break;
      case 6: CU(MemAddressFree(at, RING)); break;
      default: CU(MemRelease(handle));
    }
    work->took[step] = ms() - began;
    atomic_store(&work->done, step + 1);
  }
}

static void allocate_and_free(struct work* work) {
  word memory = 0;
  double began = ms();
  CU(MemAlloc_v2(&memory, RING));
  work->took[0] = ms() - began;
  atomic_store(&work->done, 1);
  began = ms();
  CU(MemFree_v2(memory));
  work->took[1] = ms() - began;
  atomic_store(&work->done, 2);
}

static void* works(void* argument) {
  struct work* work = argument;
  CU(CtxSetCurrent(devices[work->device].context));
  if (work->steps == STEPS) map_and_unmap(work);
  else allocate_and_free(work);
  return NULL;
}

/* A thread that launches on both devices, as an application's threads do. */
struct launcher {
  atomic_bool ends;
  double longest;
  atomic_int launches;
};

static void* launches(void* argument) {
  struct launcher* launcher = argument;
  while (!atomic_load(&launcher->ends)) {
    for (int i = 0; i < DEVICES; i++) {
      double began = ms();
      CU(CtxSetCurrent(devices[i].context));
      spin(&devices[i], devices[i].launches, &words[1]);
      double took = ms() - began;
      if (took > launcher->longest) launcher->longest = took;
      atomic_fetch_add(&launcher->launches, 1);
    }
    usleep(200);
  }
  return NULL;
}

/* Waits for some more launches, on both devices. */
static void await_launches(struct launcher* launcher) {
  int wanted = atomic_load(&launcher->launches) + 2 * DEVICES;
  double began = ms();
  while (ms() - began < WAITED_MS && atomic_load(&launcher->launches) < wanted) usleep(100);
}

static void beside(int device, int steps, const char* const* names, const char* peers) {
  struct work work = {.device = device, .steps = steps};
  struct launcher launcher = {.longest = 0};
  pthread_t worker, launching;
  words[0] = 0;
  for (int i = 0; i < DEVICES; i++) {
    CU(CtxSetCurrent(devices[i].context));
    spin(&devices[i], devices[i].spins, &words[0]);
  }
  usleep(BEGUN_AFTER_MS * 1000);
  double began = ms();
  if (pthread_create(&launching, NULL, launches, &launcher)) return;
  await_launches(&launcher);
  if (pthread_create(&worker, NULL, works, &work)) return;
  while (ms() - began < WITHIN_MS && atomic_load(&work.done) < steps) usleep(1000);
  int done = atomic_load(&work.done);
  await_launches(&launcher);
  bool spun = true;
  for (int i = 0; i < DEVICES; i++) spun = spun && cu.StreamQuery(devices[i].spins);
  atomic_store(&launcher.ends, true);
  words[0] = 1;
  pthread_join(worker, NULL);
  pthread_join(launching, NULL);
  for (int i = 0; i < DEVICES; i++) {
    CU(CtxSetCurrent(devices[i].context));
    CU(StreamSynchronize(devices[i].spins));
    CU(StreamSynchronize(devices[i].launches));
  }
  printf("%s, memory of device %d: %s", peers, device, done == steps ? "all was done beside the kernels" : "HELD UP by the kernels in ");
  if (done < steps) printf("%s", names[done]);
  printf("\n   ");
  for (int step = 0; step < steps; step++) printf(" %s %.2f", names[step], work.took[step]);
  printf(" ms; longest of %d launches %.2f ms\n", atomic_load(&launcher.launches), launcher.longest);
  fflush(stdout);
  if (steps != STEPS) return;
  CHECK(done == steps && spun);
  CHECK(launcher.longest < WAITED_MS);
}

static void all(const char* peers) {
  for (int device = 0; device < DEVICES; device++) {
    beside(device, STEPS, STEP_NAMES, peers);
    beside(device, ALLOCATING, ALLOCATING_NAMES, peers);
  }
}

int main(void) {
  void* host = NULL;
  int count = 0;
  open_driver();
  start_driver();
  CU(DeviceGetCount(&count));
  if (count < DEVICES) return printf("skipped: it takes two devices\n"), 77;
  CU(MemHostAlloc(&host, 4096, PORTABLE_MAPPED));
  words = host;
  words[0] = words[1] = 1;
  for (int i = 0; i < DEVICES; i++) {
    void* module = NULL;
    CU(DevicePrimaryCtxRetain(&devices[i].context, i));
    CU(CtxSetCurrent(devices[i].context));
    CU(StreamCreate(&devices[i].spins, 1));
    CU(StreamCreate(&devices[i].launches, 1));
    if (cu.ModuleLoadData(&module, SPIN) || cu.ModuleGetFunction(&devices[i].spin, module, "spin")) devices[i].spin = NULL;
    devices[i].beside = shared_by_both(1 - i, 2 * MIB);
    /* The first launch is slow, so it is not timed. */
    spin(&devices[i], devices[i].spins, &words[1]);
    spin(&devices[i], devices[i].launches, &words[1]);
    CU(CtxSynchronize());
  }
  printf("what spins: %s\n", devices[0].spin && devices[1].spin ? "kernels" : "waits in streams");
  all("without peer access");
  for (int i = 0; i < DEVICES; i++) {
    CU(CtxSetCurrent(devices[i].context));
    CU(CtxEnablePeerAccess(devices[1 - i].context, 0));
  }
  all("with peer access both ways");
  CU(MemFreeHost(host));
  printf("driver_beside_two: %d failures\n", failures);
  return failures ? 1 : 0;
}
