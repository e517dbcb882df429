/* Holds that ncclMemAlloc and ncclMemFree return what NCCL's do while freed memory is recycled. Cases: sizes, null, unknown,
 * interior and other pointers, memory freed or unmapped before, other devices, many threads, a forked child, handles and
 * exports, and memory that is short. Where Windlass keeps freed blocks, they are handed out again by size alone, the first made
 * first, and never one that is still registered. No more than the limit is kept, and it goes back when memory is needed.
 *
 * Ranks are processes. What they do before their first communicator counts, too. Words as `choose` has them. */
#include "../support/memory.h"
#include "../support/uneven.h"
#include "../../include/windlass.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MIB = 1 << 20, GRANULE = 2 * MIB, THREADS_MAX = 8, ROUNDS = 200 };

static int version;
/* Freed memory is kept only while there is a communicator with a peer group, as the background worker must look after it. */
static bool is_looked_after;

/* Whether freed memory is kept here at all. */
static bool is_kept(void) {
  const char* pool = getenv("WINDLASS_POOL");
  const char* nccls = getenv("NCCL_CUMEM_ENABLE");
  return is_looked_after && windlass_function("windlassGetStats") && pool && strcmp(pool, "off") && !(nccls && !strcmp(nccls, "0"));
}

/* Checks `condition` only where freed memory is kept. Not counted, so that the output of runs on NCCL alone is the same. */
#define KEPT(condition) ((void)(is_kept() && !(condition) && CHECK(!#condition)))

static windlassStats_t stats(void) {
  windlassStats_t now = {.size = sizeof now};
  ncclResult_t (*get)(windlassStats_t*);
  *(void**)&get = windlass_function("windlassGetStats");
  if (get) get(&now);
  return now;
}

/* How many blocks NCCL has made; only the simulator knows. */
static uint64_t makings(void) {
  const char* path = getenv("WINDLASS_NCCL");
  void* real = path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  uint64_t (*count)(void) = NULL;
  if (real) *(void**)&count = dlsym(real, "simAllocations");
  if (real && !on_gpus() && !count) CHECK(!"simAllocations");
  uint64_t made = count ? count() : 0;
  if (real) dlclose(real);
  return made;
}

/* The limit in bytes of what is kept on a device. */
static size_t limit(void) {
  const char* pool = getenv("WINDLASS_POOL");
  return pool ? (size_t)atol(pool) * MIB : 0;
}

static char* allocate(size_t bytes) {
  void* memory = NULL;
  NCCL(ncclMemAlloc(&memory, bytes));
  return memory;
}

static void give_back(void* memory) { NCCL(ncclMemFree(memory)); }

static size_t size_of(void* memory) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  CUDA(cuMemGetAddressRange_v2(&base, &bytes, (CUdeviceptr)(uintptr_t)memory));
  CHECK(base == (CUdeviceptr)(uintptr_t)memory);
  return bytes;
}

/* Records a code of NCCL's, which must be the same in every run. */
static void record_code(struct rank* self, const char* what, ncclResult_t code) {
  record(self, &code, sizeof code);
  count_calls(what, 1);
  fprintf(stderr, "rank %d: %s answered %d\n", self->rank, what, (int)code);
}

/* A freed block is handed out again at once, with its memory. Sizes are NCCL's. */
static void again(struct rank* self) {
  static const size_t sizes[] = {1, 4096, GRANULE, GRANULE + 1, 5 * MIB, 64 * MIB};
  for (int i = 0; i < 6; i++) {
    char* first = allocate(sizes[i]);
    size_t bytes = size_of(first);
    record(self, &bytes, sizeof bytes);
    CHECK(bytes >= sizes[i] && bytes < sizes[i] + GRANULE);
    device_fill(first, 0x5a, sizes[i]);
    give_back(first);
    uint64_t made = makings();
    char* second = allocate(sizes[i]);
    KEPT(second == first || sizes[i] > limit());
    KEPT(makings() == made || sizes[i] > limit());
    EQUAL(size_of(second), bytes);
    device_fill(second, 0xa5, sizes[i]);
    unsigned char last = 0;
    download(&last, second + sizes[i] - 1, 1);
    EQUAL(last, 0xa5);
    give_back(second);
  }
}

/* A block of another size is never handed out, not even a larger one. */
static void by_size(struct rank* self) {
  char* large = allocate(8 * MIB);
  give_back(large);
  char* small = allocate(4 * MIB);
  EQUAL(size_of(small), 4 * MIB);
  char* same = allocate(7 * MIB);
  KEPT(same == large);
  EQUAL(size_of(same), 8 * MIB);
  give_back(small);
  give_back(same);
  (void)self;
}

/* In whatever order blocks are freed, the one made first is handed out first, so that ranks get blocks that correspond. */
static void in_order(struct rank* self) {
  enum { BLOCKS = 4, BYTES = 6 * MIB };
  static const int orders[][BLOCKS] = {{2, 0, 3, 1}, {3, 2, 1, 0}};
  char* blocks[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) blocks[i] = allocate(BYTES);
  for (int i = 0; i < BLOCKS; i++) give_back(blocks[orders[self->rank % 2][i]]);
  for (int i = 0; i < BLOCKS; i++) {
    char* now = allocate(BYTES);
    KEPT(now == blocks[i]);
    blocks[i] = now;
  }
  for (int i = 0; i < BLOCKS; i++) give_back(blocks[i]);
}

/* The codes for pointers that are no block, or no longer one. */
static void codes(struct rank* self) {
  int on_stack = 0;
  void* nothing = &on_stack;
  record_code(self, "ncclMemAlloc", ncclMemAlloc(NULL, 64));
  record_code(self, "ncclMemAlloc", ncclMemAlloc(NULL, 0));
  record_code(self, "ncclMemAlloc", ncclMemAlloc(&nothing, 0));
  CHECK(nothing == NULL);
  NCCL(ncclMemFree(NULL));
  record_code(self, "ncclMemFree", ncclMemFree(&on_stack));
  char* memory = allocate(4 * MIB);
  record_code(self, "ncclMemFree", ncclMemFree(memory + 4096));
  EQUAL(size_of(memory), 4 * MIB);
  give_back(memory);
  uint64_t blocks = stats().poolBlocks;
  record_code(self, "ncclMemFree", ncclMemFree(memory));
  record_code(self, "ncclMemFree", ncclMemFree(memory + 4096));
  KEPT(stats().poolBlocks == blocks);
  memory = allocate(4 * MIB);
  device_fill(memory, 1, 4 * MIB);
  give_back(memory);
  void* plain = device_alloc(4 * MIB);
  ncclResult_t code = ncclMemFree(plain);
  record_code(self, "ncclMemFree", code);
  if (code != ncclSuccess) device_free(plain);
  record_code(self, "ncclMemAlloc", ncclMemAlloc(&nothing, (size_t)1 << 50));
}

/* The program unmaps a block itself. */
static void unmap_it(char* memory) {
  CUmemGenericAllocationHandle handle = 0;
  size_t bytes = 0;
  CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory, base = 0;
  CUDA(cuMemGetAddressRange_v2(&base, &bytes, at));
  CUDA(cuMemRetainAllocationHandle(&handle, memory));
  CUDA(cuMemUnmap(at, bytes));
  CUDA(cuMemAddressFree(at, bytes));
  CUDA(cuMemRelease(handle));
  if (on_gpus()) CUDA(cuMemRelease(handle)); /* NCCL's own reference, which its free would release */
}

static void unmapped(struct rank* self) {
  char* memory = allocate(12 * MIB);
  unmap_it(memory);
  record_code(self, "ncclMemFree", ncclMemFree(memory));
  memory = allocate(12 * MIB);
  device_fill(memory, 3, 12 * MIB);
  give_back(memory);
  if (!is_kept()) return;
  /* The program has freed the block and then unmaps it: a mistake, which must harm nothing else. */
  unmap_it(memory);
  void* next = NULL;
  if (ncclMemAlloc(&next, 12 * MIB) != ncclSuccess || next == NULL) CHECK(!"allocated");
  device_fill(next, 4, 12 * MIB);
  if (ncclMemFree(next) != ncclSuccess) CHECK(!"freed");
  count_calls("ncclMemAlloc", 1);
  count_calls("ncclMemFree", 1);
}

/* A block of another device is freed in this device's context, and the other way round. The current context stays. */
static void other_device(struct rank* self) {
  int other = (self->device + 1) % self->ranks;
  CUcontext before = NULL, after = NULL, there = use_device(other);
  char* theirs = allocate(6 * MIB);
  CUDA(cuCtxSetCurrent(self->context));
  char* own = allocate(6 * MIB);
  CUDA(cuCtxGetCurrent(&before));
  give_back(theirs);
  CUDA(cuCtxGetCurrent(&after));
  CHECK(before == after);
  char* next = allocate(6 * MIB);
  KEPT(next != theirs);
  CUDA(cuCtxSetCurrent(there));
  give_back(own);
  give_back(next);
  char* again_theirs = allocate(6 * MIB);
  KEPT(again_theirs == theirs);
  give_back(again_theirs);
  CUDA(cuCtxSetCurrent(self->context));
}

struct worker { struct rank* self; int number; pthread_t thread; bool is_right; };

/* No two threads have the same block: each finds what it has written. */
static void* works(void* argument) {
  struct worker* worker = argument;
  CUDA(cuCtxSetCurrent(worker->self->context));
  struct random random = random_from((uint64_t)(worker->number + 1));
  worker->is_right = true;
  for (int round = 0; round < ROUNDS; round++) {
    size_t bytes = (1 + random_below(&random, 3)) * GRANULE;
    char* memory = allocate(bytes);
    uint64_t mark = (uint64_t)worker->number << 32 | (uint64_t)round, first = 0, last = 0;
    upload(memory, &mark, sizeof mark);
    upload(memory + bytes - sizeof mark, &mark, sizeof mark);
    download(&first, memory, sizeof first);
    download(&last, memory + bytes - sizeof last, sizeof last);
    worker->is_right = worker->is_right && first == mark && last == mark;
    give_back(memory);
  }
  return NULL;
}

static void threads(struct rank* self) {
  struct worker workers[THREADS_MAX];
  for (int i = 0; i < THREADS_MAX; i++) {
    workers[i] = (struct worker){.self = self, .number = i};
    CHECK(pthread_create(&workers[i].thread, NULL, works, &workers[i]) == 0);
  }
  for (int i = 0; i < THREADS_MAX; i++) {
    CHECK(pthread_join(workers[i].thread, NULL) == 0);
    CHECK(workers[i].is_right);
  }
}

/* A forked child gets no kept block: CUDA does not work there. */
static void forked(struct rank* self) {
  char* memory = allocate(4 * MIB);
  give_back(memory);
  pid_t child = fork();
  if (child == 0) {
    void* own = NULL;
    alarm(20);
    _exit(ncclMemAlloc(&own, 4 * MIB) == ncclSuccess ? 1 : ncclMemFree(memory) == ncclSuccess ? 2 : 0);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  (void)self;
}

/* The handle of a recycled block, exported and imported again, is of that block's memory. */
static void exported(struct rank* self) {
  enum { BYTES = 4 * MIB };
  for (int round = 0; round < 2; round++) {
    char* memory = allocate(BYTES);
    device_fill(memory, (unsigned char)(7 + round), BYTES);
    CUmemGenericAllocationHandle handle = 0, imported = 0;
    CUDA(cuMemRetainAllocationHandle(&handle, memory));
    int descriptor = -1;
    CUDA(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CUDA(cuMemImportFromShareableHandle(&imported, (void*)(uintptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    CHECK(close(descriptor) == 0);
    char* alias = addresses_reserve(self, BYTES);
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)alias;
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, self->device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUDA(cuMemMap(at, BYTES, 0, imported, 0));
    CUDA(cuMemSetAccess(at, BYTES, &access, 1));
    unsigned char seen = 0;
    download(&seen, alias + BYTES - 1, 1);
    EQUAL(seen, 7 + round);
    CUDA(cuMemUnmap(at, BYTES));
    addresses_free(self, alias, BYTES);
    CUDA(cuMemRelease(imported));
    CUDA(cuMemRelease(handle));
    give_back(memory);
  }
}

/* Kept memory is given back before an allocation fails. */
static void shortage(struct rank* self) {
  enum { LEFT = 640 * MIB };
  memory_return();
  size_t free_bytes = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total));
  if (!CHECK(free_bytes > LEFT)) return;
  void* rest = device_alloc((free_bytes - LEFT) / GRANULE * GRANULE);
  char* first = allocate(256 * MIB);
  give_back(first);
  char* second = allocate(512 * MIB);
  KEPT(stats().poolBlocks == 0);
  give_back(second);
  device_free(rest);
  memory_return();
  KEPT(stats().poolBlocks == 0);
  (void)self;
}

/* No more than WINDLASS_POOL is kept, and never a block larger than that. */
static void capped(struct rank* self) {
  size_t bytes_max = limit();
  char* blocks[8];
  for (int i = 0; i < 8; i++) blocks[i] = allocate((size_t)(1 + i % 3) * 4 * MIB);
  for (int i = 0; i < 8; i++) {
    give_back(blocks[i]);
    if (bytes_max) KEPT(stats().poolBytes <= bytes_max && stats().poolBytes > 0);
  }
  char* large = allocate(32 * MIB);
  uint64_t blocks_before = stats().poolBlocks;
  give_back(large);
  if (bytes_max && bytes_max < 32 * MIB) KEPT(stats().poolBlocks == blocks_before);
  (void)self;
}

/* A block whose registration has ended is kept. A block that is still registered is freed by NCCL. */
static void registered(struct rank* self, ncclComm_t communicator) {
  enum { BYTES = 14 * MIB };
  void* handle = NULL;
  char* memory = allocate(BYTES);
  NCCL(ncclCommRegister(communicator, memory, BYTES, &handle));
  NCCL(ncclCommDeregister(communicator, handle));
  give_back(memory);
  char* next = allocate(BYTES);
  KEPT(next == memory);
  NCCL(ncclCommRegister(communicator, next, BYTES, &handle));
  uint64_t blocks = stats().poolBlocks;
  give_back(next);
  KEPT(stats().poolBlocks == blocks);
  NCCL(ncclCommDeregister(communicator, handle));
  if (version < 22703) return;
  ncclWindow_t window = NULL;
  char* whole = allocate(BYTES);
  meet(self);
  NCCL(ncclCommWindowRegister(communicator, whole, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
  meet(self);
  if (window) NCCL(ncclCommWindowDeregister(communicator, window));
  meet(self);
  give_back(whole);
  char* last = allocate(BYTES);
  KEPT(last == whole);
  give_back(last);
}

/* While there is a communicator kept memory goes back when memory of the device is short. */
static void watched(struct rank* self) {
  enum { KEEPS = 256 * MIB, LEFT = 64 * MIB };
  if (!is_kept() || limit() < KEEPS) return;
  memory_return();
  void* memory = NULL;
  if (ncclMemAlloc(&memory, KEEPS) != ncclSuccess || ncclMemFree(memory) != ncclSuccess) CHECK(!"recycled");
  count_calls("ncclMemAlloc", 1);
  count_calls("ncclMemFree", 1);
  size_t free_bytes = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total));
  void* rest = device_alloc((free_bytes - LEFT) / GRANULE * GRANULE);
  for (int look = 0; look < 2000 && stats().poolBlocks; look++) usleep(1000);
  if (stats().poolBlocks) CHECK(!"given back");
  CUDA(cuMemGetInfo_v2(&free_bytes, &total));
  if (free_bytes < KEEPS) CHECK(!"free again");
  device_free(rest);
  (void)self;
}

/* Memory kept too long goes back by itself, also where enough is free. */
static void aged(struct rank* self) {
  give_back(allocate(6 * MIB));
  if (!is_kept()) return;
  for (int look = 0; look < 10000 && stats().poolBlocks; look++) usleep(1000);
  if (stats().poolBlocks) CHECK(!"given back");
  (void)self;
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  RUN_PART(again, self);
  uint64_t made = makings();
  for (int i = 0; i < 2; i++) give_back(allocate(GRANULE));
  if (made && makings() != made + 2) CHECK(!"nothing is kept yet");
  ncclComm_t communicator = world(self, 0);
  const char* peer_group = getenv("WINDLASS_PEER_GROUPS");
  is_looked_after = peer_group && !strcmp(peer_group, "on");
  RUN_PART(again, self);
  RUN_PART(by_size, self);
  RUN_PART(in_order, self);
  RUN_PART(codes, self);
  RUN_PART(unmapped, self);
  RUN_PART(other_device, self);
  RUN_PART(threads, self);
  RUN_PART(forked, self);
  RUN_PART(exported, self);
  RUN_PART(shortage, self);
  RUN_PART(capped, self);
  RUN_PART(registered, self, communicator);
  RUN_PART(watched, self);
  RUN_PART(aged, self);
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** arguments) {
  begin("pool", 100);
  choose(count, arguments);
  run_ranks("processes", PROCESSES, rank_count(2), all, NULL);
  return finish();
}
