/* Holds that large all-gathers are right whatever memory each rank passes, and however it changes between calls. Cases: memory
 * that all ranks, some or none can register; several buffers of one allocation, at any alignment; on alternating streams, in
 * groups, in graphs, after mistakes of one rank. Ranks are processes, then threads; words as `choose` has them. */
#include "../support/gathers.h"

enum { MIB = 1 << 20 };

/* Slots of share_id, one for each communicator that lives at a time. */
enum { FIRST, SECOND };

static size_t odd(size_t number) { return 2 * number + 1; }

/* Memory for one gather: the output with its guards at offset 0, the input behind it. */
static struct memory pair_of(struct rank* self, enum origin origin) {
  return memory_alloc(self, origin, gather_room(self, gather_count(self, 65536)) + gather_count(self, 65536));
}

/* In place for even keys; other parameters vary with the key, too. */
static struct gather gather_in(struct rank* self, const struct memory* memory, uint64_t key) {
  size_t count = gather_count(self, odd(key * 131 % 30000));
  const char* send = key % 2 ? memory->at + gather_room(self, gather_count(self, 65536)) + key % 7 : NULL;
  return gather_into(self, send, memory, key * 97 % 4096, count, key);
}

/* Three calls in flight, four times. Every third call has its input in another allocation, every fourth is of floats. */
static void steady(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory outputs = memory_alloc(self, NCCLS, 36 * MIB), inputs = memory_alloc(self, NCCLS, 6 * MIB);
  for (uint64_t batch = 0; batch < 4; batch++) {
    struct gather gathers[3];
    for (uint64_t i = 0; i < 3; i++) {
      size_t offset = i * 10 * MIB + (batch == 2 ? 4 * odd(batch + i) : odd(batch * 2011 + i * 77));
      size_t count = gather_count(self, odd(batch * 5000 + i * 700));
      const char* send = i == 0 ? NULL : i == 1 ? outputs.at + 30 * MIB + 4 * batch : inputs.at + 4 * odd(batch);
      if (batch == 2) count = count / 4 * 4;
      gathers[i] = gather_into(self, send, &outputs, offset, count, 100 + batch * 3 + i);
      if (batch == 2) gathers[i].type = ncclFloat32, gathers[i].count /= 4;
      gather_prepare(&gathers[i]);
    }
    together(self);
    for (int i = 0; i < 3; i++) gather_launch(&gathers[i], communicator, self->stream);
    wait_for(self->stream);
    together(self);
    for (int i = 0; i < 3; i++) gather_verify(&gathers[i], self);
  }
  /* An output at the first byte of an allocation, and an input that ends at the last byte of one. */
  struct gather edge = {.send = inputs.at, .count = gather_count(self, 0), .type = ncclUint8, .key = 120,
                        .rank = self->rank, .ranks = self->ranks};
  edge.receive = outputs.at;
  gather_run(self, communicator, &edge);
  edge.receive = outputs.at + outputs.bytes - edge.count * (size_t)self->ranks;
  edge.send = inputs.at + inputs.bytes - edge.count;
  edge.key = 121;
  gather_run(self, communicator, &edge);
  memory_free(self, &outputs);
  memory_free(self, &inputs);
  NCCL(ncclCommDestroy(communicator));
}

/* At first rank 0's memory cannot be registered, then only the last rank's input cannot. */
static void mixed(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = pair_of(self, self->rank ? NCCLS : PLAIN);
  for (uint64_t round = 0; round < 8; round++) {
    struct gather gather = gather_in(self, &memory, 200 + round);
    gather_run(self, communicator, &gather);
  }
  struct memory input = memory_alloc(self, MAPPED, 5 * MIB);
  struct memory output = pair_of(self, self->rank == self->ranks - 1 ? PLAIN : MAPPED);
  for (uint64_t round = 0; round < 6; round++) {
    struct gather gather = gather_into(self, input.at + round, &output, round, gather_count(self, odd(round)), 210 + round);
    gather_run(self, communicator, &gather);
  }
  memory_free(self, &memory);
  memory_free(self, &input);
  memory_free(self, &output);
  NCCL(ncclCommDestroy(communicator));
}

/* All memory can be registered; then for eight calls not rank 1's; then all again, for enough calls that all ranks register
 * again. */
static void changes(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory good = pair_of(self, NCCLS), plain = pair_of(self, PLAIN);
  for (uint64_t round = 0; round < 56; round++) {
    bool is_bad = self->rank == 1 && round >= 8 && round < 16;
    struct gather gather = gather_in(self, is_bad ? &plain : &good, 300 + round);
    gather_run(self, communicator, &gather);
  }
  memory_free(self, &good);
  memory_free(self, &plain);
  NCCL(ncclCommDestroy(communicator));
}

/* Three streams in turn; each call's input is a block of the call before. From the second batch on rank 1's memory cannot be
 * registered. */
static void streams(struct rank* self) {
  enum { CALLS = 8, STREAMS = 3 };
  ncclComm_t communicator = world(self, FIRST);
  CUstream turns[STREAMS];
  CUevent done[STREAMS];
  for (int i = 0; i < STREAMS; i++) {
    turns[i] = new_stream();
    CUDA(cuEventCreate(&done[i], CU_EVENT_DISABLE_TIMING));
  }
  for (uint64_t batch = 0; batch < 3; batch++) {
    struct memory memory[STREAMS];
    struct gather gathers[STREAMS];
    for (uint64_t i = 0; i < STREAMS; i++) {
      memory[i] = pair_of(self, self->rank == 1 && batch ? PLAIN : MAPPED);
      gathers[i] = gather_in(self, &memory[i], 401);
      gathers[i].key = 400 + batch;
      gather_prepare(&gathers[i]);
    }
    together(self);
    for (int call = 0; call < CALLS; call++) {
      struct gather *now = &gathers[call % STREAMS], *before = &gathers[(call + STREAMS - 1) % STREAMS];
      CUstream stream = turns[call % STREAMS];
      now->from = call;
      if (call) {
        const char* block = before->receive + before->count * (size_t)((self->rank + 1) % self->ranks);
        CUDA(cuStreamWaitEvent(stream, done[(call - 1) % STREAMS], 0));
        CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)(uintptr_t)now->send, (CUdeviceptr)(uintptr_t)block, now->count, stream));
      }
      gather_launch(now, communicator, stream);
      CUDA(cuEventRecord(done[call % STREAMS], stream));
    }
    for (int i = 0; i < STREAMS; i++) wait_for(turns[i]);
    together(self);
    for (int i = 0; i < STREAMS; i++) {
      gather_verify(&gathers[i], self);
      memory_free(self, &memory[i]);
    }
    together(self);
  }
  for (int i = 0; i < STREAMS; i++) {
    CUDA(cuEventDestroy_v2(done[i]));
    CUDA(cuStreamDestroy_v2(turns[i]));
  }
  NCCL(ncclCommDestroy(communicator));
}

/* Groups of three calls on one communicator, then over two communicators and two streams. In every second group one rank's
 * middle buffer cannot be registered; in every third there is a small all-gather between. */
static void grouped(struct rank* self) {
  enum { CALLS = 3 };
  ncclComm_t first = world(self, FIRST), second = world(self, SECOND);
  CUstream other = new_stream();
  struct memory good[CALLS], plain = pair_of(self, PLAIN), small = memory_alloc(self, NCCLS, MIB);
  for (int i = 0; i < CALLS; i++) good[i] = pair_of(self, i == 1 ? MAPPED : NCCLS);
  for (uint64_t round = 0; round < 14; round++) {
    bool is_bad = round % 2 && round > 5 && self->rank == (int)round / 2 % self->ranks, has_small = round % 3 == 2;
    struct gather gathers[CALLS], between = gather_into(self, NULL, &small, 0, 999, 590 + round);
    for (uint64_t i = 0; i < CALLS; i++) {
      gathers[i] = gather_in(self, is_bad && i == 1 ? &plain : &good[i], 500 + round * CALLS + i);
      gather_prepare(&gathers[i]);
    }
    gather_prepare(&between);
    together(self);
    NCCL(ncclGroupStart());
    for (int i = 0; i < CALLS; i++) {
      bool to_other = round >= 7 && i == 1;
      gather_launch(&gathers[i], to_other ? second : first, to_other ? other : self->stream);
      if (has_small && i == 0) gather_launch(&between, first, self->stream);
    }
    NCCL(ncclGroupEnd());
    wait_for(self->stream);
    wait_for(other);
    together(self);
    for (int i = 0; i < CALLS; i++) gather_verify(&gathers[i], self);
    if (has_small) gather_verify(&between, self);
  }
  for (int i = 0; i < CALLS; i++) memory_free(self, &good[i]);
  memory_free(self, &plain);
  memory_free(self, &small);
  CUDA(cuStreamDestroy_v2(other));
  destroy_each((ncclComm_t[]){first, second}, 2);
}

/* A graph of two gathers, launched between eager ones. NCCL registers buffers of graphs itself, so all ranks have the same kind
 * of memory. */
static void captured(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory[3] = {pair_of(self, NCCLS), pair_of(self, NCCLS), pair_of(self, NCCLS)};
  struct gather eager = gather_in(self, &memory[2], 600), inside[2];
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  for (; eager.key < 605; eager.key++) gather_run(self, communicator, &eager);
  for (int i = 0; i < 2; i++) inside[i] = gather_in(self, &memory[i], 610 + (uint64_t)i);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  for (int i = 0; i < 2; i++) gather_launch(&inside[i], communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (uint64_t replay = 0; replay < 4; replay++) {
    for (int i = 0; i < 2; i++) {
      inside[i].key = 620 + replay * 2 + (uint64_t)i;
      gather_prepare(&inside[i]);
    }
    CUDA(cuGraphLaunch(executable, self->stream));
    wait_for(self->stream);
    for (int i = 0; i < 2; i++) gather_verify(&inside[i], self);
    /* An eager call also uses the graph's buffers. */
    inside[replay % 2].key = eager.key = 630 + replay;
    gather_run(self, communicator, &inside[replay % 2]);
    gather_run(self, communicator, &eager);
  }
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  eager.key = 640;
  gather_run(self, communicator, &eager);
  for (int i = 0; i < 3; i++) memory_free(self, &memory[i]);
  NCCL(ncclCommDestroy(communicator));
}

/* Mistakes of one rank alone: no other rank sees them, and neither a call nor a group that fails counts as one of the
 * all-gathers that ranks agree on. */
static void err(struct rank* self, ncclComm_t communicator, const struct gather* gather) {
  cudaStream_t stream = as_cuda(self->stream);
  const ncclDataType_t no_type = (ncclDataType_t)99;
  CODE(ncclAllGather(gather->send, gather->receive, gather->count, no_type, communicator, stream), ncclInvalidArgument);
  CODE(ncclAllGather(gather->send, gather->receive, gather->count, ncclUint8, NULL, stream), ncclInvalidArgument);
  /* NCCL does not check pointers unless asked to. */
  if (!on_gpus()) {
    CODE(ncclAllGather(gather->send, NULL, gather->count, ncclUint8, communicator, stream), ncclInvalidArgument);
    CODE(ncclAllGather(NULL, gather->receive, gather->count, ncclUint8, communicator, stream), ncclInvalidArgument);
  }
  for (int order = 0; order < 2; order++) {
    NCCL(ncclGroupStart());
    if (order) gather_launch(gather, communicator, self->stream);
    CODE(ncclAllGather(gather->send, gather->receive, gather->count, no_type, communicator, stream), ncclInvalidArgument);
    if (!order) gather_launch(gather, communicator, self->stream);
    CODE(ncclGroupEnd(), ncclInvalidArgument);
    /* The error belongs to that group alone. */
    NCCL(ncclGroupStart());
    NCCL(ncclGroupEnd());
  }
  wait_for(self->stream);
  gather_untouched(gather);
}

static void mistakes(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = pair_of(self, NCCLS);
  for (uint64_t round = 0; round < 16; round++) {
    struct gather gather = gather_in(self, &memory, 700 + round);
    gather_prepare(&gather);
    if (self->rank == (int)round / 2 % self->ranks && round % 2) err(self, communicator, &gather);
    gather_run(self, communicator, &gather);
  }
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* More allocations in turn than Windlass keeps registered, in a random order that is the same on all ranks. */
static void many(struct rank* self) {
  enum { ALLOCATIONS = 100 };
  ncclComm_t communicator = world(self, FIRST);
  struct random random = random_from(program_seed(20261122));
  struct memory inputs[ALLOCATIONS], output = pair_of(self, NCCLS);
  size_t count = gather_count(self, 0);
  for (int i = 0; i < ALLOCATIONS; i++) inputs[i] = memory_alloc(self, i % 3 ? NCCLS : MAPPED, count);
  for (uint64_t call = 0; call < ALLOCATIONS + 40; call++) {
    /* Each allocation once, then random ones. */
    uint64_t which = call < ALLOCATIONS ? call * 37 % ALLOCATIONS : random_below(&random, ALLOCATIONS);
    struct gather gather = gather_into(self, inputs[which].at, &output, call % 64, count, 800 + call);
    gather_run(self, communicator, &gather);
  }
  for (int i = 0; i < ALLOCATIONS; i++) memory_free(self, &inputs[i]);
  memory_free(self, &output);
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  RUN_PART(steady, self);
  RUN_PART(mixed, self);
  RUN_PART(changes, self);
  RUN_PART(streams, self);
  RUN_PART(grouped, self);
  if (self->kind == PROCESSES) RUN_PART(captured, self);
  RUN_PART(mistakes, self);
  RUN_PART(many, self);
}

int main(int count, char** words) {
  begin("registered", 280);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
