/* Prints whether one thread can allocate, share, map and unmap memory while another thread is in a driver call that waits for a
 * kernel. NCCL does that on its proxy threads when peers register buffers or deregister them. If those had to wait, a rank that
 * frees memory beside a registered collective would wait for a peer that waits for it.
 *
 * One GPU, no NCCL. Prints a line a call: how long it took, and how long the other thread's call took beside it. The kernel ends
 * after two seconds in any case. Nothing is checked but that all of it ends. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../support/driver_answers.h"

/* Spins until the word is not zero, or until `nanoseconds` have passed. */
static const char SPIN[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry spin(.param .u64 at, .param .u64 limit) {\n"
    "  .reg .pred %p<3>; .reg .b32 %r<2>; .reg .b64 %rd<6>;\n"
    "  ld.param.u64 %rd1, [at];\n  ld.param.u64 %rd2, [limit];\n  mov.u64 %rd3, %globaltimer;\n"
    "AGAIN:\n"
    "  ld.volatile.global.u32 %r1, [%rd1];\n  setp.ne.u32 %p1, %r1, 0;\n  @%p1 bra DONE;\n"
    "  mov.u64 %rd4, %globaltimer;\n  sub.u64 %rd5, %rd4, %rd3;\n  setp.lt.u64 %p2, %rd5, %rd2;\n  @%p2 bra AGAIN;\n"
    "DONE:\n  ret;\n}\n";

enum { SPINS_MS = 2000, BLOCKED_AFTER_MS = 200, BESIDE_WITHIN_MS = 1500, HOST_MAPPED = 2, PORTABLE_MAPPED = 3, REGISTERED = 256 << 10 };

static volatile unsigned* ends_spin;
static void *spin, *context;

static double ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static void begin_spin(void) {
  word at = (word)(uintptr_t)ends_spin, limit = SPINS_MS * 1000000ull;
  void* parameters[] = {&at, &limit};
  *ends_spin = 0;
  CU(LaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

/* The calls that are timed while the kernel runs. Their memory is made before. */
enum what { ALLOCATES, ALLOCATES_LITTLE, FREES, FREES_LITTLE, ALLOCATES_HOST, FREES_HOST, REGISTERS_HOST, UNREGISTERS_HOST, UNMAPS, SYNCHRONIZES, WHATS };
static const char* const NAMES[WHATS] = {"cuMemAlloc of 64 MiB", "cuMemAlloc of 512 bytes", "cuMemFree of 64 MiB",
                                         "cuMemFree of 512 bytes", "cuMemHostAlloc of 16 MiB", "cuMemFreeHost of 16 MiB",
                                         "cuMemHostRegister of 256 KiB", "cuMemHostUnregister of 256 KiB",
                                         "cuMemUnmap", "cuCtxSynchronize"};

struct blocked {
  enum what what;
  word memory, base;
  void* host;
  double took;
  atomic_bool is_done;
};

static void prepare(struct blocked* call) {
  word handle;
  if (call->what == FREES) CU(MemAlloc_v2(&call->memory, 64 * MIB));
  if (call->what == FREES_LITTLE) CU(MemAlloc_v2(&call->memory, 512));
  if (call->what == FREES_HOST) CU(MemHostAlloc(&call->host, 16 * MIB, 0));
  if (call->what == REGISTERS_HOST || call->what == UNREGISTERS_HOST)
    call->host = mmap(NULL, REGISTERED, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (call->what == UNREGISTERS_HOST) CU(MemHostRegister_v2(call->host, REGISTERED, PORTABLE_MAPPED));
  if (call->what == UNMAPS) {
    handle = created(granule);
    CU(MemAddressReserve(&call->base, granule, 0, 0, 0));
    map(call->base, granule, handle);
    CU(MemRelease(handle));
  }
}

static void* blocks(void* argument) {
  struct blocked* call = argument;
  CU(CtxSetCurrent(context));
  double began = ms();
  switch (call->what) {
    case ALLOCATES: CU(MemAlloc_v2(&call->memory, 64 * MIB)); break;
    case ALLOCATES_LITTLE: CU(MemAlloc_v2(&call->memory, 512)); break;
    case FREES: case FREES_LITTLE: CU(MemFree_v2(call->memory)); break;
    case ALLOCATES_HOST: CU(MemHostAlloc(&call->host, 16 * MIB, 0)); break;
    case FREES_HOST: CU(MemFreeHost(call->host)); break;
    case REGISTERS_HOST: CU(MemHostRegister_v2(call->host, REGISTERED, PORTABLE_MAPPED)); break;
    case UNREGISTERS_HOST: CU(MemHostUnregister(call->host)); break;
    case UNMAPS: CU(MemUnmap(call->base, granule)); break;
    default: CU(CtxSynchronize());
  }
  call->took = ms() - began;
  atomic_store(&call->is_done, true);
  return NULL;
}

static void release(struct blocked* call) {
  if (call->what == ALLOCATES || call->what == ALLOCATES_LITTLE) CU(MemFree_v2(call->memory));
  if (call->what == ALLOCATES_HOST) CU(MemFreeHost(call->host));
  if (call->what == REGISTERS_HOST) CU(MemHostUnregister(call->host));
  if (call->what == REGISTERS_HOST || call->what == UNREGISTERS_HOST) munmap(call->host, REGISTERED);
  if (call->what == UNMAPS) CU(MemAddressFree(call->base, granule));
}

/* The steps of NCCL's proxy threads for a peer's buffer, up to its end. */
enum { STEPS = 9 };
static const char* const STEP_NAMES[STEPS] = {"create", "export", "import", "reserve", "map", "set access", "unmap", "free addresses", "release"};

struct beside {
  double took[STEPS];
  atomic_int done;
};

static void* works(void* argument) {
  struct beside* beside = argument;
  struct access access = {{DEVICE, 0}, READ_WRITE};
  word own = 0, imported = 0, at = 0;
  int descriptor = -1;
  CU(CtxSetCurrent(context));
  for (int step = 0; step < STEPS; step++) {
    double began = ms();
    switch (step) {
      case 0: own = created(granule); break;
      case 1: CU(MemExportToShareableHandle(&descriptor, own, DESCRIPTOR, 0)); break;
      case 2: CU(MemImportFromShareableHandle(&imported, (void*)(uintptr_t)descriptor, DESCRIPTOR)); break;
      case 3: CU(MemAddressReserve(&at, granule, 0, 0, 0)); break;
      case 4: CU(MemMap(at, granule, 0, imported, 0)); break;
      case 5: CU(MemSetAccess(at, granule, &access, 1)); break;
      case 6: CU(MemUnmap(at, granule)); break;
      case 7: CU(MemAddressFree(at, granule)); break;
      default: CU(MemRelease(imported)); CU(MemRelease(own));
    }
    beside->took[step] = ms() - began;
    atomic_store(&beside->done, step + 1);
  }
  close(descriptor);
  return NULL;
}

static void try(enum what what) {
  struct blocked call = {.what = what};
  struct beside beside = {.done = 0};
  pthread_t first, second;
  prepare(&call);
  begin_spin();
  double began = ms();
  if (pthread_create(&first, NULL, blocks, &call)) return;
  while (ms() - began < BLOCKED_AFTER_MS && !atomic_load(&call.is_done)) usleep(1000);
  bool waits = !atomic_load(&call.is_done);
  if (pthread_create(&second, NULL, works, &beside)) return;
  while (ms() - began < BESIDE_WITHIN_MS && atomic_load(&beside.done) < STEPS) usleep(1000);
  int done = atomic_load(&beside.done);
  bool still_waits = !atomic_load(&call.is_done);
  *ends_spin = 1;
  pthread_join(first, NULL);
  pthread_join(second, NULL);
  CU(StreamSynchronize(stream));
  release(&call);
  printf("%s: %s the kernel, took %.2f ms; beside it %s", NAMES[what], waits ? "waited for" : "did not wait for", call.took,
         done == STEPS ? "all was done" : "NOT all was done: held up in ");
  if (done < STEPS) printf("%s", STEP_NAMES[done]);
  printf("%s\n   ", waits && !still_waits ? " (and it came back meanwhile)" : "");
  for (int step = 0; step < STEPS; step++) printf(" %s %.2f", STEP_NAMES[step], beside.took[step]);
  printf(" ms\n");
  fflush(stdout);
}

int main(void) {
  void *host = NULL, *module = NULL;
  open_driver();
  start_driver();
  CU(CtxGetCurrent(&context));
  CU(MemHostAlloc(&host, 4096, HOST_MAPPED));
  ends_spin = host;
  CU(ModuleLoadData(&module, SPIN));
  CU(ModuleGetFunction(&spin, module, "spin"));
  /* The first launch is slow, so it is not timed. */
  begin_spin();
  *ends_spin = 1;
  CU(StreamSynchronize(stream));
  for (enum what what = 0; what < WHATS; what++) try(what);
  CU(MemFreeHost(host));
  CU(ModuleUnload(module));
  printf("driver_beside: %d failures\n", failures);
  return failures ? 1 : 0;
}
