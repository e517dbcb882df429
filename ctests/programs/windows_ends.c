/* Holds that no rank hangs, nothing leaks and memory is intact however a communicator ends or the memory of its windows goes.
 * Cases: destroyed, finalized with windows alive, aborted, aborted by another thread while ranks wait in a registration; memory
 * trimmed under windows, of one communicator and of two; a peer that dies (`dies`, where windows are kept). */
#include "../support/windows.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { FIRST, SECOND };

/* Finalized and destroyed, destroyed, or aborted, with the memory freed before or after. The next communicator uses the memory. */
static void each_way(struct rank* self) {
  for (int way = 0; way < 6; way++) {
    ncclComm_t communicator = world(self, FIRST);
    struct memory memory = used_block(self, communicator, 100 + (uint64_t)way);
    if (way % 2) memory_free(self, &memory);
    meet(self);
    if (way / 2 == 0) NCCL(ncclCommFinalize(communicator));
    if (way / 2 == 2) NCCL(ncclCommAbort(communicator));
    else NCCL(ncclCommDestroy(communicator));
    if (way % 2 == 0) memory_free(self, &memory);
    together(self);
  }
}

/* Finalized while the program has a window; then its block is freed. No rank is in NCCL's communicator any more. */
static void finalized(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, window_room(self));
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  if (on_gpus()) window_end(communicator, window);
  meet(self);
  NCCL(ncclCommFinalize(communicator));
  memory_free(self, &memory);
  usleep(300 * 1000);
  /* The simulator would count the window as a leak at a destroy. */
  if (on_gpus()) NCCL(ncclCommDestroy(communicator));
  else NCCL(ncclCommAbort(communicator));
  together(self);
}

/* One communicator ends; the other's window over the same block stays. */
static void of_two(struct rank* self) {
  ncclComm_t first = world(self, FIRST), second = world(self, SECOND);
  struct memory memory = used_block(self, first, 200);
  ncclWindow_t window = window_over(second, memory.at, memory.bytes);
  window_gather(self, second, &memory, 0, 201);
  meet(self);
  NCCL(ncclCommDestroy(first));
  window_gather(self, second, &memory, 0, 202);
  meet(self);
  window_end(second, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(second));
}

/* Blocks of more sizes than may be kept: the first ones are freed, with their windows. */
static void leaving(struct rank* self) {
  ncclComm_t communicators[] = {world(self, FIRST), world(self, SECOND)};
  for (uint64_t round = 0; round < 8; round++) {
    struct memory memory = memory_alloc(self, NCCLS, window_room(self) + round * (2 << 20));
    ncclWindow_t windows[2];
    for (uint64_t i = 0; i < 2; i++) {
      windows[i] = window_over(communicators[i], memory.at, memory.bytes);
      window_gather(self, communicators[i], &memory, 0, 300 + 2 * round + i);
    }
    meet(self);
    int late = (int)round % 2;
    window_end(communicators[1 - late], windows[1 - late]);
    memory_free(self, &memory);
    if (round % 4 > 1) usleep(100 * 1000);
    window_end(communicators[late], windows[late]);
  }
  struct memory memory = used_block(self, communicators[0], 350);
  memory_free(self, &memory);
  destroy_each(communicators, 2);
}

/* A kept block is freed, with its window, when an allocation needs the memory. */
static void short_of_memory(struct rank* self) {
  /* A tenth of what is left is kept, less than the limit of an eighth of what is free. WANTED fits only if the kept block is
   * freed. */
  enum { MIB = 1 << 20, KEPT = 16 * MIB, LEFT = 10 * KEPT, WANTED = LEFT - KEPT / 2 };
  ncclComm_t communicator = world(self, FIRST);
  size_t free_bytes = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total));
  if (CHECK(free_bytes > LEFT)) {
    void* rest = device_alloc((free_bytes - LEFT) / (2 * MIB) * (2 * MIB));
    struct memory memory = memory_alloc(self, NCCLS, KEPT);
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    meet(self);
    window_end(communicator, window);
    memory_free(self, &memory);
    meet(self);
    memory = memory_alloc(self, NCCLS, WANTED);
    memory_free(self, &memory);
    device_free(rest);
  }
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

/* Freed memory is at once available to cuMemAlloc, as no more than an eighth of what is free is kept. */
static void given_back(struct rank* self) {
  enum { MIB = 1 << 20, FREED = 96 * MIB, LEFT = FREED + 64 * MIB };
  ncclComm_t communicator = world(self, FIRST);
  size_t free_bytes = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total));
  if (CHECK(free_bytes > LEFT)) {
    void* rest = device_alloc((free_bytes - LEFT) / (2 * MIB) * (2 * MIB));
    struct memory memory = memory_alloc(self, NCCLS, FREED);
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    meet(self);
    window_end(communicator, window);
    memory_free(self, &memory);
    meet(self);
    device_free(device_alloc(LEFT - 16 * MIB));
    device_free(rest);
  }
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

struct waiting { struct rank* self; ncclComm_t communicator; char* at; ncclResult_t code; };

static void* wait_in_registration(void* argument) {
  struct waiting* waiting = argument;
  ncclWindow_t window = NULL;
  CUDA(cuCtxSetCurrent(waiting->self->context));
  waiting->code = ncclCommWindowRegister(waiting->communicator, waiting->at, 4096, &window, NCCL_WIN_COLL_SYMMETRIC);
  count_calls("ncclCommWindowRegister", 1);
  return NULL;
}

/* All ranks but rank 0 wait in a registration and are aborted. */
static void aborted(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = used_block(self, communicator, 400);
  meet(self);
  if (self->rank) {
    pthread_t thread;
    struct waiting waiting = {self, communicator, memory.at, ncclSuccess};
    pthread_create(&thread, NULL, wait_in_registration, &waiting);
    usleep(200 * 1000);
    NCCL(ncclCommAbort(communicator));
    pthread_join(thread, NULL);
    CHECK(waiting.code != ncclSuccess);
  } else {
    NCCL(ncclCommAbort(communicator));
  }
  memory_free(self, &memory);
  together(self);
}

/* Rank 1's process dies instead of registering. */
static void dies(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, window_room(self));
  meet(self);
  if (self->rank == 1) {
    /* A rank that dies leaves no report, so its calls are not counted. */
    count_calls("ncclCommInitRank", -1);
    count_calls("ncclMemAlloc", -1);
    _exit(0);
  }
  ncclWindow_t window = NULL;
  CODE(ncclCommWindowRegister(communicator, memory.at, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), ncclRemoteError);
  NCCL(ncclCommAbort(communicator));
  memory_free(self, &memory);
}

static void all(struct rank* self) {
  RUN_PART(each_way, self);
  RUN_PART(finalized, self);
  RUN_PART(of_two, self);
  RUN_PART(leaving, self);
  if (!on_gpus()) RUN_PART(short_of_memory, self);
  if (!on_gpus()) RUN_PART(given_back, self);
  RUN_PART(aborted, self);
}

static void faults(struct rank* self) { RUN_PART(dies, self); }

int main(int count, char** words) {
  begin("windows_ends", 280);
  choose(count, words);
  int ranks = rank_count(4);
  windows_sections(ranks, all);
  if (is_section_chosen("faults")) run_ranks("faults", PROCESSES, ranks, faults, NULL);
  return finish();
}
