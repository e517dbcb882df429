/* Holds that a program may free and allocate the memory of large all-gathers as it likes. New memory at a former address is
 * used, on all ranks or on some. Freed memory goes back to the driver, even without further calls of NCCL. Other threads
 * allocate and free meanwhile; the program registers the same buffers itself; communicators are split, destroyed and aborted
 * right after. Ranks are processes, then threads; words as `choose` has them. */
#include "../support/gathers.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { MIB = 1 << 20, CALLS = 6 /* enough to be registered by the last ones */ };

/* Slots of share_id, one for each communicator that lives at a time. */
enum { FIRST };

static int version;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static size_t room(const struct rank* self) { return gather_room(self, gather_count(self, 4096)); }

/* For odd keys out of place, if the memory has room for the input; else in place. */
static struct gather gather_in(const struct rank* self, const struct memory* memory, uint64_t key) {
  size_t count = gather_count(self, key * 2 % 4096 + 1);
  bool has_input = memory->bytes >= room(self) + count + 8;
  return gather_into(self, has_input && key % 2 ? memory->at + room(self) + key % 8 : NULL, memory, 0, count, key);
}

/* All calls are in flight at once. Each overwrites the output of the one before, and the last is verified. */
static void gathers_in(struct rank* self, ncclComm_t communicator, const struct memory* memory, int calls, uint64_t key) {
  struct gather gather = gather_in(self, memory, key);
  gather_prepare(&gather);
  together(self);
  for (int call = 0; call < calls; call++) gather_launch(&gather, communicator, self->stream);
  wait_for(self->stream);
  together(self);
  gather_verify(&gather, self);
}

/* ncclMemAlloc mostly returns the address that ncclMemFree took. Ranks run ahead of each other. */
static void reused_address(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  char* before = NULL;
  int again = 0;
  for (uint64_t round = 0; round < 10; round++) {
    struct memory memory = memory_alloc(self, NCCLS, 2 * room(self));
    again += memory.at == before;
    before = memory.at;
    gathers_in(self, communicator, &memory, CALLS, 10 + round);
    gathers_in(self, communicator, &memory, 1, 20 + round);
    memory_free(self, &memory);
    together(self);
  }
  fprintf(stderr, "rank %d: ncclMemAlloc gave the same address again %d of 9 times\n", self->rank, again);
  NCCL(ncclCommDestroy(communicator));
}

/* Reserved addresses stay and the memory mapped there changes: on all ranks, on some, on one, at last to two handles. A call
 * over memory that is no longer mapped gives wrong bytes. */
static void mapped_anew(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = {addresses_reserve(self, 2 * room(self)), 2 * room(self), MAPPED};
  memory_map(self, memory.at, memory.bytes);
  for (uint64_t round = 0; round < 10; round++) {
    gathers_in(self, communicator, &memory, CALLS, 100 + round);
    bool is_mine = round < 4 || (round < 7 ? self->rank % 2 == 1 : self->rank == (int)round % self->ranks);
    if (is_mine) {
      memory_unmap(self, memory.at, memory.bytes);
      memory_map(self, memory.at, memory.bytes);
      together(self);
    } else {
      together(self);
    }
    gathers_in(self, communicator, &memory, 1, 120 + round);
  }
  /* Two handles in the place of one: such memory cannot be registered. */
  size_t half = 2 * MIB;
  memory_unmap(self, memory.at, memory.bytes);
  memory_map(self, memory.at, half);
  memory_map(self, memory.at + half, memory.bytes - half);
  together(self);
  gathers_in(self, communicator, &memory, 2, 140);
  gathers_in(self, communicator, &memory, 2, 141);
  memory_unmap(self, memory.at, half);
  memory_unmap(self, memory.at + half, memory.bytes - half);
  addresses_free(self, memory.at, memory.bytes);
  NCCL(ncclCommDestroy(communicator));
}

/* Whether the memory in use falls to `bytes` within a second, and after how many milliseconds. */
static bool falls_to(size_t bytes, double* took_ms) {
  double began = seconds();
  bool has_fallen = false;
  do {
    has_fallen = memory_used() <= bytes;
    *took_ms = (seconds() - began) * 1e3;
    if (!has_fallen) usleep(500);
  } while (!has_fallen && *took_ms < 1000);
  return has_fallen;
}

/* Memory is freed on all ranks, without a further call of NCCL but ncclMemFree, and the driver gets it back. */
static void returned(struct rank* self) {
  enum { BYTES = 64 * MIB, SLACK = 4 * MIB /* for what drivers do */ };
  ncclComm_t communicator = world(self, FIRST);
  for (uint64_t round = 0; round < 3; round++) {
    struct memory own = memory_alloc(self, MAPPED, BYTES), nccls = memory_alloc(self, NCCLS, BYTES);
    double took_ms = 0;
    gathers_in(self, communicator, &own, CALLS, 200 + 2 * round);
    gathers_in(self, communicator, &nccls, CALLS, 201 + 2 * round);
    meet(self);
    size_t used = memory_used();
    meet(self);
    /* In the second round only by the driver's calls, of which Windlass is not told. */
    memory_free(self, &own);
    if (round != 1) memory_free(self, &nccls), memory_return();
    bool is_back = falls_to(used + SLACK - (round == 1 ? 1 : 2) * (size_t)BYTES, &took_ms);
    if (!CHECK(is_back && "freed memory is the driver's again")) {
      fprintf(stderr, "  rank %d, round %d: %zu bytes in use, %zu before\n", self->rank, (int)round, memory_used(), used);
    }
    fprintf(stderr, "rank %d, round %d: memory was back after %.1f ms\n", self->rank, (int)round, took_ms);
    meet(self);
    if (round == 1) memory_free(self, &nccls);
    together(self);
  }
  NCCL(ncclCommDestroy(communicator));
}

/* Allocates and frees as an allocator's thread does, memory that no gather uses. */
static void* allocates(void* argument) {
  const struct rank* self = argument;
  CUDA(cuCtxSetCurrent(self->context));
  for (int round = 0; round < 40; round++) {
    struct memory memory[] = {memory_alloc(self, MAPPED, 4 * MIB), memory_alloc(self, NCCLS, 3 * MIB),
                              memory_alloc(self, PLAIN, MIB)};
    memory_free(self, &memory[0]);
    memory[0] = memory_alloc(self, MAPPED, 2 * MIB);
    for (int i = 0; i < 3; i++) memory_free(self, &memory[i]);
  }
  return NULL;
}

/* Each rank has a second thread. The memory of the gathers is freed and allocated, too. */
static void frees_elsewhere(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  pthread_t thread;
  /* NCCL's first collective allocates and launches in turn, so it runs before the thread starts. */
  struct memory memory = memory_alloc(self, NCCLS, room(self));
  gathers_in(self, communicator, &memory, 2, 300);
  if (pthread_create(&thread, NULL, allocates, self)) return;
  for (uint64_t round = 0; round < 8; round++) {
    gathers_in(self, communicator, &memory, CALLS, 310 + round);
    memory_free(self, &memory);
    memory = memory_alloc(self, round % 2 ? NCCLS : MAPPED, room(self));
  }
  pthread_join(thread, NULL);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* The program registers and deregisters buffers that Windlass may have registered. */
static void own(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, room(self));
  void* handle = NULL;
  gathers_in(self, communicator, &memory, CALLS, 400);
  for (uint64_t round = 0; round < 2; round++) {
    meet(self);
    NCCL(ncclCommRegister(communicator, memory.at, memory.bytes, &handle));
    CHECK(handle != NULL);
    gathers_in(self, communicator, &memory, 3, 410 + round);
    meet(self); /* a peer may still be reading this buffer when this rank's stream is done */
    NCCL(ncclCommDeregister(communicator, handle));
    gathers_in(self, communicator, &memory, CALLS, 420 + round);
  }
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

static void in_a_window(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, 12 * MIB);
  ncclWindow_t window = NULL;
  CHECK(room(self) <= memory.bytes);
  gathers_in(self, communicator, &memory, CALLS, 500);
  meet(self);
  NCCL(ncclCommWindowRegister(communicator, memory.at, memory.bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
  gathers_in(self, communicator, &memory, 3, 510);
  meet(self);
  /* Where the machine supports no windows the library returns success and no window. */
  if (window) NCCL(ncclCommWindowDeregister(communicator, window));
  gathers_in(self, communicator, &memory, CALLS, 520);
  meet(self);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* A child over all ranks in reverse order, with the parent's resources or its own. Parent and child gather in turn. */
static void children(struct rank* self) {
  for (int shares = 0; shares < 2; shares++) {
    ncclComm_t parent = world(self, FIRST), child = NULL;
    ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
    struct memory memory = memory_alloc(self, NCCLS, room(self));
    struct rank turned = *self;
    gathers_in(self, parent, &memory, CALLS, 600);
    configuration.splitShare = shares;
    turned.rank = self->ranks - 1 - self->rank;
    NCCL(ncclCommSplit(parent, 0, turned.rank, &child, &configuration));
    for (uint64_t round = 0; round < 4; round++) {
      struct gather gather = gather_in(&turned, &memory, 610 + round);
      gather_run(self, child, &gather);
      gathers_in(self, parent, &memory, 2, 620 + round);
    }
    memory_free(self, &memory);
    memory = memory_alloc(self, NCCLS, room(self));
    struct gather gather = gather_in(&turned, &memory, 630);
    gather_run(self, child, &gather);
    destroy_each((ncclComm_t[]){child, parent}, 2);
    memory_free(self, &memory);
    together(self);
  }
}

/* Memory is freed right before a destroy, after it, right before an abort, after it. */
static void ends(struct rank* self) {
  for (int way = 0; way < 4; way++) {
    ncclComm_t communicator = world(self, FIRST);
    struct memory memory = memory_alloc(self, NCCLS, room(self)), second = memory_alloc(self, MAPPED, room(self));
    gathers_in(self, communicator, &memory, CALLS, 700);
    gathers_in(self, communicator, &second, CALLS, 701);
    if (way % 2 == 0) {
      memory_free(self, &memory);
      memory_free(self, &second);
    }
    /* An abort on one rank may end the others' operations. */
    if (way >= 2) meet(self);
    if (way < 2) NCCL(ncclCommDestroy(communicator));
    else NCCL(ncclCommAbort(communicator));
    if (way % 2) {
      memory_free(self, &memory);
      memory_free(self, &second);
    }
    together(self);
  }
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  RUN_PART(reused_address, self);
  RUN_PART(mapped_anew, self);
  RUN_PART(returned, self);
  /* Allocations of another thread may wait for the kernels of all ranks of the process: see `together`. */
  if (self->kind == PROCESSES || !on_gpus()) RUN_PART(frees_elsewhere, self);
  RUN_PART(own, self);
  if (version >= 22703) RUN_PART(in_a_window, self);
  RUN_PART(children, self);
  RUN_PART(ends, self);
}

int main(int count, char** words) {
  begin("registered_lives", 280);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
