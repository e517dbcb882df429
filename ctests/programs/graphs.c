/* Holds that collectives and sends and receives captured into a graph give the right result at every replay, with new inputs. So
 * do eager calls before, between and after the replays. The graph may be a clone, and the executable graph may have been updated
 * to another capture, of other sizes, whose graph is destroyed. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>

enum { COUNT = 4099, REPLAYS = 5 };

struct buffers { void *input, *reduced, *shifted; };

static void set_input(struct rank* self, const struct buffers* buffers, uint64_t key) {
  float host[COUNT];
  input_fill(host, key, self->rank, 0, COUNT, ncclFloat, ncclSum);
  upload(buffers->input, host, sizeof host);
}

/* `reduced` is the sum of all inputs; `shifted` is that sum as received from the rank before. */
static void check_outputs(struct rank* self, const struct buffers* buffers, uint64_t key) {
  float seen[COUNT], wanted[COUNT];
  reduced_fill(wanted, key, self->ranks, 0, COUNT, ncclFloat, ncclSum, 1);
  download(seen, buffers->reduced, sizeof seen);
  CHECK(memcmp(seen, wanted, sizeof seen) == 0);
  record(self, seen, sizeof seen);
  download(seen, buffers->shifted, sizeof seen);
  CHECK(memcmp(seen, wanted, sizeof seen) == 0);
  record(self, seen, sizeof seen);
  device_fill(buffers->reduced, 0, sizeof seen);
  device_fill(buffers->shifted, 0, sizeof seen);
}

static void issue(struct rank* self, ncclComm_t communicator, const struct buffers* buffers) {
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  cudaStream_t stream = as_cuda(self->stream);
  NCCL(ncclAllReduce(buffers->input, buffers->reduced, COUNT, ncclFloat, ncclSum, communicator, stream));
  NCCL(ncclGroupStart());
  NCCL(ncclSend(buffers->reduced, COUNT, ncclFloat, next, communicator, stream));
  NCCL(ncclRecv(buffers->shifted, COUNT, ncclFloat, before, communicator, stream));
  NCCL(ncclGroupEnd());
}

static void eager(struct rank* self, ncclComm_t communicator, const struct buffers* buffers, uint64_t key) {
  set_input(self, buffers, key);
  issue(self, communicator, buffers);
  wait_for(self->stream);
  check_outputs(self, buffers, key);
}

/* A graph with only a collective of each kind, including those made of messages, of the size that `count` gives. */
static CUgraph captured(struct rank* self, ncclComm_t communicator, struct transfer* list, int kinds, size_t count, uint64_t key) {
  CUgraph graph = NULL;
  for (int which = 0; which < kinds; which++) {
    list[which] = (struct transfer){.which = (enum collective)which, .type = ncclFloat, .op = ncclSum, .count = count, .root = 1,
                                    .rank = self->rank, .ranks = self->ranks, .key = key + (uint64_t)which};
    transfer_prepare(&list[which]);
  }
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  for (int which = 0; which < kinds; which++) transfer_launch(&list[which], communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  return graph;
}

/* Eager operations are between the replays. */
static void replay(struct rank* self, ncclComm_t communicator, CUgraphExec executable, struct transfer* list, int kinds, uint64_t key) {
  struct transfer eager = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 777, .rank = self->rank,
                           .ranks = self->ranks, .key = key};
  transfer_prepare(&eager);
  for (int times = 0; times < 3; times++) {
    for (int which = 0; which < kinds; which++) transfer_clear(&list[which]);
    CUDA(cuGraphLaunch(executable, self->stream));
    transfer_launch(&eager, communicator, self->stream);
    wait_for(self->stream);
    for (int which = 0; which < kinds; which++) transfer_verify(&list[which], self);
    transfer_verify(&eager, self);
  }
  for (int which = 0; which < kinds; which++) transfer_release(&list[which]);
  transfer_release(&eager);
}

/* The driver may refuse an update (of NCCL's kernels or of Windlass's): then programs instantiate anew. */
static void become(CUgraphExec* executable, CUgraph graph) {
  CUgraphExecUpdateResultInfo result = {0};
  if (cuGraphExecUpdate_v2(*executable, graph, &result) != CUDA_SUCCESS) {
    fprintf(stderr, "graphs: an update was refused, %d\n", result.result);
    CUDA(cuGraphExecDestroy(*executable));
    CUDA(cuGraphInstantiateWithFlags(executable, graph, 0));
  }
  CUDA(cuGraphDestroy(graph));
}

static void cloned_and_updated(struct rank* self, ncclComm_t communicator) {
  static const size_t counts[] = {900, 1100, 20, 30011, 3};
  struct transfer list[COLLECTIVES];
  int kinds = collectives_known();
  CUgraph clone = NULL, graph = captured(self, communicator, list, kinds, 500, 100);
  CUgraphExec executable = NULL;
  CUDA(cuGraphClone(&clone, graph));
  CUDA(cuGraphDestroy(graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, clone, 0));
  CUDA(cuGraphDestroy(clone));
  replay(self, communicator, executable, list, kinds, 150);
  for (uint64_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    graph = captured(self, communicator, list, kinds, counts[i], 200 + 100 * i);
    become(&executable, graph);
    replay(self, communicator, executable, list, kinds, 250 + 100 * i);
  }
  CUDA(cuGraphExecDestroy(executable));
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct buffers buffers = {device_alloc(COUNT * 4), device_alloc(COUNT * 4), device_alloc(COUNT * 4)};
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  eager(self, communicator, &buffers, 1);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  issue(self, communicator, &buffers);
  /* As cuBLAS does for its workspace. The driver lets no edge be removed from a graph that allocates. */
  CUdeviceptr workspace = 0;
  CUDA(cuMemAllocAsync(&workspace, 1 << 20, self->stream));
  issue(self, communicator, &buffers);
  CUDA(cuMemFreeAsync(workspace, self->stream));
  issue(self, communicator, &buffers);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (uint64_t replay = 0; replay < REPLAYS; replay++) {
    set_input(self, &buffers, 10 + replay);
    CUDA(cuGraphLaunch(executable, self->stream));
    wait_for(self->stream);
    check_outputs(self, &buffers, 10 + replay);
    eager(self, communicator, &buffers, 20 + replay);
  }
  /* Several replays in flight: each repeats the same work. */
  set_input(self, &buffers, 30);
  for (int replay = 0; replay < REPLAYS; replay++) CUDA(cuGraphLaunch(executable, self->stream));
  wait_for(self->stream);
  check_outputs(self, &buffers, 30);
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  eager(self, communicator, &buffers, 40);
  cloned_and_updated(self, communicator);
  eager(self, communicator, &buffers, 50);
  device_free(buffers.input);
  device_free(buffers.reduced);
  device_free(buffers.shifted);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("graphs", 60);
  run_ranks("graphs", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
