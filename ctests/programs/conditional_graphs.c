/* Holds that with NCCL_GRAPH_MIXING_SUPPORT=0 collectives and messages may stand in the body of a conditional node (as
 * torch.cond makes them). They run in the order of their calls, on any streams, in the body and in the graph around it; a launch
 * with condition 0 leaves the body out. Without that variable the driver refuses to instantiate such a graph, as with NCCL
 * alone. What the graph of a body retains lives as long as the executable graph. */
#include "../support/harness.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { LARGE = 30011, SMALL = 256, MESSAGES = 120, MESSAGE = 64, LAUNCHES = 3, NODES_MAX = 512, INVALID_VALUE = 1 };

struct conditional {
  struct rank* self;
  ncclComm_t communicator;
  int32_t *at, *out, *in, *host;
  CUstream other;
};

/* The sum of all elements, which NCCL may run; the maximum of the first few, which Windlass can run. */
static void sum(struct conditional* it, CUstream stream) {
  NCCL(ncclAllReduce(it->at, it->at, LARGE, ncclInt32, ncclSum, it->communicator, as_cuda(stream)));
}
static void maximum(struct conditional* it, CUstream stream) {
  NCCL(ncclAllReduce(it->at, it->at, SMALL, ncclInt32, ncclMax, it->communicator, as_cuda(stream)));
}

/* Many messages at once, more than a kernel's parameters hold. */
static void messages(struct conditional* it, CUstream stream) {
  struct rank* self = it->self;
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  NCCL(ncclGroupStart());
  for (int i = 0; i < MESSAGES; i++) {
    NCCL(ncclSend(it->out + i * MESSAGE, MESSAGE, ncclInt32, next, it->communicator, as_cuda(stream)));
    NCCL(ncclRecv(it->in + i * MESSAGE, MESSAGE, ncclInt32, before, it->communicator, as_cuda(stream)));
  }
  NCCL(ncclGroupEnd());
}

static void capture_to(CUstream stream, CUgraph graph, const CUgraphNode* after, size_t count) {
  CUDA(cuStreamBeginCaptureToGraph(stream, graph, after, NULL, count, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}

/* Adds the node behind all nodes of the graph; returns its body. */
static CUgraph add_conditional(CUgraph graph, unsigned value, CUgraphNode* node) {
  CUgraphNode nodes[NODES_MAX];
  size_t count = NODES_MAX;
  CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL, .kind = CU_GRAPH_COND_TYPE_IF, .size = 1};
  CUDA(cuCtxGetCurrent(&parameters.context));
  CUDA(cuGraphGetNodes(graph, nodes, &count));
  CUDA(cuGraphConditionalHandleCreate(&parameters.handle, graph, parameters.context, value, CU_GRAPH_COND_ASSIGN_DEFAULT));
  CUDA(cuGraphAddNode_v2(node, graph, nodes, NULL, count, &parameters));
  return parameters.bodies[0];
}

/* The graph: a sum; the conditional body with a maximum on another stream, a sum and messages; then a maximum. */
static CUgraph captured(struct conditional* it, unsigned value) {
  struct rank* self = it->self;
  CUgraph graph = NULL, ended = NULL;
  CUgraphNode node = NULL;
  CUevent fork = NULL, join = NULL;
  CUDA(cuEventCreate(&fork, 2));
  CUDA(cuEventCreate(&join, 2));
  CUDA(cuGraphCreate(&graph, 0));
  capture_to(self->stream, graph, NULL, 0);
  sum(it, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &ended));
  CUgraph body = add_conditional(graph, value, &node);
  capture_to(self->stream, body, NULL, 0);
  CUDA(cuEventRecord(fork, self->stream));
  CUDA(cuStreamWaitEvent(it->other, fork, 0));
  maximum(it, it->other);
  sum(it, self->stream);
  maximum(it, it->other);
  messages(it, self->stream);
  CUDA(cuEventRecord(join, it->other));
  CUDA(cuStreamWaitEvent(self->stream, join, 0));
  CUDA(cuStreamEndCapture(self->stream, &ended));
  CHECK(ended == body);
  capture_to(self->stream, graph, &node, 1);
  maximum(it, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &ended));
  CUDA(cuEventDestroy_v2(fork));
  CUDA(cuEventDestroy_v2(join));
  return graph;
}

enum step { SUM, MAXIMUM };

static int32_t value(int rank, size_t index) { return (rank + 1) * (int32_t)(index % 97 + 1); }

static void prepare(struct conditional* it) {
  for (size_t i = 0; i < LARGE; i++) it->host[i] = value(it->self->rank, i);
  upload(it->at, it->host, LARGE * sizeof *it->host);
  for (int i = 0; i < MESSAGES * MESSAGE; i++) it->host[i] = it->self->rank * 100000 + i;
  upload(it->out, it->host, MESSAGES * MESSAGE * sizeof *it->host);
  device_fill(it->in, 0xff, MESSAGES * MESSAGE * sizeof *it->host);
}

/* The buffer is as after these steps of every launch. `came`: whether the messages ran. */
static void verify(struct conditional* it, const enum step* steps, int count, bool came) {
  struct rank* self = it->self;
  download(it->host, it->at, LARGE * sizeof *it->host);
  for (size_t i = 0; i < LARGE; i++) {
    int64_t values[RANKS_MAX];
    for (int rank = 0; rank < self->ranks; rank++) values[rank] = value(rank, i);
    for (int step = 0; step < count * LAUNCHES; step++) {
      if (steps[step % count] == MAXIMUM && i >= SMALL) continue;
      int64_t result = values[0];
      for (int rank = 1; rank < self->ranks; rank++) {
        if (steps[step % count] == SUM) result += values[rank];
        else if (values[rank] > result) result = values[rank];
      }
      for (int rank = 0; rank < self->ranks; rank++) values[rank] = result;
    }
    if (!EQUAL(it->host[i], (int32_t)(uint32_t)values[0])) break;
  }
  record(self, it->host, LARGE * sizeof *it->host);
  download(it->host, it->in, MESSAGES * MESSAGE * sizeof *it->host);
  int before = (self->rank + self->ranks - 1) % self->ranks;
  for (int i = 0; i < MESSAGES * MESSAGE; i++) {
    if (!EQUAL(it->host[i], came ? before * 100000 + i : -1)) break;
  }
  record(self, it->host, MESSAGES * MESSAGE * sizeof *it->host);
  meet(self);
}

static struct conditional made(struct rank* self) {
  struct conditional it = {.self = self, .communicator = world(self, 0), .other = new_stream()};
  it.at = device_alloc(LARGE * sizeof *it.at);
  it.out = device_alloc(MESSAGES * MESSAGE * sizeof *it.out);
  it.in = device_alloc(MESSAGES * MESSAGE * sizeof *it.in);
  it.host = malloc(LARGE * sizeof *it.host);
  prepare(&it);
  /* NCCL makes its connections before anything is captured. */
  sum(&it, self->stream);
  maximum(&it, self->stream);
  messages(&it, self->stream);
  wait_for(self->stream);
  return it;
}

static void end(struct conditional* it) {
  CUDA(cuStreamDestroy_v2(it->other));
  device_free(it->at);
  device_free(it->out);
  device_free(it->in);
  free(it->host);
  NCCL(ncclCommDestroy(it->communicator));
}

static void launched(struct conditional* it, unsigned value) {
  static const enum step all[] = {SUM, MAXIMUM, SUM, MAXIMUM, MAXIMUM}, around[] = {SUM, MAXIMUM};
  CUgraphExec executable = NULL;
  CUgraph graph = captured(it, value);
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  prepare(it);
  for (int i = 0; i < LAUNCHES; i++) CUDA(cuGraphLaunch(executable, it->self->stream));
  wait_for(it->self->stream);
  verify(it, value ? all : around, value ? 5 : 2, value);
  CUDA(cuGraphExecDestroy(executable));
}

static void apart(struct rank* self) {
  struct conditional it = made(self);
  launched(&it, 1);
  launched(&it, 0);
  /* Eager calls, when no graph is in flight. */
  prepare(&it);
  for (int i = 0; i < LAUNCHES; i++) sum(&it, self->stream), maximum(&it, self->stream);
  wait_for(self->stream);
  verify(&it, (const enum step[]){SUM, MAXIMUM}, 2, false);
  launched(&it, 1);
  end(&it);
}

static void mixed(struct rank* self) {
  struct conditional it = made(self);
  CUgraphExec executable = NULL;
  CUgraph graph = captured(&it, 1);
  EQUAL(cuGraphInstantiateWithFlags(&executable, graph, 0), INVALID_VALUE);
  CUDA(cuGraphDestroy(graph));
  meet(self);
  end(&it);
}

static void is_gone(void* gone) { atomic_store((atomic_bool*)gone, true); }

/* The driver alone keeps a body's user objects until the executable graph ends. Windlass and NCCL rely on that for memory of
 * kernels in a body. */
static void kept(struct rank* self) {
  static atomic_bool gone;
  CUgraph graph = NULL, ended = NULL;
  CUgraphNode node = NULL;
  CUgraphExec executable = NULL;
  CUuserObject object = NULL;
  void* memory = device_alloc(64);
  atomic_store(&gone, false);
  CUDA(cuGraphCreate(&graph, 0));
  CUgraph body = add_conditional(graph, 1, &node);
  capture_to(self->stream, body, NULL, 0);
  CUDA(cuMemsetD8Async((CUdeviceptr)memory, 7, 64, self->stream));
  CUDA(cuStreamEndCapture(self->stream, &ended));
  CUDA(cuUserObjectCreate(&object, &gone, is_gone, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  CUDA(cuGraphRetainUserObject(body, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  CUDA(cuGraphLaunch(executable, self->stream));
  wait_for(self->stream);
  usleep(100000);
  CHECK(!atomic_load(&gone));
  CUDA(cuGraphExecDestroy(executable));
  for (int i = 0; i < 1000 && !atomic_load(&gone); i++) usleep(10000);
  CHECK(atomic_load(&gone));
  device_free(memory);
}

int main(void) {
  begin("conditional_graphs", 60);
  int ranks = rank_count(3);
  setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 1);
  run_ranks("apart", PROCESSES, ranks, apart, NULL);
  unsetenv("NCCL_GRAPH_MIXING_SUPPORT");
  run_ranks("mixed", PROCESSES, ranks, mixed, NULL);
  run_ranks("kept", PROCESSES, ranks, kept, NULL);
  return finish();
}
