/* Holds that a capture of the same calls gives a graph of the same shape, whatever the communicator has run before: eager calls on the
 * same stream and on another one, captured calls, those that Windlass may run and those that NCCL runs. So an executable graph is updated by
 * any later capture of the same calls, as XLA and PyTorch do, and replays give the results of the newest buffers. */
#include "../support/harness.h"

#include <stdlib.h>
#include <string.h>

/* What happened before a capture. */
enum before { OURS, OURS_ELSEWHERE, NCCLS, NCCLS_ELSEWHERE, OURS_CAPTURED, NCCLS_CAPTURED, BEFORE };
/* What is captured: calls one after the other on one stream, or in a group on one or two. */
enum shape { SUM, AVERAGE, AVERAGE_THEN_SUM, AVERAGES, SUM_BESIDE_AVERAGE, SHAPES };
enum { COUNT = 200, STREAMS = 2, BUFFERS = 3, LONGEST = 4, LONG_ONES = 12 };

struct scene {
  struct rank* self;
  ncclComm_t communicator;
  CUstream streams[STREAMS];
  int32_t *in[BUFFERS], *out[BUFFERS];
};

static void all_reduce(const struct scene* scene, ncclRedOp_t operation, int from, int stream) {
  NCCL(ncclAllReduce(scene->in[from], scene->out[operation == ncclAvg ? 2 : from], COUNT, ncclInt32, operation, scene->communicator,
                     as_cuda(scene->streams[stream])));
}

static CUgraph captured(const struct scene* scene, enum shape shape, int from) {
  CUgraph graph = NULL;
  CUevent forked = NULL;
  CUDA(cuStreamBeginCapture_v2(scene->streams[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  switch (shape) {
    case SUM: all_reduce(scene, ncclSum, from, 0); break;
    case AVERAGE: all_reduce(scene, ncclAvg, from, 0); break;
    case AVERAGE_THEN_SUM: all_reduce(scene, ncclAvg, from, 0), all_reduce(scene, ncclSum, from, 0); break;
    case AVERAGES:
      NCCL(ncclGroupStart());
      all_reduce(scene, ncclAvg, from, 0);
      NCCL(ncclAllReduce(scene->in[from], scene->out[1 - from], COUNT, ncclInt32, ncclAvg, scene->communicator, as_cuda(scene->streams[0])));
      NCCL(ncclGroupEnd());
      break;
    default:
      CUDA(cuEventCreate(&forked, CU_EVENT_DISABLE_TIMING));
      CUDA(cuEventRecord(forked, scene->streams[0]));
      CUDA(cuStreamWaitEvent(scene->streams[1], forked, 0));
      NCCL(ncclGroupStart());
      all_reduce(scene, ncclSum, from, 0), all_reduce(scene, ncclAvg, from, 1);
      NCCL(ncclGroupEnd());
  }
  CUDA(cuStreamEndCapture(scene->streams[0], &graph));
  if (forked) CUDA(cuEventDestroy_v2(forked));
  return graph;
}

static void launch_once(const struct scene* scene, enum shape shape) {
  CUgraphExec executable = NULL;
  CUgraph graph = captured(scene, shape, 0);
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  together(scene->self);
  CUDA(cuGraphLaunch(executable, scene->streams[1]));
  wait_for(scene->streams[1]);
  together(scene->self);
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
}

static void happen(const struct scene* scene, enum before what) {
  switch (what) {
    case OURS: all_reduce(scene, ncclSum, 0, 0); break;
    case OURS_ELSEWHERE: all_reduce(scene, ncclSum, 0, 1); break;
    case NCCLS: all_reduce(scene, ncclAvg, 0, 0); break;
    case NCCLS_ELSEWHERE: all_reduce(scene, ncclAvg, 0, 1); break;
    case OURS_CAPTURED: launch_once(scene, SUM); break;
    default: launch_once(scene, AVERAGE);
  }
}

static size_t nodes_of(CUgraph graph) {
  size_t count = 0;
  CUDA(cuGraphGetNodes(graph, NULL, &count));
  return count;
}

static void fill(struct scene* scene, int buffer) {
  int32_t host[COUNT];
  for (int i = 0; i < COUNT; i++) host[i] = (scene->self->rank + 1) * (buffer + 1) * 12;
  upload(scene->in[buffer], host, sizeof host);
  memset(host, 0, sizeof host);
  upload(scene->out[buffer], host, sizeof host), upload(scene->out[2], host, sizeof host);
}

static void verify(struct scene* scene, enum shape shape, int from) {
  int32_t host[COUNT], sum = 0;
  for (int rank = 0; rank < scene->self->ranks; rank++) sum += (rank + 1) * (from + 1) * 12;
  if (shape != AVERAGE && shape != AVERAGES) download(host, scene->out[from], sizeof host), EQUAL(host[COUNT - 1], sum);
  if (shape != SUM) download(host, scene->out[2], sizeof host), EQUAL(host[COUNT - 1], sum / scene->self->ranks);
}

/* Two captures, the second after more of the same; `sizes` has those of the first graphs of all. Another shape comes first for each
 * `number`, as a lazy communicator may be built in the middle of the first capture. */
static void compare(struct scene* scene, const enum before* history, int length, size_t* sizes, int number) {
  for (int each = 0; each < SHAPES; each++) {
    int shape = (each + number) % SHAPES;
    CUgraphExec executable = NULL, around = NULL;
    CUgraph parent = NULL;
    CUgraphNode child = NULL;
    CUDA(cuGraphCreate(&parent, 0));
    for (int from = 0; from < 2; from++) {
      for (int i = 0; i < length; i++) happen(scene, history[i]);
      for (int stream = 0; stream < STREAMS; stream++) wait_for(scene->streams[stream]);
      fill(scene, from);
      meet(scene->self);
      CUgraph graph = captured(scene, (enum shape)shape, from);
      CUgraphExecUpdateResultInfo information;
      if (!sizes[shape]) sizes[shape] = nodes_of(graph);
      EQUAL(nodes_of(graph), sizes[shape]);
      if (executable) EQUAL(cuGraphExecUpdate_v2(executable, graph, &information), CUDA_SUCCESS);
      else CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
      together(scene->self);
      CUDA(cuGraphLaunch(executable, scene->streams[0]));
      wait_for(scene->streams[0]);
      verify(scene, (enum shape)shape, from);
      /* XLA keeps captures as child nodes, which it updates alone. */
      if (around) EQUAL(cuGraphExecChildGraphNodeSetParams(around, child, graph), CUDA_SUCCESS);
      if (on_gpus() && !around) {
        CUDA(cuGraphAddChildGraphNode(&child, parent, NULL, 0, graph));
        CUDA(cuGraphInstantiateWithFlags(&around, parent, 0));
      }
      if (around) {
        fill(scene, from);
        together(scene->self);
        CUDA(cuGraphLaunch(around, scene->streams[1]));
        wait_for(scene->streams[1]);
        verify(scene, (enum shape)shape, from);
      }
      together(scene->self);
      CUDA(cuGraphDestroy(graph));
    }
    CUDA(cuGraphExecDestroy(executable));
    if (around) CUDA(cuGraphExecDestroy(around));
    CUDA(cuGraphDestroy(parent));
  }
}

static void all(struct rank* self) {
  struct scene scene = {.self = self};
  struct random random = random_from(program_seed(65));
  size_t sizes[SHAPES] = {0};
  for (int stream = 0; stream < STREAMS; stream++) scene.streams[stream] = new_stream();
  for (int buffer = 0; buffer < BUFFERS; buffer++)
    scene.in[buffer] = device_alloc(COUNT * sizeof(int32_t)), scene.out[buffer] = device_alloc(COUNT * sizeof(int32_t));
  for (int buffer = 0; buffer < BUFFERS; buffer++) fill(&scene, buffer);
  for (int number = 0; number < 1 + BEFORE + BEFORE * BEFORE + LONG_ONES; number++) {
    enum before history[LONGEST];
    int length = number == 0 ? 0 : number <= BEFORE ? 1 : number <= BEFORE + BEFORE * BEFORE ? 2 : LONGEST;
    int digits = number - (length > 0) - (length > 1 ? BEFORE : 0);
    for (int i = 0; i < length; i++) {
      history[i] = (enum before)(length < LONGEST ? digits % BEFORE : (int)random_below(&random, BEFORE));
      digits /= BEFORE;
    }
    scene.communicator = world(self, number % SLOTS_MAX);
    compare(&scene, history, length, sizes, number);
    together(self);
    NCCL(ncclCommDestroy(scene.communicator));
  }
  for (int buffer = 0; buffer < BUFFERS; buffer++) device_free(scene.in[buffer]), device_free(scene.out[buffer]);
  for (int stream = 0; stream < STREAMS; stream++) CUDA(cuStreamDestroy_v2(scene.streams[stream]));
}

int main(void) {
  begin("graph_shapes", 280);
  run_ranks("processes", PROCESSES, rank_count(2) > 2 ? 2 : rank_count(2), all, NULL);
  return finish();
}
