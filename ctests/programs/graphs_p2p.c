/* Holds that sends and receives captured into graphs move new bytes at every replay. Cases: alone and in groups, hundreds of
 * them, over forked streams, in every capture mode, two graphs in turn, on other streams, with eager calls between. A
 * communicator may be destroyed before the graphs that captured its calls. */
#include "../support/messages.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PARCELS_MAX = 1024 };

struct graph { CUgraph graph; CUgraphExec executable; };

/* How the calls of a capture are made: each alone, or all in one group. */
enum grouping { ALONE, GROUPED };

static void issue(const struct exchange* exchange, ncclComm_t communicator, CUstream stream, enum grouping grouping) {
  if (grouping == GROUPED) NCCL(ncclGroupStart());
  exchange_issue(exchange, communicator, stream);
  if (grouping == GROUPED) NCCL(ncclGroupEnd());
}

static struct graph end_capture(CUstream stream) {
  struct graph captured = {NULL, NULL};
  CUDA(cuStreamEndCapture(stream, &captured.graph));
  CUDA(cuGraphInstantiateWithFlags(&captured.executable, captured.graph, 0));
  return captured;
}

static struct graph capture(const struct exchange* exchange, ncclComm_t communicator, CUstream stream, int mode,
                            enum grouping grouping) {
  CUDA(cuStreamBeginCapture_v2(stream, mode));
  issue(exchange, communicator, stream, grouping);
  return end_capture(stream);
}

static void destroy(struct graph* captured) {
  CUDA(cuGraphExecDestroy(captured->executable));
  CUDA(cuGraphDestroy(captured->graph));
}

static void replay(struct rank* self, struct graph* captured, struct exchange* exchange, uint64_t more, CUstream stream) {
  exchange_renew(exchange, more);
  CUDA(cuGraphLaunch(captured->executable, stream));
  wait_for(stream);
  exchange_verify(exchange, self);
}

static void eager(struct rank* self, struct exchange* exchange, ncclComm_t communicator, uint64_t more,
                  enum grouping grouping) {
  exchange_renew(exchange, more);
  issue(exchange, communicator, self->stream, grouping);
  wait_for(self->stream);
  exchange_verify(exchange, self);
}

static struct parcel parcel(int from, int to, size_t bytes, uint64_t key) {
  return (struct parcel){.from = from, .to = to, .bytes = bytes, .type = ncclUint8, .key = key * 1000};
}

/* Neighbouring ranks in pairs: a message each way, one after the other. */
static int couples(int ranks, struct parcel* parcels, size_t bytes) {
  int count = 0;
  for (int rank = 0; rank + 1 < ranks; rank += 2) {
    parcels[count++] = parcel(rank, rank + 1, bytes, 1);
    parcels[count++] = parcel(rank + 1, rank, bytes + 7, 2);
  }
  return count;
}

/* Around the ring in both directions, small and large messages, and from each rank to itself. */
static int wheel(int ranks, struct parcel* parcels, size_t bytes) {
  int count = 0;
  for (int rank = 0; rank < ranks; rank++) {
    parcels[count++] = parcel(rank, (rank + 1) % ranks, bytes, 3 + (uint64_t)rank);
    parcels[count++] = parcel((rank + 1) % ranks, rank, 77, 13 + (uint64_t)rank);
    parcels[count++] = parcel(rank, rank, bytes / 2, 23 + (uint64_t)rank);
  }
  return count;
}

static size_t large(void) { return (on_gpus() ? (size_t)40 : (size_t)2) << 20; }

/* A capture that comes before any eager call of the communicator but those in which NCCL makes its connections. */
static void alone_and_in_groups(struct rank* self, ncclComm_t communicator) {
  struct parcel parcels[PARCELS_MAX];
  const size_t sizes[] = {8, 100003, large()};
  for (int which = 0; which < 6; which++) {
    enum grouping grouping = which % 2 ? GROUPED : ALONE;
    int count = (grouping == ALONE ? couples : wheel)(self->ranks, parcels, sizes[which / 2]);
    struct exchange exchange = exchange_prepare(self->rank, parcels, count);
    struct graph captured = capture(&exchange, communicator, self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, grouping);
    exchange_untouched(&exchange);
    for (uint64_t round = 0; round < 3; round++) replay(self, &captured, &exchange, round, self->stream);
    /* Several replays in flight repeat the same work. */
    exchange_renew(&exchange, 9);
    for (int i = 0; i < 4; i++) CUDA(cuGraphLaunch(captured.executable, self->stream));
    wait_for(self->stream);
    exchange_verify(&exchange, self);
    destroy(&captured);
    eager(self, &exchange, communicator, 10, grouping);
    exchange_release(&exchange);
  }
}

static void all_modes(struct rank* self, ncclComm_t communicator) {
  const int modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED};
  struct parcel parcels[PARCELS_MAX];
  int count = wheel(self->ranks, parcels, 50000);
  struct exchange exchange = exchange_prepare(self->rank, parcels, count);
  for (uint64_t mode = 0; mode < 3; mode++) {
    struct graph captured = capture(&exchange, communicator, self->stream, modes[mode], GROUPED);
    for (uint64_t round = 0; round < 2; round++) replay(self, &captured, &exchange, mode * 2 + round, self->stream);
    destroy(&captured);
  }
  exchange_release(&exchange);
}

/* Two graphs in turn on three streams, with eager calls between them. */
static void two_graphs(struct rank* self, ncclComm_t communicator) {
  struct parcel small[PARCELS_MAX], big[PARCELS_MAX], others[PARCELS_MAX];
  struct exchange exchanges[2] = {exchange_prepare(self->rank, small, wheel(self->ranks, small, 333)),
                                  exchange_prepare(self->rank, big, wheel(self->ranks, big, large() / 2))};
  struct exchange between = exchange_prepare(self->rank, others, couples(self->ranks, others, 70001));
  struct graph graphs[2];
  CUstream streams[3] = {self->stream, new_stream(), new_stream()};
  for (int i = 0; i < 2; i++) {
    graphs[i] = capture(&exchanges[i], communicator, streams[i], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, GROUPED);
  }
  const int turns[] = {0, 0, 1, 0, 1, 1, 0};
  for (int turn = 0; turn < 7; turn++) {
    int which = turns[turn];
    replay(self, &graphs[which], &exchanges[which], (uint64_t)turn, streams[turn % 3]);
    if (turn % 2) eager(self, &between, communicator, (uint64_t)turn, ALONE);
  }
  for (int i = 0; i < 2; i++) {
    destroy(&graphs[i]);
    exchange_release(&exchanges[i]);
    CUDA(cuStreamDestroy_v2(streams[i + 1]));
  }
  exchange_release(&between);
}

/* Eager calls right before and right after a replay, with no wait between. */
static void eager_beside(struct rank* self, ncclComm_t communicator) {
  struct parcel parcels[PARCELS_MAX], others[PARCELS_MAX], more[PARCELS_MAX];
  struct exchange exchange = exchange_prepare(self->rank, parcels, wheel(self->ranks, parcels, 200003));
  struct exchange before = exchange_prepare(self->rank, others, couples(self->ranks, others, 90001));
  struct exchange behind = exchange_prepare(self->rank, more, wheel(self->ranks, more, 1001));
  struct graph captured = capture(&exchange, communicator, self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, GROUPED);
  for (uint64_t round = 0; round < 4; round++) {
    exchange_renew(&exchange, round);
    exchange_renew(&before, round);
    exchange_renew(&behind, round);
    issue(&before, communicator, self->stream, ALONE);
    CUDA(cuGraphLaunch(captured.executable, self->stream));
    issue(&behind, communicator, self->stream, GROUPED);
    wait_for(self->stream);
    exchange_verify(&before, self);
    exchange_verify(&exchange, self);
    exchange_verify(&behind, self);
  }
  destroy(&captured);
  exchange_release(&exchange);
  exchange_release(&before);
  exchange_release(&behind);
}

/* More operations than a launch holds, so that the graph must keep a list of them. Two such graphs live at once. */
static void hundreds(struct rank* self, ncclComm_t communicator) {
  struct parcel parcels[2][PARCELS_MAX];
  struct exchange exchanges[2];
  struct graph graphs[2];
  for (int which = 0; which < 2; which++) {
    struct random random = random_from(70 + (uint64_t)which);
    for (int i = 0; i < PARCELS_MAX; i++) {
      int from = i % self->ranks, distance = 1 + (int)random_below(&random, (uint64_t)self->ranks - 1);
      parcels[which][i] = parcel(from, (from + distance) % self->ranks, random_below(&random, 2000), (uint64_t)i);
    }
    exchanges[which] = exchange_prepare(self->rank, parcels[which], PARCELS_MAX);
    graphs[which] = capture(&exchanges[which], communicator, self->stream, CU_STREAM_CAPTURE_MODE_RELAXED, GROUPED);
  }
  for (uint64_t round = 0; round < 2; round++) {
    for (int which = 0; which < 2; which++) replay(self, &graphs[which], &exchanges[which], round, self->stream);
  }
  for (int which = 0; which < 2; which++) {
    destroy(&graphs[which]);
    exchange_release(&exchanges[which]);
  }
}

/* Groups on two branches of one capture, with no edge of the application's between the branches: NCCL orders them. */
static void forked(struct rank* self, ncclComm_t communicator) {
  struct parcel first[PARCELS_MAX], second[PARCELS_MAX];
  struct exchange one = exchange_prepare(self->rank, first, wheel(self->ranks, first, 150001));
  struct exchange two = exchange_prepare(self->rank, second, wheel(self->ranks, second, 30011));
  CUstream branch = new_stream();
  CUevent parts, joins;
  CUDA(cuEventCreate(&parts, CU_EVENT_DISABLE_TIMING));
  CUDA(cuEventCreate(&joins, CU_EVENT_DISABLE_TIMING));
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CUDA(cuEventRecord(parts, self->stream));
  CUDA(cuStreamWaitEvent(branch, parts, 0));
  issue(&one, communicator, self->stream, GROUPED);
  issue(&two, communicator, branch, GROUPED);
  CUDA(cuEventRecord(joins, branch));
  CUDA(cuStreamWaitEvent(self->stream, joins, 0));
  struct graph captured = end_capture(self->stream);
  for (uint64_t round = 0; round < 3; round++) {
    exchange_renew(&two, round);
    replay(self, &captured, &one, round, self->stream);
    exchange_verify(&two, self);
  }
  destroy(&captured);
  CUDA(cuEventDestroy_v2(parts));
  CUDA(cuEventDestroy_v2(joins));
  CUDA(cuStreamDestroy_v2(branch));
  exchange_release(&one);
  exchange_release(&two);
}

struct ending { struct rank* self; ncclComm_t communicator; atomic_int begun; };

static void* end_communicator(void* argument) {
  struct ending* ending = argument;
  CUDA(cuCtxSetCurrent(ending->self->context));
  atomic_store(&ending->begun, 1);
  NCCL(ncclCommDestroy(ending->communicator));
  return NULL;
}

/* NCCL's destroy waits until the graph is destroyed, so it runs on another thread. */
static void destroyed_before_its_graph(struct rank* self) {
  struct ending ending = {.self = self, .communicator = world(self, 1)};
  struct parcel parcels[PARCELS_MAX];
  struct exchange exchange = exchange_prepare(self->rank, parcels, wheel(self->ranks, parcels, 20011));
  eager(self, &exchange, ending.communicator, 1, GROUPED);
  struct graph captured =
      capture(&exchange, ending.communicator, self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, GROUPED);
  for (uint64_t round = 2; round < 4; round++) replay(self, &captured, &exchange, round, self->stream);
  pthread_t thread;
  if (pthread_create(&thread, NULL, end_communicator, &ending)) abort();
  while (!atomic_load(&ending.begun)) usleep(100);
  usleep(20000); /* time for the destroy to come to its wait */
  destroy(&captured);
  pthread_join(thread, NULL);
  exchange_release(&exchange);
}

static int wanted_count;
static char** wanted_names;
#define PART(name) if (is_wanted(wanted_count, wanted_names, #name)) name(self, communicator)

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct parcel parcels[PARCELS_MAX];
  /* NCCL makes its connections now: it cannot during a capture in global mode. */
  exchange_whole(self, communicator, parcels, wheel(self->ranks, parcels, large()));
  PART(alone_and_in_groups);
  PART(all_modes);
  PART(two_graphs);
  PART(eager_beside);
  PART(hundreds);
  PART(forked);
  NCCL(ncclCommDestroy(communicator));
  if (is_wanted(wanted_count, wanted_names, "destroyed_before_its_graph")) destroyed_before_its_graph(self);
}

int main(int count, char** arguments) {
  wanted_count = count;
  wanted_names = arguments;
  begin("graphs_p2p", 280);
  int ranks = rank_count(4);
  run_ranks("all", PROCESSES, ranks, all, NULL);
  if (ranks > 2) run_ranks("pair", PROCESSES, 2, all, NULL);
  return finish();
}
