/* Holds: collectives and send/receive captured into a graph give the right result at every replay, with new inputs,
 * and eager calls before, between and after the replays do too. */
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

/* `reduced` is the sum of all inputs; `shifted` is the sum too, having come from the rank before. */
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

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct buffers buffers = {device_alloc(COUNT * 4), device_alloc(COUNT * 4), device_alloc(COUNT * 4)};
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  eager(self, communicator, &buffers, 1);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  issue(self, communicator, &buffers);
  /* As cuBLAS does for its workspace. From a graph that allocates no edge can be taken any more. */
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
  /* Several replays in flight: each does the same work again. */
  set_input(self, &buffers, 30);
  for (int replay = 0; replay < REPLAYS; replay++) CUDA(cuGraphLaunch(executable, self->stream));
  wait_for(self->stream);
  check_outputs(self, &buffers, 30);
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  eager(self, communicator, &buffers, 40);
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
