/* Holds that what the driver says of an address identifies the allocation that holds it. The id of a buffer
 * (CU_POINTER_ATTRIBUTE_BUFFER_ID) is the same for all addresses of an allocation, stays while the allocation lives, and never
 * comes again, not even for memory of the same kind at the same address. A cache of registrations depends on that.
 *
 * One GPU, two processes (a peer that exports), no NCCL. Prints a line a fact. Facts that Windlass relies on are checked, others
 * only printed. The driver is opened by name, so that the program skips where there is none. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../support/driver_answers.h"

/* cuMemAlloc: freed and allocated again. */
static void plain(void) {
  static const size_t sizes[] = {512, 65536, 2 << 20, (3 << 20) + 512, 64 << 20, 1000 << 20};
  for (int s = 0; s < 6; s++) {
    int reused = 0;
    word first = 0;
    for (int round = 0; round < 32; round++) {
      word now;
      CU(MemAlloc_v2(&now, sizes[s]));
      struct seen seen = see(now);
      if (!round) seen = tell(now, "cuMemAlloc of %zu", sizes[s]), first = now;
      else reused += now == first;
      hold_new(seen, now, sizes[s]);
      CU(MemFree_v2(now));
      if (!round) tell(now, "cuMemAlloc of %zu, freed", sizes[s]);
      CHECK(see(now).id != seen.id);
    }
    printf("cuMemAlloc of %zu: at the first address again %d of 31 times, each with a new id\n", sizes[s], reused);
    CHECK(reused > 0);
  }
  word small[2];
  for (int i = 0; i < 2; i++) CU(MemAlloc_v2(&small[i], 4096)), FRESH(small[i], 4096, "cuMemAlloc of 4096, number %d of two alive", i);
  for (int i = 0; i < 2; i++) CU(MemFree_v2(small[i]));
}

/* Virtual memory: mapped again at the same address; side by side, grown and shrunk; one handle twice. */
static void virtual_memory(void) {
  size_t bytes = granule;
  word base, one = created(bytes), two = created(bytes);
  CU(MemAddressReserve(&base, 4 * bytes, 0, 0, 0));
  tell(base, "reserved, nothing mapped");
  map(base, bytes, one);
  struct seen seen = FRESH(base, bytes, "mapped: handle one");
  struct access all = {{DEVICE, 0}, READ_WRITE};
  CU(MemSetAccess(base, bytes, &all, 1));
  hold_same(seen, base);
  CU(MemUnmap(base, bytes));
  CHECK(tell(base, "unmapped").id != seen.id);
  map(base, bytes, two);
  FRESH(base, bytes, "mapped again there: handle two");
  CU(MemUnmap(base, bytes));
  map(base, bytes, one);
  seen = FRESH(base, bytes, "mapped again there: handle one");
  map(base + bytes, bytes, two);
  hold_same(seen, base);
  struct seen second = FRESH(base + bytes, bytes, "side by side: the second handle");
  hold_same(seen, base);
  map(base + 2 * bytes, bytes, one);
  struct seen third = FRESH(base + 2 * bytes, bytes, "side by side: handle one a second time");
  printf("one handle mapped twice: %s\n", third.block == seen.block ? "one block" : "two blocks");
  hold_same(seen, base);
  hold_same(second, base + bytes);
  CU(MemUnmap(base + bytes, bytes));
  hold_same(seen, base);
  hold_same(third, base + 2 * bytes);
  map(base + bytes, bytes, two);
  FRESH(base + bytes, bytes, "side by side: the middle one mapped again");
  hold_same(seen, base);
  for (int i = 0; i < 3; i++) CU(MemUnmap(base + i * bytes, bytes));
  CU(MemRelease(one));
  map(base, bytes, two);
  CU(MemRelease(two));
  seen = FRESH(base, bytes, "mapped, its handle released");
  CU(MemUnmap(base, bytes));
  CU(MemAddressFree(base, 4 * bytes));
  word again, three = created(2 * bytes);
  CU(MemAddressReserve(&again, 4 * bytes, 0, base, 0));
  map(again, 2 * bytes, three);
  FRESH(again, 2 * bytes, "addresses given back and reserved again (%s), another handle", again == base ? "the same" : "others");
  CU(MemUnmap(again, 2 * bytes));
  int half = cu.MemMap(again, bytes, 0, three, 0);
  printf("half of a handle: mapped %s\n", name_of(half));
  if (!half) tell(again, "half of a handle"), CU(MemUnmap(again, bytes));
  CU(MemRelease(three));
  CU(MemAddressFree(again, 4 * bytes));
}

/* Memory of a stream-ordered pool. With `pool` NULL it is the device's default pool. */
static void pool_memory(void* pool, const char* which) {
  void* own = NULL;
  CU(DeviceGetDefaultMemPool(&own, 0));
  word forever = ~0ull, first = 0, neighbour = 0;
  CU(MemPoolSetAttribute(pool ? pool : own, RELEASE_THRESHOLD, &forever));
  for (int trimmed = 0; trimmed < 2; trimmed++) {
    int reused = 0;
    for (int round = 0; round < 32; round++) {
      word now;
      if (pool) CU(MemAllocFromPoolAsync(&now, 8 * MIB, pool, stream));
      else CU(MemAllocAsync(&now, 8 * MIB, stream));
      struct seen seen = round ? see(now) : tell(now, "%s, %s", which, trimmed ? "trimmed before each" : "kept");
      hold_new(seen, now, 8 * MIB);
      if (round) reused += now == first;
      else first = now;
      if (!round) {
        CU(MemAllocFromPoolAsync(&neighbour, 3 * MIB, pool ? pool : own, stream));
        FRESH(neighbour, 3 * MIB, "%s, one more", which);
        hold_same(seen, now);
        CU(MemFreeAsync(neighbour, stream));
      }
      CU(MemFreeAsync(now, stream));
      if (!round) tell(now, "%s, free is queued", which);
      CU(StreamSynchronize(stream));
      if (!round) tell(now, "%s, freed", which);
      if (trimmed) CU(MemPoolTrimTo(pool ? pool : own, 0));
      if (trimmed && !round) tell(now, "%s, freed and trimmed", which);
    }
    printf("%s, %s: at the first address again %d of 31 times, each with a new id\n", which, trimmed ? "trimmed" : "kept", reused);
    CHECK(trimmed || reused > 0);
  }
  /* Freed and given out again before the stream runs. */
  for (int round = 0; round < 8; round++) {
    word now;
    CU(MemAllocFromPoolAsync(&now, 8 * MIB, pool ? pool : own, stream));
    CU(MemsetD8Async(now, 1, 8 * MIB, stream));
    hold_new(see(now), now, 8 * MIB);
    CU(MemFreeAsync(now, stream));
  }
  CU(StreamSynchronize(stream));
  /* Freed behind work that has not finished. */
  word now;
  CU(MemAllocFromPoolAsync(&now, 8 * MIB, pool ? pool : own, stream));
  struct seen seen = hold_new(see(now), now, 8 * MIB);
  for (int i = 0; i < 500; i++) CU(MemsetD8Async(now, 1, 8 * MIB, stream));
  CU(MemFreeAsync(now, stream));
  int told = see(now).id == seen.id, still = cu.StreamQuery(stream);
  printf("%s, freed behind work: its id %s, the stream is then %s\n", which, told ? "is still told" : "is gone",
         still ? "at work" : "idle");
  CU(StreamSynchronize(stream));
  /* Freed by the synchronous call. */
  CU(MemAllocFromPoolAsync(&now, 8 * MIB, pool ? pool : own, stream));
  seen = hold_new(see(now), now, 8 * MIB);
  CU(MemFree_v2(now));
  printf("%s, freed by cuMemFree: its id %s\n", which, see(now).id == seen.id ? "is still told" : "is gone");
  CU(MemPoolTrimTo(pool ? pool : own, 0));
}

static void pools(void) {
  pool_memory(NULL, "cuMemAllocAsync");
  struct pool_kind kind = {PINNED, 0, {DEVICE, 0}, NULL, 0, {0}};
  for (int types = 0; types < 2; types++) {
    void* pool;
    kind.handle_types = types ? DESCRIPTOR : 0;
    if (types && !has_shared_pools()) continue;
    CU(MemPoolCreate(&pool, &kind));
    pool_memory(pool, types ? "own pool with descriptors" : "own pool");
    CU(MemPoolDestroy(pool));
  }
}

/* Memory that is never registered: only printed, to know by which attributes it shows. */
static void host_and_managed(void) {
  word managed;
  CU(MemAllocManaged(&managed, 4 * MIB, MANAGED_GLOBAL));
  struct seen seen = tell(managed, "managed");
  CHECK(attribute(IS_MANAGED, managed, NULL) == 1);
  CU(MemFree_v2(managed));
  CHECK(!seen.id || tell(managed, "managed, freed").id != seen.id);
  void* host;
  for (int round = 0; round < 2; round++) {
    CU(MemHostAlloc(&host, 4 * MIB, 0));
    seen = tell((uintptr_t)host, "cuMemHostAlloc");
    CHECK(attribute(MEMORY_TYPE, (uintptr_t)host, NULL) == 1);
    hold_unknown(seen.id);
    CU(MemFreeHost(host));
  }
  host = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  tell((uintptr_t)host, "host memory that the driver does not know");
  for (int round = 0; round < 2; round++) {
    CU(MemHostRegister_v2(host, 4 * MIB, 0));
    seen = tell((uintptr_t)host, "cuMemHostRegister");
    CHECK(attribute(MEMORY_TYPE, (uintptr_t)host, NULL) == 1);
    hold_unknown(seen.id);
    CU(MemHostUnregister(host));
  }
  munmap(host, 4 * MIB);
  int on_stack = 0;
  tell((uintptr_t)&on_stack, "stack");
  tell(0, "null");
  CHECK(see((uintptr_t)&on_stack).id == 0 && see(0).id == 0);
}

/* Memory that a graph allocates belongs to no allocation until the graph runs. */
static void of_a_graph(void) {
  word captured = 0;
  void *graph = NULL, *executable = NULL;
  CU(StreamBeginCapture_v2(stream, 0));
  int allocated = cu.MemAllocAsync(&captured, 4 * MIB, stream);
  if (!allocated) tell(captured, "cuMemAllocAsync in a capture");
  if (cu.StreamEndCapture(stream, &graph) || allocated) return;
  CU(GraphInstantiateWithFlags(&executable, graph, 0));
  word before = 0;
  for (int round = 0; round < 3; round++) {
    CU(GraphLaunch(executable, stream));
    CU(StreamSynchronize(stream));
    struct seen seen = tell(captured, "cuMemAllocAsync in a capture, launch %d", round);
    printf("its id %s\n", !seen.id ? "is none" : seen.id == before ? "is that of the launch before" : "is new");
    before = seen.id;
    if (seen.id) CU(MemFreeAsync(captured, stream));
    CU(StreamSynchronize(stream));
  }
  CU(GraphExecDestroy(executable));
  CU(GraphDestroy(graph));
}

/* Attribute queries do not break a capture, even in the strictest mode. */
static void in_a_capture(void) {
  word pointer, handle, base = 0;
  size_t bytes = 0;
  void* graph = NULL;
  CU(MemAlloc_v2(&pointer, 4 * MIB));
  struct seen before = see(pointer);
  CU(StreamBeginCapture_v2(stream, 0));
  hold_same(before, pointer);
  CHECK(!cu.MemGetAddressRange_v2(&base, &bytes, pointer) && base == pointer);
  if (!cu.MemRetainAllocationHandle(&handle, (void*)(uintptr_t)pointer)) CU(MemRelease(handle));
  int ended = cu.StreamEndCapture(stream, &graph);
  printf("asked in a capture: ended %s\n", name_of(ended));
  CHECK(!ended);
  if (graph) CU(GraphDestroy(graph));
  of_a_graph();
  CU(MemFree_v2(pointer));
  /* A thread without a context, as a free hook or a background thread may be. */
  CU(MemAlloc_v2(&pointer, 4 * MIB));
  before = see(pointer);
  void* context = NULL;
  CU(DevicePrimaryCtxRetain(&context, 0));
  CU(CtxSetCurrent(NULL));
  struct seen without = tell(pointer, "cuMemAlloc, asked without a context");
  CHECK(!without.code && without.id == before.id);
  CU(CtxSetCurrent(context));
  CU(MemFree_v2(pointer));
}

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}
static int by_value(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}
/* The median of 1000 calls, including the time to read the clock. */
#define COST(what, call)                                                                                    \
  do {                                                                                                      \
    static double times[1000];                                                                              \
    for (int i = -50; i < 1000; i++) {                                                                      \
      double start = now_ns();                                                                              \
      call;                                                                                                 \
      if (i >= 0) times[i] = now_ns() - start;                                                              \
    }                                                                                                       \
    qsort(times, 1000, sizeof(double), by_value);                                                           \
    printf("cost, %s, %s: %.0f ns, of 99 in 100 at most %.0f\n", kind, what, times[500], times[990]);       \
  } while (0)

static void costs_of(word pointer, const char* kind) {
  word value, base, handle;
  size_t bytes;
  int asked[] = {BUFFER_ID, RANGE_START, RANGE_BYTES, MEMORY_TYPE, IS_MANAGED, LEGACY_IPC, HANDLE_TYPES, POOL};
  word values[8];
  void* places[8];
  for (int i = 0; i < 8; i++) places[i] = &values[i];
  COST("nothing", (void)0);
  COST("BUFFER_ID", cu.PointerGetAttribute(&value, BUFFER_ID, pointer));
  COST("RANGE_START_ADDR", cu.PointerGetAttribute(&value, RANGE_START, pointer));
  COST("MEMPOOL_HANDLE", cu.PointerGetAttribute(&value, POOL, pointer));
  COST("BUFFER_ID alone by cuPointerGetAttributes", cu.PointerGetAttributes(1, asked, places, pointer));
  COST("BUFFER_ID and the range", cu.PointerGetAttributes(3, asked, places, pointer));
  COST("eight at once", cu.PointerGetAttributes(8, asked, places, pointer));
  COST("cuMemGetAddressRange", cu.MemGetAddressRange_v2(&base, &bytes, pointer));
  COST("cuMemRetainAllocationHandle and release",
       if (!cu.MemRetainAllocationHandle(&handle, (void*)(uintptr_t)pointer)) cu.MemRelease(handle));
}

static void costs(void) {
  word pointer, base, handle = created(granule), others[256];
  CU(MemAlloc_v2(&pointer, 64 * MIB));
  costs_of(pointer + MIB, "cuMemAlloc");
  for (int i = 0; i < 256; i++) CU(MemAlloc_v2(&others[i], 2 * MIB));
  costs_of(pointer + MIB, "cuMemAlloc, 256 others");
  for (int i = 0; i < 256; i++) CU(MemFree_v2(others[i]));
  CU(MemFree_v2(pointer));
  CU(MemAddressReserve(&base, granule, 0, 0, 0));
  map(base, granule, handle);
  costs_of(base, "virtual memory");
  CU(MemUnmap(base, granule));
  CU(MemAddressFree(base, granule));
  CU(MemRelease(handle));
  CU(MemAllocAsync(&pointer, 8 * MIB, stream));
  costs_of(pointer, "pool");
  CU(MemFreeAsync(pointer, stream));
  CU(StreamSynchronize(stream));
  int on_stack = 0;
  costs_of((uintptr_t)&on_stack, "stack");
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  alarm(120);
  open_driver();
  int sockets[2], version = 0, status = 0;
  char name[100] = "";
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) return perror("socketpair"), 1;
  /* The driver does not work after a fork, so the peer starts before it. */
  pid_t peer = fork();
  if (!peer) prctl(PR_SET_PDEATHSIG, SIGKILL), alarm(120);
  close(sockets[peer ? 1 : 0]);
  start_driver();
  if (!peer) return peer_of_imports(sockets[1]), failures > 0;
  CU(DeviceGetName(name, sizeof(name), 0));
  CU(DriverGetVersion(&version));
  printf("%s, driver for CUDA %d.%d, granule %zu\n", name, version / 1000, version % 1000 / 10, granule);
  plain();
  printf("\nvirtual memory with descriptors\n");
  virtual_memory();
  printf("\nvirtual memory without\n");
  device_handle_types = 0;
  virtual_memory();
  device_handle_types = DESCRIPTOR;
  printf("\npools\n");
  pools();
  printf("\nother memory\n");
  host_and_managed();
  in_a_capture();
  printf("\na peer's memory\n");
  imported_memory(sockets[0]);
  printf("\ncosts\n");
  costs();
  waitpid(peer, &status, 0);
  CHECK(status == 0);
  printf("buffer_ids: %d checks, %d failures, %d allocations with an id of their own\n", checks, failures, known_count);
  return failures > 0;
}
