/* Holds that a communicator gives its memory back (ncclCommSuspend) and takes it again at the same addresses (ncclCommResume): graphs that
 * were captured before replay the same bytes afterwards, alone and between eager calls, whatever sizes and rings. Others stay awake. Also the
 * codes, groups, what a sleeping communicator refuses, and that nothing is left behind. */
#include "../support/collective.h"
#include "../support/messages.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PARCELS_MAX = 64, MIB = 1 << 20 };

struct graph { CUgraph graph; CUgraphExec executable; };

static size_t free_bytes(void) {
  size_t free = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free, &total));
  return free;
}

static int entries(const char* folder) {
  int count = 0;
  DIR* open = opendir(folder);
  while (readdir(open)) count++;
  closedir(open);
  return count;
}

static uint64_t stat_of(ncclComm_t communicator, ncclCommMemStat_t stat) {
  uint64_t value = 99;
  NCCL(ncclCommMemStats(communicator, stat, &value));
  return value;
}

/* Messages around the ring in both directions: one of `bytes`, small ones, and one to itself. */
static int wheel(int ranks, struct parcel* parcels, size_t bytes) {
  int count = 0;
  for (int rank = 0; rank < ranks; rank++) {
    int next = (rank + 1) % ranks;
    uint64_t key = 1000 * (uint64_t)(rank + 1);
    parcels[count++] = (struct parcel){.from = rank, .to = next, .bytes = bytes, .type = ncclUint8, .key = key};
    parcels[count++] = (struct parcel){.from = next, .to = rank, .bytes = 77, .type = ncclUint8, .key = key + 1};
    parcels[count++] = (struct parcel){.from = rank, .to = rank, .bytes = 100, .type = ncclUint8, .key = key + 2};
  }
  return count;
}

/* Some collectives and a group of messages, on one stream. */
enum { TRANSFERS = 3 };
struct work {
  struct transfer transfers[TRANSFERS];
  struct parcel parcels[PARCELS_MAX];
  struct exchange exchange;
};

static void prepare(struct work* work, const struct rank* self, size_t bytes) {
  const enum collective which[TRANSFERS] = {ALL_REDUCE, ALL_GATHER, BROADCAST};
  for (int i = 0; i < TRANSFERS; i++) {
    work->transfers[i] = (struct transfer){.which = which[i], .type = ncclInt32, .op = ncclSum, .count = bytes / 64 + 3,
                                           .rank = self->rank, .ranks = self->ranks, .key = 7 + (uint64_t)i};
    transfer_prepare(&work->transfers[i]);
  }
  work->exchange = exchange_prepare(self->rank, work->parcels, wheel(self->ranks, work->parcels, bytes));
}

static void issue(struct work* work, ncclComm_t communicator, CUstream stream) {
  for (int i = 0; i < TRANSFERS; i++) transfer_launch(&work->transfers[i], communicator, stream);
  NCCL(ncclGroupStart());
  exchange_issue(&work->exchange, communicator, stream);
  NCCL(ncclGroupEnd());
}

static void renew(struct work* work, uint64_t more) {
  for (int i = 0; i < TRANSFERS; i++) transfer_clear(&work->transfers[i]);
  exchange_renew(&work->exchange, more);
}

static void verify(struct work* work, struct rank* self) {
  wait_for(self->stream);
  for (int i = 0; i < TRANSFERS; i++) transfer_verify(&work->transfers[i], self);
  exchange_verify(&work->exchange, self);
}

static void release(struct work* work) {
  for (int i = 0; i < TRANSFERS; i++) transfer_release(&work->transfers[i]);
  exchange_release(&work->exchange);
}

static void eager(struct rank* self, struct work* work, ncclComm_t communicator, uint64_t more) {
  renew(work, more);
  issue(work, communicator, self->stream);
  verify(work, self);
}

static struct graph capture(struct rank* self, struct work* work, ncclComm_t communicator) {
  struct graph captured = {NULL, NULL};
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  issue(work, communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &captured.graph));
  CUDA(cuGraphInstantiateWithFlags(&captured.executable, captured.graph, 0));
  return captured;
}

static void replay(struct rank* self, struct graph* captured, struct work* work, uint64_t more) {
  renew(work, more);
  CUDA(cuGraphLaunch(captured->executable, self->stream));
  verify(work, self);
}

static void end_graph(struct graph* captured) {
  CUDA(cuGraphExecDestroy(captured->executable));
  CUDA(cuGraphDestroy(captured->graph));
}

/* What the communicator takes before its rings grow. */
static uint64_t first_bytes;

static void nap(ncclComm_t communicator) {
  NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
  NCCL(ncclCommResume(communicator));
}

/* A graph captured before replays after each of some sleeps, with eager calls between, by small rings and by grown ones. */
static void graphs_stay_valid(struct rank* self, ncclComm_t communicator) {
  const size_t sizes[] = {100, 70001, on_gpus() ? 48 * MIB : 3 * MIB};
  for (int size = 0; size < 3; size++) {
    struct work one, other;
    prepare(&one, self, sizes[size]);
    prepare(&other, self, 3000);
    struct graph captured = capture(self, &one, communicator);
    for (uint64_t round = 0; round < 6; round++) {
      replay(self, &captured, &one, 2 * round);
      if (round % 2) eager(self, &other, communicator, round);
      replay(self, &captured, &one, 2 * round + 1);
      nap(communicator);
    }
    eager(self, &other, communicator, 20);
    replay(self, &captured, &one, 21);
    end_graph(&captured);
    release(&one);
    release(&other);
  }
}

/* Rings grow again after a sleep. Even ranks send more than a first ring holds, and odd ranks receive only once that is done: so the rings
 * have grown. Then receives wait for messages that come later, at places where other bytes came before the sleep. */
static void rings_grow_again(struct rank* self, ncclComm_t communicator) {
  enum { MESSAGES = 8, FIRST = 5, BYTES = 3 * MIB / 2 };
  bool sends = self->rank % 2 == 0, takes_part = !sends || self->rank + 1 < self->ranks;
  int peer = sends ? self->rank + 1 : self->rank - 1;
  struct message messages[MESSAGES];
  for (uint64_t round = 0; round < 3; round++) {
    for (int i = 0; takes_part && i < MESSAGES; i++) {
      uint64_t key = 1000 * round + 10 * (uint64_t)i + (uint64_t)self->rank / 2;
      messages[i] = (sends ? message_to_send : message_to_receive)(key, BYTES, 0);
    }
    for (int i = 0; takes_part && i < MESSAGES; i++) {
      if (i == FIRST && sends) usleep(200000);
      if (i == 0 && !sends) meet(self);
      (sends ? message_send : message_receive)(&messages[i], peer, communicator, self->stream);
      if (i == FIRST - 1 && sends) wait_for(self->stream), meet(self);
    }
    if (!takes_part) meet(self);
    wait_for(self->stream);
    for (int i = 0; takes_part && i < MESSAGES; i++) {
      if (!sends) message_verify(&messages[i], self);
      message_release(&messages[i]);
    }
    if (!sends) CHECK(stat_of(communicator, ncclStatGpuMemSuspend) > first_bytes);
    nap(communicator);
    EQUAL(stat_of(communicator, ncclStatGpuMemSuspend), first_bytes);
  }
}

/* While one sleeps the device has its memory, and another communicator goes on. */
static void memory_is_free(struct rank* self, ncclComm_t communicator) {
  ncclComm_t other = world(self, 1);
  struct work work;
  prepare(&work, self, 5000);
  eager(self, &work, communicator, 1);
  eager(self, &work, other, 2);
  meet(self);
  size_t awake = free_bytes();
  EQUAL(stat_of(communicator, ncclStatGpuMemSuspended), 0);
  meet(self);
  NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
  EQUAL(stat_of(communicator, ncclStatGpuMemSuspended), 1);
  EQUAL(stat_of(other, ncclStatGpuMemSuspended), 0);
  uint64_t ours = stat_of(communicator, ncclStatGpuMemSuspend);
  CHECK(ours >= 2 * MIB && stat_of(communicator, ncclStatGpuMemTotal) >= ours);
  meet(self);
  if (!on_gpus()) CHECK(free_bytes() >= awake + ours);
  eager(self, &work, other, 3);
  meet(self);
  NCCL(ncclCommResume(communicator));
  eager(self, &work, communicator, 4);
  meet(self);
  if (!on_gpus()) EQUAL(free_bytes(), awake);
  meet(self);
  NCCL(ncclCommDestroy(other));
  release(&work);
}

/* NCCL's codes, and what a sleeping communicator answers. */
static void codes(struct rank* self, ncclComm_t communicator) {
  struct work work;
  prepare(&work, self, 100);
  uint64_t value = 0;
  int number = 0;
  ncclResult_t state = ncclSuccess;
  ncclComm_t child = NULL;
  CODE(ncclCommSuspend(communicator, 0), ncclSuccess);
  CODE(ncclCommSuspend(communicator, 2), ncclSuccess);
  CODE(ncclCommResume(communicator), ncclInvalidUsage);
  CODE(ncclCommSuspend(NULL, NCCL_SUSPEND_MEM), ncclInvalidArgument);
  CODE(ncclCommResume(NULL), ncclInvalidArgument);
  CODE(ncclCommMemStats(communicator, ncclStatGpuMemTotal, NULL), ncclInvalidArgument);
  CODE(ncclCommMemStats(communicator, (ncclCommMemStat_t)4, &value), ncclInvalidArgument);
  eager(self, &work, communicator, 1);
  /* What support/newer_nccl.c says of NCCL's part. */
  bool has_part = getenv("CTESTS_NCCL_SUSPENDS") != NULL;
  uint64_t nccls = stat_of(communicator, ncclStatGpuMemPersist);
  NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
  EQUAL(stat_of(communicator, ncclStatGpuMemPersist), has_part ? nccls + 11 : 0);
  CODE(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM), ncclInvalidUsage);
  void* buffer = device_alloc(64);
  CODE(ncclAllReduce(buffer, buffer, 1, ncclInt32, ncclSum, communicator, as_cuda(self->stream)), ncclInvalidUsage);
  CODE(ncclSend(buffer, 1, ncclInt32, 0, communicator, as_cuda(self->stream)), ncclInvalidUsage);
  CODE(ncclCommSplit(communicator, 0, 0, &child, NULL), ncclInvalidUsage);
  CODE(ncclCommCount(communicator, &number), ncclSuccess);
  EQUAL(number, self->ranks);
  CODE(ncclCommUserRank(communicator, &number), ncclSuccess);
  CODE(ncclCommGetAsyncError(communicator, &state), ncclSuccess);
  EQUAL(state, ncclSuccess);
  NCCL(ncclCommResume(communicator));
  EQUAL(stat_of(communicator, ncclStatGpuMemPersist), has_part ? nccls + 10 : 0);
  CODE(ncclCommResume(communicator), ncclInvalidUsage);
  eager(self, &work, communicator, 2);
  device_free(buffer);
  release(&work);
}

/* In a group: several communicators at once, a resume before the group's calls, and a suspend after them. */
static void groups(struct rank* self, ncclComm_t communicator) {
  ncclComm_t both[2] = {communicator, world(self, 2)};
  struct work work;
  prepare(&work, self, 9000);
  void* buffer = device_alloc(64);
  for (uint64_t round = 0; round < 3; round++) {
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) NCCL(ncclCommSuspend(both[(i + self->rank) % 2], NCCL_SUSPEND_MEM));
    NCCL(ncclGroupEnd());
    for (int i = 0; i < 2; i++) EQUAL(stat_of(both[i], ncclStatGpuMemSuspended), 1);
    /* A call on a pending suspend is refused, and the group with it: nothing of it runs. */
    renew(&work, round);
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) NCCL(ncclCommResume(both[(i + self->rank) % 2]));
    for (int i = 0; i < TRANSFERS; i++) transfer_launch(&work.transfers[i], communicator, self->stream);
    exchange_issue(&work.exchange, communicator, self->stream);
    NCCL(ncclGroupEnd());
    verify(&work, self);
    NCCL(ncclGroupStart());
    NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
    CODE(ncclAllReduce(buffer, buffer, 1, ncclInt32, ncclSum, communicator, as_cuda(self->stream)), ncclInvalidUsage);
    CODE(ncclGroupEnd(), ncclInvalidUsage);
    EQUAL(stat_of(communicator, ncclStatGpuMemSuspended), 0);
    eager(self, &work, communicator, 10 + round);
    renew(&work, 20 + round);
    NCCL(ncclGroupStart());
    for (int i = 0; i < TRANSFERS; i++) transfer_launch(&work.transfers[i], communicator, self->stream);
    exchange_issue(&work.exchange, communicator, self->stream);
    NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
    NCCL(ncclGroupEnd());
    verify(&work, self);
    NCCL(ncclCommResume(communicator));
  }
  device_free(buffer);
  NCCL(ncclCommDestroy(both[1]));
  release(&work);
}

static void taken(ncclComm_t communicator, const char* function, ncclResult_t answer) {
  count_calls(function, 1);
  EQUAL(answer, ncclInProgress);
  EQUAL(settled(communicator, answer), ncclSuccess);
}

/* With blocking = 0 both calls return at once. */
static void without_waiting(struct rank* self) {
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 0;
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 5, 0);
  struct transfer one = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 3011, .rank = self->rank,
                         .ranks = self->ranks, .key = 9};
  ncclResult_t answer = ncclCommInitRankConfig(&communicator, self->ranks, id, self->rank, &configuration);
  count_calls("ncclCommInitRankConfig", 1);
  EQUAL(settled(communicator, answer), ncclSuccess);
  transfer_prepare(&one);
  for (int round = 0; round < 3; round++) {
    answer = ncclAllReduce(one.send, one.receive, one.count, one.type, one.op, communicator, as_cuda(self->stream));
    count_calls("ncclAllReduce", 1);
    EQUAL(settled(communicator, answer), ncclSuccess);
    wait_for(self->stream);
    transfer_verify(&one, self);
    transfer_clear(&one);
    taken(communicator, "ncclCommSuspend", ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
    EQUAL(stat_of(communicator, ncclStatGpuMemSuspended), 1);
    CODE(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM), ncclInvalidUsage);
    CODE(ncclAllReduce(one.send, one.receive, 1, one.type, one.op, communicator, as_cuda(self->stream)), ncclInvalidUsage);
    taken(communicator, "ncclCommResume", ncclCommResume(communicator));
    EQUAL(stat_of(communicator, ncclStatGpuMemSuspended), 0);
  }
  transfer_release(&one);
  answer = ncclCommFinalize(communicator);
  count_calls("ncclCommFinalize", 1);
  EQUAL(settled(communicator, answer), ncclSuccess);
  NCCL(ncclCommDestroy(communicator));
}

/* Random sizes, eager and by graphs, and sleeps at random points. */
static void random_points(struct rank* self, ncclComm_t communicator) {
  enum { WORKS = 4 };
  struct work works[WORKS];
  struct graph graphs[WORKS];
  struct random random = random_from(program_seed(12));
  for (int i = 0; i < WORKS; i++) {
    prepare(&works[i], self, 1 + random_below(&random, i % 2 ? 3 * MIB : 40000));
    graphs[i] = capture(self, &works[i], communicator);
  }
  for (uint64_t step = 0; step < 60; step++) {
    uint64_t which = random_below(&random, WORKS);
    switch (random_below(&random, 4)) {
      case 0: nap(communicator); break;
      case 1: eager(self, &works[which], communicator, step); break;
      default: replay(self, &graphs[which], &works[which], step);
    }
  }
  for (int i = 0; i < WORKS; i++) {
    end_graph(&graphs[i]);
    release(&works[i]);
  }
}

/* Nothing is left of 200 sleeps. */
static void many_sleeps(struct rank* self, ncclComm_t communicator) {
  struct work work;
  prepare(&work, self, 2000);
  struct graph captured = capture(self, &work, communicator);
  int descriptors = 0, threads = 0;
  size_t free = 0;
  for (uint64_t round = 0; round < 200; round++) {
    nap(communicator);
    if (round % 20 == 0) replay(self, &captured, &work, round);
    if (round != 10 && round != 199) continue;
    meet(self);
    usleep(300000); /* threads of the calls end */
    if (round == 10) {
      descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task"), free = free_bytes();
    } else if (self->kind == PROCESSES) {
      EQUAL(entries("/proc/self/fd"), descriptors);
      EQUAL(entries("/proc/self/task"), threads);
      CHECK(free_bytes() + 2 * MIB >= free);
    }
    meet(self);
  }
  end_graph(&captured);
  release(&work);
}

/* Ends while asleep, on some ranks by an abort. */
static void ends_asleep(struct rank* self) {
  for (int aborts = 0; aborts < 2; aborts++) {
    ncclComm_t communicator = world(self, 3 + aborts);
    struct work work;
    prepare(&work, self, 5000);
    eager(self, &work, communicator, 1);
    NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
    if (aborts && self->rank == 0) NCCL(ncclCommAbort(communicator));
    else NCCL(ncclCommDestroy(communicator));
    release(&work);
    meet(self);
  }
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  first_bytes = stat_of(communicator, ncclStatGpuMemSuspend);
  meet(self);
  RUN_PART(graphs_stay_valid, self, communicator);
  RUN_PART(rings_grow_again, self, communicator);
  RUN_PART(memory_is_free, self, communicator);
  RUN_PART(codes, self, communicator);
  RUN_PART(groups, self, communicator);
  RUN_PART(random_points, self, communicator);
  RUN_PART(many_sleeps, self, communicator);
  NCCL(ncclCommDestroy(communicator));
  RUN_PART(ends_asleep, self);
  if (self->kind == PROCESSES) RUN_PART(without_waiting, self);
}

int main(int count, char** arguments) {
  choose(count, arguments);
  begin("sleep", 280);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, 2, all, NULL);
  return finish();
}
