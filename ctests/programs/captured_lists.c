/* Holds that any number of captured groups can live whose messages do not fit a kernel's parameters: 500 graphs of 150 messages each way
 * move their own bytes at every replay. And any number can be captured and destroyed while the driver has not yet told of their end.
 * Captures are global: whatever a group allocates must be allowed in one. CTESTS_CAPTURES: graphs that are destroyed, 500. */
#include "../support/harness.h"

#include <stdlib.h>
#include <string.h>

enum { MESSAGES = 150, COUNT = 20, ALL = MESSAGES * COUNT, LIVING = 500 };

struct scene {
  struct rank* self;
  ncclComm_t communicator;
  int *in, *out;
};

/* Message i of graph `which` lands at place (i + which) % MESSAGES. */
static void exchange(const struct scene* scene, int which) {
  int next = (scene->self->rank + 1) % scene->self->ranks;
  int last = (scene->self->rank + scene->self->ranks - 1) % scene->self->ranks;
  CUstream stream = scene->self->stream;
  NCCL(ncclGroupStart());
  for (int i = 0; i < MESSAGES; i++) {
    NCCL(ncclSend(scene->in + i * COUNT, COUNT, ncclInt32, next, scene->communicator, as_cuda(stream)));
    NCCL(ncclRecv(scene->out + (i + which) % MESSAGES * COUNT, COUNT, ncclInt32, last, scene->communicator, as_cuda(stream)));
  }
  NCCL(ncclGroupEnd());
}

static int element(int rank, int index) { return rank * 1000003 + index * 7 + 1; }

/* Compares all that has come, and forgets it. */
static void check(const struct scene* scene, int which) {
  int host[ALL], last = (scene->self->rank + scene->self->ranks - 1) % scene->self->ranks, wrong = 0;
  wait_for(scene->self->stream);
  download(host, scene->out, sizeof host);
  for (int i = 0; i < ALL; i++) wrong += host[(i + which * COUNT) % ALL] != element(last, i);
  EQUAL(wrong, 0);
  record(scene->self, host, sizeof host);
  device_fill(scene->out, 0, sizeof host);
}

static CUgraph capture(const struct scene* scene, int which) {
  CUgraph graph = NULL;
  CUDA(cuStreamBeginCapture_v2(scene->self->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  exchange(scene, which);
  CUDA(cuStreamEndCapture(scene->self->stream, &graph));
  return graph;
}

static CUgraphExec instantiate(CUgraph graph) {
  CUgraphExec executable = NULL;
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  return executable;
}

static void replay(const struct scene* scene, CUgraphExec executable, int which) {
  CUDA(cuGraphLaunch(executable, scene->self->stream));
  check(scene, which);
}

/* The graphs of one communicator live together. Eager groups beside them have room, too. */
static void living(struct rank* self, const struct scene* scene) {
  CUgraphExec graphs[LIVING];
  for (int which = 0; which < LIVING; which++) graphs[which] = instantiate(capture(scene, which));
  for (int which = LIVING; which-- > 0;) replay(scene, graphs[which], which);
  exchange(scene, 3);
  check(scene, 3);
  for (int which = 0; which < LIVING; which++) CUDA(cuGraphExecDestroy(graphs[which]));
  meet(self);
}

/* One capture after the other, each destroyed at once. */
static void destroyed(struct rank* self, const struct scene* scene) {
  const char* wanted = getenv("CTESTS_CAPTURES");
  int captures = wanted ? atoi(wanted) : 500;
  for (int which = 0; which < captures; which++) {
    CUgraph graph = capture(scene, which);
    if (which % 10 == 0) CUDA(cuGraphExecDestroy(instantiate(graph)));
    else CUDA(cuGraphDestroy(graph));
  }
  exchange(scene, 5);
  check(scene, 5);
  CUgraphExec last = instantiate(capture(scene, 7));
  replay(scene, last, 7);
  CUDA(cuGraphExecDestroy(last));
  meet(self);
}

static void body(struct rank* self) {
  struct scene scene = {.self = self, .communicator = world(self, 0)};
  int host[ALL];
  for (int i = 0; i < ALL; i++) host[i] = element(self->rank, i);
  scene.in = device_alloc(sizeof host);
  scene.out = device_alloc(sizeof host);
  upload(scene.in, host, sizeof host);
  exchange(&scene, 0);
  check(&scene, 0);
  RUN_PART(living, self, &scene);
  RUN_PART(destroyed, self, &scene);
  device_free(scene.in);
  device_free(scene.out);
  NCCL(ncclCommDestroy(scene.communicator));
}

int main(int count, char** arguments) {
  begin("captured_lists", 60);
  choose(count, arguments);
  run_ranks("processes", PROCESSES, rank_count(2), body, NULL);
  return finish();
}
