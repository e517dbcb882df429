/* Holds that large all-gathers made only in groups are right. Cases: more buffers in one group than Windlass keeps registered;
 * one rank whose buffers cannot be registered, in many groups and for growing sizes. Work queued on a group's streams before its
 * end runs before its calls, later work after them, for each communicator separately. Ranks are processes, then threads, then
 * all one thread's; words as `choose` has them. */
#include "../support/gathers.h"
#include "../support/one_thread.h"

enum { MIB = 1 << 20 };

/* Slots of share_id, one for each communicator that lives at a time. */
enum { FIRST, SECOND };

static struct memory part_of(const struct memory* memory, size_t offset, size_t bytes) {
  return (struct memory){memory->at + offset, bytes, memory->origin};
}

/* A group is 34 gathers. One rank's buffers are in 68 allocations, in another order each time. All others' are in two
 * allocations, and these ranks have made their calls before. */
static void many(struct rank* self) {
  enum { CALLS = 34, FEW = 3 };
  ncclComm_t communicator = world(self, FIRST);
  size_t count = gather_count(self, 3), room = gather_room(self, count) + GUARD_BYTES;
  struct memory one_input = memory_alloc(self, NCCLS, CALLS * count), one_output = memory_alloc(self, MAPPED, CALLS * room);
  struct memory inputs[CALLS], outputs[CALLS];
  for (int i = 0; i < CALLS; i++) {
    inputs[i] = memory_alloc(self, i % 3 ? NCCLS : MAPPED, count);
    outputs[i] = memory_alloc(self, i % 2 ? NCCLS : MAPPED, room);
  }
  for (uint64_t round = 0; round < 3; round++) {
    bool has_many = self->rank == (int)round % self->ranks;
    struct gather gathers[CALLS];
    for (uint64_t i = 0; i < CALLS; i++) {
      uint64_t which = (i * (2 * round + 1) + 5 * round) % CALLS; /* 1, 3 and 5 have no common divisor with 34 */
      struct memory output = has_many ? outputs[which] : part_of(&one_output, which * room, room);
      const char* input = has_many ? inputs[i].at : one_input.at + i * count;
      gathers[i] = gather_into(self, input, &output, 0, count, 100 + round * CALLS + i);
      gather_prepare(&gathers[i]);
    }
    together(self);
    /* Enough calls that the ranks register, over two allocations on every rank. The outputs are overwritten later. */
    for (int group = 0; group < 4; group++) {
      NCCL(ncclGroupStart());
      for (uint64_t i = 0; i < FEW; i++) {
        struct memory output = part_of(&one_output, i * room, room);
        struct gather gather = gather_into(self, one_input.at, &output, 0, count, 0);
        gather_launch(&gather, communicator, self->stream);
      }
      NCCL(ncclGroupEnd());
    }
    wait_for(self->stream);
    together(self);
    NCCL(ncclGroupStart());
    if (has_many) meet(self);
    for (int i = 0; i < CALLS; i++) gather_launch(&gathers[i], communicator, self->stream);
    if (!has_many) meet(self);
    meet(self);
    NCCL(ncclGroupEnd());
    wait_for(self->stream);
    together(self);
    for (int i = 0; i < CALLS; i++) gather_verify(&gathers[i], self);
  }
  for (int i = 0; i < CALLS; i++) {
    memory_free(self, &inputs[i]);
    memory_free(self, &outputs[i]);
  }
  memory_free(self, &one_input);
  memory_free(self, &one_output);
  NCCL(ncclCommDestroy(communicator));
}

enum { PAIR = 2, GROUPS = 3 };

static void pair_run(struct rank* self, ncclComm_t communicator, const struct gather* pair) {
  NCCL(ncclGroupStart());
  for (int i = 0; i < PAIR; i++) gather_launch(&pair[i], communicator, self->stream);
  NCCL(ncclGroupEnd());
}

/* Whether some ranks may launch before others (may not on GPUs as threads: see `together`). */
static bool may_run_ahead(const struct rank* self) { return self->kind == PROCESSES || !on_gpus(); }

/* Groups of two gathers of 8, 16 and 32 MiB, twice. After some groups of each size one rank, another each time, has memory that
 * cannot be registered for three groups, which all others launch before it. */
static void ever_larger(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  size_t most = gather_count(self, 0) * 4, room = gather_room(self, most);
  struct memory good[PAIR], plain[PAIR];
  for (int i = 0; i < PAIR; i++) {
    good[i] = memory_alloc(self, i ? MAPPED : NCCLS, room + most);
    plain[i] = memory_alloc(self, PLAIN, room + most);
  }
  for (uint64_t round = 0; round < 6; round++) {
    bool is_bad = self->rank == (int)round % self->ranks;
    size_t count = gather_count(self, 0) << round % 3;
    struct gather pair[PAIR];
    for (uint64_t i = 0; i < PAIR; i++) {
      pair[i] = gather_into(self, good[i].at + room, &good[i], 0, count, 1000 + PAIR * round + i);
      gather_prepare(&pair[i]);
    }
    together(self);
    /* Enough calls that the ranks register again. */
    for (uint64_t group = 0; group < 3 + 2 * round; group++) pair_run(self, communicator, pair);
    wait_for(self->stream);
    together(self);
    for (int i = 0; i < PAIR; i++) gather_verify(&pair[i], self);
    for (uint64_t i = 0; i < PAIR; i++) {
      const struct memory* memory = is_bad ? &plain[i] : &good[i];
      pair[i] = gather_into(self, memory->at + room, memory, 0, count, 2000 + PAIR * round + i);
      gather_prepare(&pair[i]);
    }
    meet(self);
    if (is_bad && may_run_ahead(self)) meet(self);
    for (int group = 0; group < GROUPS; group++) pair_run(self, communicator, pair);
    if (!is_bad && may_run_ahead(self)) meet(self);
    wait_for(self->stream);
    together(self);
    for (int i = 0; i < PAIR; i++) gather_verify(&pair[i], self);
  }
  for (int i = 0; i < PAIR; i++) {
    memory_free(self, &good[i]);
    memory_free(self, &plain[i]);
  }
  NCCL(ncclCommDestroy(communicator));
}

static void copy(const char* to, const char* from, size_t bytes, CUstream stream) {
  CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from, bytes, stream));
}

/* Two gathers on two streams. The inputs are copied between the call and the group's end, each on the other's stream; after the
 * end each output is copied on the other stream. From the fifth round on one rank's memory cannot be registered. */
static void meanwhile(struct rank* self) {
  enum { STALE = 0x5c };
  ncclComm_t communicator = world(self, FIRST);
  CUstream streams[PAIR] = {self->stream, new_stream()};
  size_t count = gather_count(self, 0) * 2, room = gather_room(self, count), all = count * (size_t)self->ranks;
  struct memory good[PAIR], plain[PAIR], later[PAIR], kept[PAIR];
  for (int i = 0; i < PAIR; i++) {
    good[i] = memory_alloc(self, i ? NCCLS : MAPPED, room + count);
    plain[i] = memory_alloc(self, PLAIN, room + count);
    kept[i] = memory_alloc(self, PLAIN, count);
    later[i] = memory_alloc(self, PLAIN, room);
  }
  for (uint64_t round = 0; round < 12; round++) {
    bool is_bad = round > 3 && self->rank == (int)(round / 2) % self->ranks;
    struct gather pair[PAIR];
    for (uint64_t i = 0; i < PAIR; i++) {
      const struct memory* memory = is_bad ? &plain[i] : &good[i];
      pair[i] = gather_into(self, memory->at + room, memory, 0, count, 3000 + PAIR * round + i);
      gather_prepare(&pair[i]);
      copy(kept[i].at, pair[i].send, count, self->stream);
      wait_for(self->stream);
      device_fill((void*)pair[i].send, STALE, count);
      device_fill(later[i].at, STALE, room);
    }
    together(self);
    /* In odd rounds a group for each stream, else one group over both. */
    if (round % 2) {
      for (int i = 0; i < PAIR; i++) {
        NCCL(ncclGroupStart());
        gather_launch(&pair[i], communicator, streams[i]);
        copy(pair[i].send, kept[i].at, count, streams[i]);
        NCCL(ncclGroupEnd());
        copy(later[i].at + GUARD_BYTES, pair[i].receive, all, streams[i]);
      }
    } else {
      NCCL(ncclGroupStart());
      for (int i = 0; i < PAIR; i++) gather_launch(&pair[i], communicator, streams[i]);
      for (int i = 0; i < PAIR; i++) copy(pair[i].send, kept[i].at, count, streams[1 - i]);
      NCCL(ncclGroupEnd());
      for (int i = 0; i < PAIR; i++) copy(later[i].at + GUARD_BYTES, pair[i].receive, all, streams[1 - i]);
    }
    for (int i = 0; i < PAIR; i++) wait_for(streams[i]);
    together(self);
    for (int i = 0; i < PAIR; i++) {
      gather_verify(&pair[i], self);
      pair[i].receive = later[i].at + GUARD_BYTES;
      pair[i].guarded = false;
      gather_verify(&pair[i], self);
    }
  }
  for (int i = 0; i < PAIR; i++) {
    memory_free(self, &good[i]);
    memory_free(self, &plain[i]);
    memory_free(self, &kept[i]);
    memory_free(self, &later[i]);
  }
  CUDA(cuStreamDestroy_v2(streams[1]));
  NCCL(ncclCommDestroy(communicator));
}

/* Two communicators in a group, each on its own stream. The second's stream is held up until the first's call is over. From the
 * fifth round on one rank's memory for the first communicator cannot be registered. */
static void apart(struct rank* self) {
  ncclComm_t communicators[PAIR] = {world(self, FIRST), world(self, SECOND)};
  CUstream streams[PAIR] = {self->stream, new_stream()}, aside = new_stream();
  size_t count = gather_count(self, 0), room = gather_room(self, count);
  struct memory good[PAIR] = {memory_alloc(self, MAPPED, room), memory_alloc(self, NCCLS, room)}, plain = memory_alloc(self, PLAIN, room);
  void* word = device_alloc(sizeof(int));
  for (uint64_t round = 0; round < 12; round++) {
    bool is_bad = round > 3 && self->rank == (int)(round / 2) % self->ranks;
    struct gather pair[PAIR];
    for (uint64_t i = 0; i < PAIR; i++) {
      pair[i] = gather_into(self, NULL, is_bad && !i ? &plain : &good[i], 0, count, 4000 + PAIR * round + i);
      gather_prepare(&pair[i]);
    }
    device_fill(word, 0, sizeof(int));
    together(self);
    if (round > 3) CUDA(cuStreamWaitValue32_v2(streams[1], (CUdeviceptr)(uintptr_t)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    NCCL(ncclGroupStart());
    for (int i = 0; i < PAIR; i++) gather_launch(&pair[i], communicators[i], streams[i]);
    NCCL(ncclGroupEnd());
    wait_for(streams[0]);
    CUDA(cuMemsetD8Async((CUdeviceptr)(uintptr_t)word, 1, 1, aside));
    wait_for(streams[1]);
    together(self);
    for (int i = 0; i < PAIR; i++) gather_verify(&pair[i], self);
  }
  for (int i = 0; i < PAIR; i++) memory_free(self, &good[i]);
  memory_free(self, &plain);
  device_free(word);
  CUDA(cuStreamDestroy_v2(streams[1]));
  CUDA(cuStreamDestroy_v2(aside));
  destroy_each(communicators, PAIR);
}

static void all(struct rank* self) {
  RUN_PART(many, self);
  RUN_PART(ever_larger, self);
  RUN_PART(meanwhile, self);
  RUN_PART(apart, self);
}

/* The calls of a group are those of all ranks, each on its own device. From the fifth round on one rank's memory cannot be
 * registered. */
static void by_one_thread(int ranks) {
  struct one_thread all = one_thread_begin("one thread", ranks);
  ncclComm_t communicators[RANKS_MAX];
  struct rank selves[RANKS_MAX];
  struct memory good[RANKS_MAX], plain[RANKS_MAX];
  size_t count = gather_count(&all.all, 0), room = gather_room(&all.all, count);
  NCCL(ncclCommInitAll(communicators, ranks, NULL));
  for (int rank = 0; rank < ranks; rank++) {
    one_thread_use(&all, rank);
    selves[rank] = (struct rank){.rank = rank, .ranks = ranks, .kind = THREADS, .stream = all.streams[rank]};
    CUDA(cuDeviceGet(&selves[rank].device, rank));
    good[rank] = memory_alloc(&selves[rank], NCCLS, room);
    plain[rank] = memory_alloc(&selves[rank], PLAIN, room);
  }
  for (uint64_t round = 0; round < 12; round++) {
    struct gather gathers[RANKS_MAX];
    for (int rank = 0; rank < ranks; rank++) {
      bool is_bad = round > 3 && rank == (int)round % ranks;
      one_thread_use(&all, rank);
      gathers[rank] = gather_into(&selves[rank], NULL, is_bad ? &plain[rank] : &good[rank], 0, count, 5000 + round);
      gather_prepare(&gathers[rank]);
    }
    NCCL(ncclGroupStart());
    for (int rank = 0; rank < ranks; rank++) gather_launch(&gathers[rank], communicators[rank], all.streams[rank]);
    NCCL(ncclGroupEnd());
    for (int rank = 0; rank < ranks; rank++) {
      one_thread_use(&all, rank);
      wait_for(all.streams[rank]);
      gather_verify(&gathers[rank], &all.all);
    }
  }
  for (int rank = 0; rank < ranks; rank++) {
    one_thread_use(&all, rank);
    memory_free(&selves[rank], &good[rank]);
    memory_free(&selves[rank], &plain[rank]);
  }
  destroy_each(communicators, ranks);
  one_thread_end_streams(&all);
  one_thread_print(&all, "one-thread");
}

int main(int count, char** words) {
  begin("registered_groups", 280);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  if (is_section_chosen("one_thread")) by_one_thread(ranks);
  return finish();
}
