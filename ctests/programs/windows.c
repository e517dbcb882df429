/* Holds that windows do what NCCL guarantees: registered, used, deregistered and freed again and again; of two communicators
 * over one block; inside a block; two in one block; deregistered after the free; in groups. Only if named, for kept windows: a
 * thousand registrations make one window and take no more memory. */
#include "../support/windows.h"

enum { FIRST, SECOND };

/* Allocate, register, use, deregister, free. */
static void again_and_again(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  for (uint64_t round = 0; round < 6; round++) {
    struct memory memory = memory_alloc(self, NCCLS, window_room(self));
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    window_gather(self, communicator, &memory, 0, 100 + round);
    meet(self);
    window_end(communicator, window);
    memory_free(self, &memory);
  }
  NCCL(ncclCommDestroy(communicator));
}

/* The block stays allocated; its window is made and ended, with another size in between. */
static void held(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, 2 * window_room(self));
  for (uint64_t round = 0; round < 6; round++) {
    size_t bytes = round % 3 == 2 ? memory.bytes / 2 / 4096 * 4096 : memory.bytes;
    ncclWindow_t window = window_over(communicator, memory.at, bytes);
    window_gather(self, communicator, &memory, 0, 200 + round);
    meet(self);
    window_end(communicator, window);
    if (round % 2) window_gather(self, communicator, &memory, 0, 210 + round);
  }
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

static void two_communicators(struct rank* self) {
  ncclComm_t communicators[] = {world(self, FIRST), world(self, SECOND)};
  for (uint64_t round = 0; round < 3; round++) {
    struct memory memory = memory_alloc(self, NCCLS, window_room(self));
    ncclWindow_t windows[2];
    for (int i = 0; i < 2; i++) windows[i] = window_over(communicators[i], memory.at, memory.bytes);
    for (uint64_t i = 0; i < 2; i++) window_gather(self, communicators[i], &memory, 0, 300 + 2 * round + i);
    meet(self);
    for (int i = 0; i < 2; i++) window_end(communicators[i], windows[i]);
    memory_free(self, &memory);
  }
  destroy_each(communicators, 2);
}

/* Two windows of one block, neither at its start. */
static void inside(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  size_t room = window_room(self);
  struct memory memory = memory_alloc(self, NCCLS, 2 * room + 4096);
  for (uint64_t round = 0; round < 3; round++) {
    ncclWindow_t first = window_over(communicator, memory.at + 4096, room);
    ncclWindow_t second = window_over(communicator, memory.at + 4096 + room, room);
    window_gather(self, communicator, &memory, 4096, 400 + 2 * round);
    window_gather(self, communicator, &memory, 4096 + room, 401 + 2 * round);
    meet(self);
    window_end(communicator, round % 2 ? first : second);
    window_end(communicator, round % 2 ? second : first);
  }
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* The program frees the block before it ends the window. */
static void late_end(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  for (uint64_t round = 0; round < 3; round++) {
    struct memory memory = memory_alloc(self, NCCLS, window_room(self));
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    window_gather(self, communicator, &memory, 0, 500 + round);
    meet(self);
    memory_free(self, &memory);
    window_end(communicator, window);
  }
  NCCL(ncclCommDestroy(communicator));
}

/* Registrations in a group: one, two of a communicator, two of two communicators; and in a group on rank 0 alone, where the
 * others make them one by one. NCCL 2.28.9 hangs in the last two with processes on GPUs, so only what all ranks group alike runs
 * there. */
static void grouped(struct rank* self) {
  ncclComm_t communicators[] = {world(self, FIRST), world(self, SECOND)};
  struct memory memory[2];
  for (int i = 0; i < 2; i++) memory[i] = memory_alloc(self, NCCLS, window_room(self));
  for (int round = 0; round < (on_gpus() ? 2 : 4); round++) {
    ncclWindow_t windows[2] = {NULL, NULL};
    bool is_group = round < 2 || self->rank == 0;
    if (is_group) NCCL(ncclGroupStart());
    for (int i = 0; i < (round == 0 ? 1 : 2); i++) {
      ncclComm_t communicator = communicators[round == 2 ? i : 0];
      NCCL(ncclCommWindowRegister(communicator, memory[i].at, memory[i].bytes, &windows[i], NCCL_WIN_COLL_SYMMETRIC));
    }
    if (is_group) NCCL(ncclGroupEnd());
    window_gather(self, communicators[0], &memory[0], 0, 600 + (uint64_t)round);
    meet(self);
    for (int i = 0; i < 2; i++) window_end(communicators[round == 2 ? i : 0], windows[i]);
  }
  for (int i = 0; i < 2; i++) memory_free(self, &memory[i]);
  destroy_each(communicators, 2);
}

/* A window over nothing is none, and no other rank is asked: one rank alone may call, also with what NCCL refuses at once. */
static void nothing(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, window_room(self));
  ncclWindow_t window = NULL;
  if (self->rank == 1) {
    CODE(ncclCommWindowRegister(communicator, NULL, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), ncclSuccess);
    CODE(ncclCommWindowRegister(communicator, memory.at, 0, &window, NCCL_WIN_COLL_SYMMETRIC), ncclSuccess);
    CODE(ncclCommWindowRegister(communicator, memory.at + 8, 4096, &window, NCCL_WIN_COLL_SYMMETRIC), ncclInvalidArgument);
  }
  window = window_over(communicator, memory.at, memory.bytes);
  window_gather(self, communicator, &memory, 0, 700);
  meet(self);
  window_end(communicator, window);
  CODE(ncclCommWindowDeregister(communicator, NULL), ncclSuccess);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* The steady state of programs that register every buffer they get. */
static void thousand(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  size_t used = 0;
  for (uint64_t round = 0; round < 1000; round++) {
    struct memory memory = memory_alloc(self, NCCLS, window_room(self));
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    if (round % 100 == 0) window_gather(self, communicator, &memory, 0, 1000 + round);
    /* In one of three rounds the program does not end the window. The block is handed out again all the same, and its window
     * reused. */
    if (round % 3) window_end(communicator, window);
    memory_free(self, &memory);
    if (round == 10 || round == 999) {
      meet(self);
      if (round == 10) used = memory_used();
      else EQUAL(memory_used(), used);
      meet(self);
    }
  }
  if (!on_gpus()) {
    EQUAL(windows_made(communicator), 1);
    EQUAL(windows_live(communicator), 1);
  }
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  RUN_PART(again_and_again, self);
  RUN_PART(held, self);
  RUN_PART(two_communicators, self);
  RUN_PART(inside, self);
  RUN_PART(late_end, self);
  RUN_PART(grouped, self);
  RUN_PART(nothing, self);
}

static void cycles(struct rank* self) { RUN_PART(thousand, self); }

int main(int count, char** words) {
  begin("windows", 280);
  choose(count, words);
  int ranks = rank_count(4);
  if (count > 1 && is_wanted(count, words, "thousand")) {
    run_ranks("processes", PROCESSES, ranks, cycles, NULL);
    return finish();
  }
  windows_sections(ranks, all);
  return finish();
}
