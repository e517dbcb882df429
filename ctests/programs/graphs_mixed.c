/* Holds that one communicator's all-reduces, in place on one buffer, run in the order in which they are called and their graphs
 * launched. Cases: small and large, eager and from graphs, on streams that nothing else joins and that are destroyed before they
 * have run. The sum of the whole buffer and the maximum of its beginning do not commute, so a wrong order shows. Ranks take
 * turns at being late before the first of two. */
#include "../support/harness.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { LARGE = 30011, SMALL = 256, LATE_US = 40000, STREAMS = 3 };

/* The sum of all elements, which NCCL runs; the maximum of the first few, which Windlass can run. */
enum step { SUM, MAXIMUM };

struct mixed {
  struct rank* self;
  ncclComm_t communicator;
  int32_t *at, *host;
  CUstream streams[STREAMS];
};

static atomic_bool is_late;

static void be_late(void* nothing) {
  (void)nothing;
  if (atomic_load(&is_late)) usleep(LATE_US);
}

static int32_t value(int rank, size_t index) { return (rank + 1) * (int32_t)(index % 97 + 1); }

static void issue(struct mixed* mixed, enum step step, CUstream stream) {
  size_t count = step == SUM ? LARGE : SMALL;
  ncclRedOp_t operation = step == SUM ? ncclSum : ncclMax;
  NCCL(ncclAllReduce(mixed->at, mixed->at, count, ncclInt32, operation, mixed->communicator, as_cuda(stream)));
}

static void issue_grouped(struct mixed* mixed, enum step step, CUstream stream) {
  NCCL(ncclGroupStart());
  issue(mixed, step, stream);
  NCCL(ncclGroupEnd());
}

/* Writes new input; one rank in turn is late on the stream `late`. */
static void begin_round(struct mixed* mixed, int round, CUstream late) {
  struct rank* self = mixed->self;
  for (size_t i = 0; i < LARGE; i++) mixed->host[i] = value(self->rank, i);
  upload(mixed->at, mixed->host, LARGE * sizeof *mixed->host);
  atomic_store(&is_late, round % self->ranks == self->rank);
  CUDA(cuLaunchHostFunc(late, be_late, NULL));
}

/* Holds that the buffer is as after these steps, one after the other. */
static void end_round(struct mixed* mixed, const enum step* steps, int count) {
  struct rank* self = mixed->self;
  for (int i = 0; i < STREAMS; i++) wait_for(mixed->streams[i]);
  download(mixed->host, mixed->at, LARGE * sizeof *mixed->host);
  for (size_t i = 0; i < LARGE; i++) {
    int32_t values[RANKS_MAX];
    for (int rank = 0; rank < self->ranks; rank++) values[rank] = value(rank, i);
    for (int step = 0; step < count; step++) {
      if (steps[step] == MAXIMUM && i >= SMALL) continue;
      int32_t result = values[0];
      for (int rank = 1; rank < self->ranks; rank++) {
        if (steps[step] == SUM) result += values[rank];
        else if (values[rank] > result) result = values[rank];
      }
      for (int rank = 0; rank < self->ranks; rank++) values[rank] = result;
    }
    if (!EQUAL(mixed->host[i], values[0])) break;
  }
  record(self, mixed->host, LARGE * sizeof *mixed->host);
  meet(self);
}

#define END_ROUND(mixed, ...) end_round(mixed, (const enum step[]){__VA_ARGS__}, sizeof((const enum step[]){__VA_ARGS__}) / sizeof(enum step))

static CUgraphExec captured(struct mixed* mixed, enum step step, CUstream stream) {
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  CUDA(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  issue(mixed, step, stream);
  CUDA(cuStreamEndCapture(stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  return executable;
}

/* A communicator of which nothing was captured yet. It has run the sum on the first stream, then the maximum. */
static struct mixed made(struct rank* self) {
  struct mixed mixed = {.self = self, .communicator = world(self, 0)};
  mixed.at = device_alloc(LARGE * sizeof *mixed.at);
  mixed.host = malloc(LARGE * sizeof *mixed.host);
  for (int i = 0; i < STREAMS; i++) mixed.streams[i] = new_stream();
  begin_round(&mixed, -1, mixed.streams[0]);
  issue(&mixed, SUM, mixed.streams[0]);
  issue(&mixed, MAXIMUM, mixed.streams[0]);
  END_ROUND(&mixed, SUM, MAXIMUM);
  return mixed;
}

static void end(struct mixed* mixed) {
  for (int i = 0; i < STREAMS; i++) CUDA(cuStreamDestroy_v2(mixed->streams[i]));
  free(mixed->host);
  device_free(mixed->at);
  NCCL(ncclCommDestroy(mixed->communicator));
}

/* A graph captured earlier is launched after an eager call and before one, each called alone or in a group. */
static void a_graph_of_before(struct rank* self) {
  static void (*const ways[])(struct mixed*, enum step, CUstream) = {issue, issue_grouped};
  for (int which = 0; which < 2; which++) {
    struct mixed mixed = made(self);
    CUstream one = mixed.streams[0], two = mixed.streams[1];
    enum step of_graph = which ? SUM : MAXIMUM, eager = which ? MAXIMUM : SUM;
    CUgraphExec graph = captured(&mixed, of_graph, one);
    for (int round = 0; round < 2 * self->ranks; round++) {
      begin_round(&mixed, round, one);
      ways[round / self->ranks](&mixed, eager, one);
      CUDA(cuGraphLaunch(graph, two));
      END_ROUND(&mixed, eager, of_graph);
      begin_round(&mixed, round, two);
      CUDA(cuGraphLaunch(graph, two));
      ways[round / self->ranks](&mixed, eager, one);
      END_ROUND(&mixed, of_graph, eager);
    }
    CUDA(cuGraphExecDestroy(graph));
    end(&mixed);
  }
}

/* The first capture comes while an eager call of the other kind, on the same stream or another, has not run yet. */
static void a_first_capture(struct rank* self) {
  for (int which = 0; which < 4; which++) {
    for (int round = 0; round < self->ranks; round++) {
      struct mixed mixed = made(self);
      enum step of_graph = which % 2 ? SUM : MAXIMUM, eager = which % 2 ? MAXIMUM : SUM;
      begin_round(&mixed, round, mixed.streams[0]);
      issue(&mixed, eager, mixed.streams[0]);
      CUgraphExec graph = captured(&mixed, of_graph, mixed.streams[which / 2]);
      CUDA(cuGraphLaunch(graph, mixed.streams[2]));
      END_ROUND(&mixed, eager, of_graph);
      CUDA(cuGraphExecDestroy(graph));
      end(&mixed);
    }
  }
}

/* A capture of either kind, never launched, comes between two eager calls. */
static void a_capture_between(struct rank* self) {
  for (int which = 0; which < 8; which++) {
    for (int round = 0; round < self->ranks; round++) {
      struct mixed mixed = made(self);
      enum step later = which % 2 ? SUM : MAXIMUM, eager = which % 2 ? MAXIMUM : SUM;
      begin_round(&mixed, round, mixed.streams[0]);
      issue(&mixed, eager, mixed.streams[0]);
      CUgraphExec graph = captured(&mixed, which / 4 ? eager : later, mixed.streams[which / 2 % 2]);
      issue(&mixed, later, mixed.streams[2]);
      END_ROUND(&mixed, eager, later);
      CUDA(cuGraphExecDestroy(graph));
      end(&mixed);
    }
  }
}

/* A graph of each kind, each launched on its own stream. */
static void two_graphs(struct rank* self) {
  struct mixed mixed = made(self);
  CUstream one = mixed.streams[0], two = mixed.streams[1];
  CUgraphExec graphs[2];
  for (int step = SUM; step <= MAXIMUM; step++) graphs[step] = captured(&mixed, (enum step)step, one);
  for (int round = 0; round < self->ranks; round++) {
    for (int first = SUM; first <= MAXIMUM; first++) {
      begin_round(&mixed, round, one);
      CUDA(cuGraphLaunch(graphs[first], one));
      CUDA(cuGraphLaunch(graphs[!first], two));
      END_ROUND(&mixed, (enum step)first, (enum step)!first);
    }
  }
  for (int step = SUM; step <= MAXIMUM; step++) CUDA(cuGraphExecDestroy(graphs[step]));
  end(&mixed);
}

/* Each call is on its own stream, which is destroyed at once with its work still pending. The next stream may get the same
 * handle. */
static void streams_that_go(struct rank* self) {
  static void (*const ways[])(struct mixed*, enum step, CUstream) = {issue, issue_grouped};
  struct mixed mixed = made(self);
  for (int round = 0; round < 2 * self->ranks; round++) {
    for (int first = SUM; first <= MAXIMUM; first++) {
      CUstream one = new_stream();
      begin_round(&mixed, round, one);
      ways[round / self->ranks](&mixed, (enum step)first, one);
      CUDA(cuStreamDestroy_v2(one));
      for (int later = 0; later < 3; later++) {
        CUstream other = new_stream();
        ways[round / self->ranks](&mixed, later % 2 ? (enum step)first : (enum step)!first, other);
        CUDA(cuStreamDestroy_v2(other));
      }
      CUDA(cuCtxSynchronize());
      END_ROUND(&mixed, (enum step)first, (enum step)!first, (enum step)first, (enum step)!first);
    }
  }
  end(&mixed);
}

static void all(struct rank* self) {
  RUN_PART(streams_that_go, self);
  RUN_PART(a_graph_of_before, self);
  RUN_PART(a_first_capture, self);
  RUN_PART(a_capture_between, self);
  RUN_PART(two_graphs, self);
}

int main(int count, char** arguments) {
  begin("graphs_mixed", 110);
  choose(count, arguments);
  run_ranks("processes", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
