/* Holds that within a peer group messages run in the order of the calls at every replay, where several captures put them into
 * one graph or a capture launches an earlier graph. Eager calls on another stream run in order with them. Nothing else orders
 * them here, and NCCL does not, so there is no run on NCCL alone. In each part a rank is late at another place, so that a
 * message out of order would reach the receive of another. */
#include "../support/messages.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <unistd.h>

enum { PARCELS_MAX = 64, PARTS = 3, ROUNDS = 4, LATE_US = 30000 };

/* The type of cuStreamBeginCaptureToGraph, which came with CUDA 12.3. */
typedef CUresult begin_capture_to_graph(CUstream stream, CUgraph graph, const void* dependencies, const void* data, size_t count,
                                        int mode);
static begin_capture_to_graph* begin_capture_into;

/* A rank's buffers and graph: the exchanges of the graph, then those called eagerly before and after it. */
struct replayed {
  CUgraphExec executable;
  struct parcel parcels[PARTS + 2][PARCELS_MAX];
  struct exchange exchanges[PARTS + 2];
  CUstream streams[3];
};

static atomic_bool is_late;

static void be_late(void* nothing) {
  (void)nothing;
  if (atomic_load(&is_late)) usleep(LATE_US);
}

/* All exchanges have the same sizes, so a message out of order is received in the place of another. */
static int around(int ranks, struct parcel* parcels, uint64_t key) {
  int count = 0;
  for (int rank = 0; rank < ranks; rank++) {
    for (int which = 0; which < 2; which++) {
      int to = (rank + (which ? ranks - 1 : 1)) % ranks;
      parcels[count] = (struct parcel){.from = rank, .to = to, .bytes = which ? 777 : 60001, .type = ncclUint8,
                                       .key = key * 1000 + (uint64_t)count};
      count++;
    }
  }
  return count;
}

static void issue(const struct exchange* exchange, ncclComm_t communicator, CUstream stream) {
  NCCL(ncclGroupStart());
  exchange_issue(exchange, communicator, stream);
  NCCL(ncclGroupEnd());
}

static void prepare(struct rank* self, struct replayed* replayed) {
  for (int i = 0; i < PARTS + 2; i++) {
    int count = around(self->ranks, replayed->parcels[i], (uint64_t)i + 1);
    replayed->exchanges[i] = exchange_prepare(self->rank, replayed->parcels[i], count);
  }
  for (int i = 0; i < 3; i++) replayed->streams[i] = new_stream();
}

static void begin_into(CUgraph graph, CUstream stream) {
  CUDA(begin_capture_into(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}

static void end_into(CUgraph graph, CUstream stream) {
  CUgraph ended = NULL;
  CUDA(cuStreamEndCapture(stream, &ended));
  CHECK(ended == graph);
}

/* Replays between eager calls on a third stream, with no wait between. Ranks take turns at being late. */
static void replay(struct rank* self, ncclComm_t communicator, struct replayed* replayed) {
  struct exchange* exchanges = replayed->exchanges;
  for (int round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < PARTS + 2; i++) exchange_renew(&exchanges[i], (uint64_t)round);
    atomic_store(&is_late, round % self->ranks == self->rank);
    issue(&exchanges[PARTS], communicator, replayed->streams[2]);
    CUDA(cuGraphLaunch(replayed->executable, replayed->streams[round % 2]));
    issue(&exchanges[PARTS + 1], communicator, replayed->streams[2]);
    for (int i = 0; i < 3; i++) wait_for(replayed->streams[i]);
    for (int i = 0; i < PARTS + 2; i++) exchange_verify(&exchanges[i], self);
  }
}

static void end(struct replayed* replayed) {
  CUDA(cuGraphExecDestroy(replayed->executable));
  for (int i = 0; i < PARTS + 2; i++) exchange_release(&replayed->exchanges[i]);
  for (int i = 0; i < 3; i++) CUDA(cuStreamDestroy_v2(replayed->streams[i]));
}

/* Two captures into one graph, the first of two groups. `late` is the group before which a rank is late. */
static void captured_twice(struct rank* self, ncclComm_t communicator, int late) {
  struct replayed replayed;
  prepare(self, &replayed);
  CUgraph graph = NULL;
  CUDA(cuGraphCreate(&graph, 0));
  for (int i = 0; i < PARTS; i++) {
    CUstream stream = replayed.streams[i / 2];
    if (i != 1) begin_into(graph, stream);
    if (i == late) CUDA(cuLaunchHostFunc(stream, be_late, NULL));
    issue(&replayed.exchanges[i], communicator, stream);
    if (i != 0) end_into(graph, stream);
  }
  CUDA(cuGraphInstantiateWithFlags(&replayed.executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  replay(self, communicator, &replayed);
  end(&replayed);
}

static void late_in_the_first(struct rank* self, ncclComm_t communicator) { captured_twice(self, communicator, 0); }
static void late_within(struct rank* self, ncclComm_t communicator) { captured_twice(self, communicator, 1); }
static void late_in_the_second(struct rank* self, ncclComm_t communicator) { captured_twice(self, communicator, 2); }

/* An earlier graph is launched on one branch of a capture, then groups come on the other branch. */
static void launched(struct rank* self, ncclComm_t communicator) {
  struct replayed replayed;
  prepare(self, &replayed);
  CUstream main = replayed.streams[0], branch = replayed.streams[1];
  CUgraph inner = NULL, outer = NULL;
  CUgraphExec child = NULL;
  CUevent parts, joins;
  CUDA(cuEventCreate(&parts, CU_EVENT_DISABLE_TIMING));
  CUDA(cuEventCreate(&joins, CU_EVENT_DISABLE_TIMING));
  CUDA(cuStreamBeginCapture_v2(branch, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CUDA(cuLaunchHostFunc(branch, be_late, NULL));
  issue(&replayed.exchanges[0], communicator, branch);
  CUDA(cuStreamEndCapture(branch, &inner));
  CUDA(cuGraphInstantiateWithFlags(&child, inner, 0));
  CUDA(cuStreamBeginCapture_v2(main, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CUDA(cuEventRecord(parts, main));
  CUDA(cuStreamWaitEvent(branch, parts, 0));
  CUDA(cuGraphLaunch(child, branch));
  for (int i = 1; i < PARTS; i++) issue(&replayed.exchanges[i], communicator, main);
  CUDA(cuEventRecord(joins, branch));
  CUDA(cuStreamWaitEvent(main, joins, 0));
  CUDA(cuStreamEndCapture(main, &outer));
  CUDA(cuGraphInstantiateWithFlags(&replayed.executable, outer, 0));
  CUDA(cuGraphDestroy(inner));
  CUDA(cuGraphDestroy(outer));
  replay(self, communicator, &replayed);
  CUDA(cuGraphExecDestroy(child));
  CUDA(cuEventDestroy_v2(parts));
  CUDA(cuEventDestroy_v2(joins));
  end(&replayed);
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct parcel parcels[PARCELS_MAX];
  exchange_whole(self, communicator, parcels, around(self->ranks, parcels, 9));
  RUN_PART(late_in_the_first, self, communicator);
  RUN_PART(late_within, self, communicator);
  RUN_PART(late_in_the_second, self, communicator);
  /* H200's driver 580 refuses to launch such a graph into a capture. */
  if (!on_gpus()) RUN_PART(launched, self, communicator);
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** arguments) {
  begin("shared_graphs", 280);
  choose(count, arguments);
  *(void**)&begin_capture_into = dlsym(RTLD_DEFAULT, "cuStreamBeginCaptureToGraph");
  if (!begin_capture_into) skip("this driver captures into no graph that exists: it is older than CUDA 12.3's");
  run_ranks("processes", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
