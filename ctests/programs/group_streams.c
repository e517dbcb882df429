/* Holds that the calls of one communicator in a group are one operation on all of their streams, whoever runs each: the operation waits
 * for the earlier work of every stream, and every stream waits for the operation. So each stream sees the results of all calls right
 * behind the group, without a wait of the host. A capture that such a group spreads over several streams ends well. Calls of a group
 * must be captured into one graph, or none of them: NCCL refuses others, and the captures go on. No stream waits for the calls of another
 * communicator. Also with CTESTS_BLOCKING=0. Inputs come late on each stream by a random time. CTESTS_OPERATIONS: random groups, eager and captured. */
#include "../support/harness.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STREAMS = 4, CALLS_MAX = 6, LARGEST = 300001, GROUPS = 40 };
enum kind { SUM, AVERAGE, SCALED, BROADCAST, REDUCE, GATHER, RING, TO_ITSELF, KINDS };

struct call {
  enum kind kind;
  int stream, root;
  size_t count;
  int32_t *in, *late, *out;
};

struct scene {
  struct rank* self;
  ncclComm_t communicator;
  ncclRedOp_t doubled;
  CUstream streams[STREAMS];
  struct call calls[CALLS_MAX];
  int count;
  int32_t* snapshots; /* on the device: of each stream and call the first and the last element */
};

static void be_late(void* microseconds) { usleep((useconds_t)(uintptr_t)microseconds); }

static int32_t value(int rank, int place) { return (rank + 1) * 12 + place * 120; }

/* The result of a call on this rank; false if it has none here. */
static bool expected(const struct scene* scene, int place, int32_t* result) {
  const struct call* call = &scene->calls[place];
  int rank = scene->self->rank, ranks = scene->self->ranks, before = (rank + ranks - 1) % ranks;
  int32_t sum = 0;
  for (int other = 0; other < ranks; other++) sum += value(other, place);
  switch (call->kind) {
    case SUM: *result = sum; return true;
    case AVERAGE: *result = sum / ranks; return true;
    case SCALED: *result = 2 * sum; return true;
    case BROADCAST: *result = value(call->root, place); return true;
    case REDUCE: *result = sum; return rank == call->root;
    case GATHER: return false; /* its ends differ: see `verify` */
    case RING: *result = value(before, place); return true;
    case TO_ITSELF: *result = value(rank, place); return true;
    default: return false;
  }
}

static size_t elements_out(const struct scene* scene, const struct call* call) {
  return call->kind == GATHER ? call->count * (size_t)scene->self->ranks : call->count;
}

static ncclResult_t issue(const struct scene* scene, const struct call* call) {
  int rank = scene->self->rank, ranks = scene->self->ranks;
  ncclComm_t to = scene->communicator;
  cudaStream_t stream = as_cuda(scene->streams[call->stream]);
  ncclRedOp_t operation = call->kind == AVERAGE ? ncclAvg : call->kind == SCALED ? scene->doubled : ncclSum;
  switch (call->kind) {
    case BROADCAST:
      count_calls("ncclBroadcast", 1);
      return ncclBroadcast(call->in, call->out, call->count, ncclInt32, call->root, to, stream);
    case REDUCE:
      count_calls("ncclReduce", 1);
      return ncclReduce(call->in, call->out, call->count, ncclInt32, ncclSum, call->root, to, stream);
    case GATHER:
      count_calls("ncclAllGather", 1);
      return ncclAllGather(call->in, call->out, call->count, ncclInt32, to, stream);
    case RING:
    case TO_ITSELF: {
      count_calls("ncclSend", 1), count_calls("ncclRecv", 1);
      int next = call->kind == RING ? (rank + 1) % ranks : rank, before = call->kind == RING ? (rank + ranks - 1) % ranks : rank;
      ncclResult_t sent = ncclSend(call->in, call->count, ncclInt32, next, to, stream);
      ncclResult_t received = ncclRecv(call->out, call->count, ncclInt32, before, to, stream);
      return sent ? sent : received;
    }
    default:
      count_calls("ncclAllReduce", 1);
      return ncclAllReduce(call->in, call->out, call->count, ncclInt32, operation, to, stream);
  }
}

static void end_group(ncclComm_t communicator) {
  count_calls("ncclGroupEnd", 1);
  EQUAL(settled(communicator, ncclGroupEnd()), ncclSuccess);
}

static void group(const struct scene* scene) {
  NCCL(ncclGroupStart());
  for (int place = 0; place < scene->count; place++) EQUAL(issue(scene, &scene->calls[place]), ncclSuccess);
  end_group(scene->communicator);
}

static void fill(int32_t* device, size_t count, int32_t with) {
  int32_t* host = malloc(count * sizeof *host);
  for (size_t i = 0; i < count; i++) host[i] = with;
  upload(device, host, count * sizeof *host);
  free(host);
}

/* Draws the calls of a group, alike on all ranks but for their streams. */
static void draw(struct scene* scene, struct random* alike, struct random* own) {
  static const size_t counts[] = {0, 1, 50, 3000, 16385, 70001, LARGEST};
  scene->count = 1 + (int)random_below(alike, CALLS_MAX);
  for (int place = 0; place < scene->count; place++) {
    struct call* call = &scene->calls[place];
    call->kind = (enum kind)random_below(alike, KINDS);
    call->count = counts[random_below(alike, sizeof counts / sizeof *counts)];
    if (call->count == 0) call->kind = RING; /* NCCL drops collectives without elements, but not messages without. */
    call->root = (int)random_below(alike, (uint64_t)scene->self->ranks);
    call->stream = (int)random_below(own, STREAMS);
  }
}

static void prepare(struct scene* scene) {
  for (int place = 0; place < scene->count; place++) {
    struct call* call = &scene->calls[place];
    fill(call->in, call->count, -1), fill(call->late, call->count, value(scene->self->rank, place));
    fill(call->out, elements_out(scene, call), -1);
  }
}

static void bring_inputs(const struct scene* scene, struct random* own) {
  for (int stream = 0; stream < STREAMS; stream++)
    if (random_below(own, 2)) CUDA(cuLaunchHostFunc(scene->streams[stream], be_late, (void*)(uintptr_t)random_below(own, 2500)));
  /* The group waits for all of its streams, so an input may come on the stream of another call. */
  for (int place = 0; place < scene->count; place++) {
    const struct call* call = &scene->calls[place];
    const struct call* on = &scene->calls[random_below(own, (uint64_t)scene->count)];
    CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)call->in, (CUdeviceptr)call->late, call->count * sizeof(int32_t), scene->streams[on->stream]));
  }
}

/* Whether a call of the group is on this stream: only then the stream waits for the group. */
static bool is_used(const struct scene* scene, int stream) {
  bool used = false;
  for (int place = 0; place < scene->count; place++) used |= scene->calls[place].stream == stream;
  return used;
}

static void look(const struct scene* scene) {
  for (int stream = 0; stream < STREAMS; stream++)
    for (int place = 0; is_used(scene, stream) && place < scene->count; place++) {
      const struct call* call = &scene->calls[place];
      if (call->count == 0) continue;
      int32_t* to = scene->snapshots + 2 * (stream * CALLS_MAX + place);
      size_t last = elements_out(scene, call) - 1;
      CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)to, (CUdeviceptr)call->out, sizeof *to, scene->streams[stream]));
      CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)(to + 1), (CUdeviceptr)(call->out + last), sizeof *to, scene->streams[stream]));
    }
}

static void verify(const struct scene* scene) {
  int32_t seen[2 * STREAMS * CALLS_MAX];
  for (int stream = 0; stream < STREAMS; stream++) wait_for(scene->streams[stream]);
  download(seen, scene->snapshots, sizeof seen);
  for (int stream = 0; stream < STREAMS; stream++)
    for (int place = 0; is_used(scene, stream) && place < scene->count; place++) {
      const int32_t* ends = seen + 2 * (stream * CALLS_MAX + place);
      int32_t first, last;
      if (scene->calls[place].count == 0) continue;
      if (scene->calls[place].kind == GATHER) {
        first = value(0, place), last = value(scene->self->ranks - 1, place);
      } else if (expected(scene, place, &first)) {
        last = first;
      } else {
        continue;
      }
      bool right = EQUAL(ends[0], first) && EQUAL(ends[1], last);
      if (!right) fprintf(stderr, "  call %d (kind %d, %zu elements), seen from stream %d\n", place, (int)scene->calls[place].kind, scene->calls[place].count, stream);
    }
}

static void eager(struct scene* scene) {
  struct random alike = random_from(program_seed(91)), own = random_from(program_seed(92) + (uint64_t)scene->self->rank);
  for (int round = 0; round < *(int*)scene->self->argument; round++) {
    draw(scene, &alike, &own);
    prepare(scene);
    meet(scene->self);
    bring_inputs(scene, &own);
    group(scene);
    look(scene);
    verify(scene);
  }
}

/* The program forks the capture into all streams, and the group alone joins them. */
static CUgraphExec captured_group(const struct scene* scene) {
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  CUevent forked;
  CUstream origin = scene->streams[scene->calls[0].stream];
  CUDA(cuEventCreate(&forked, CU_EVENT_DISABLE_TIMING));
  CUDA(cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CUDA(cuEventRecord(forked, origin));
  for (int stream = 0; stream < STREAMS; stream++)
    if (is_used(scene, stream) && scene->streams[stream] != origin) CUDA(cuStreamWaitEvent(scene->streams[stream], forked, 0));
  for (int place = 0; place < scene->count; place++) {
    const struct call* call = &scene->calls[place];
    CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)call->in, (CUdeviceptr)call->late, call->count * sizeof(int32_t), scene->streams[call->stream]));
  }
  group(scene);
  CUDA(cuStreamEndCapture(origin, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  CUDA(cuEventDestroy_v2(forked));
  return executable;
}

static void captured(struct scene* scene) {
  struct random alike = random_from(program_seed(93)), own = random_from(program_seed(94) + (uint64_t)scene->self->rank);
  for (int round = 0; round < *(int*)scene->self->argument; round++) {
    draw(scene, &alike, &own);
    prepare(scene);
    together(scene->self);
    CUgraphExec executable = captured_group(scene);
    CUstream origin = scene->streams[scene->calls[0].stream];
    meet(scene->self);
    CUDA(cuGraphLaunch(executable, origin));
    wait_for(origin);
    look(scene);
    verify(scene);
    together(scene->self);
    CUDA(cuGraphExecDestroy(executable));
  }
}

/* One call captured and one eager, or each in a capture of its own: the second call is refused, and so is the group. */
static void unlike(struct scene* scene) {
  static const enum kind pairs[][2] = {{SUM, SUM}, {SUM, RING}, {RING, AVERAGE}, {AVERAGE, AVERAGE}, {AVERAGE, SUM}, {BROADCAST, RING}};
  for (size_t pair = 0; pair < sizeof pairs / sizeof *pairs; pair++)
    for (int two = 0; two < 2; two++) {
      scene->count = 2;
      for (int place = 0; place < 2; place++) {
        struct call* call = &scene->calls[place];
        call->kind = pairs[pair][place], call->count = 50, call->root = 0, call->stream = place;
      }
      prepare(scene);
      together(scene->self);
      CUDA(cuStreamBeginCapture_v2(scene->streams[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
      if (two) CUDA(cuStreamBeginCapture_v2(scene->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
      NCCL(ncclGroupStart());
      EQUAL(issue(scene, &scene->calls[0]), ncclSuccess);
      EQUAL(issue(scene, &scene->calls[1]), ncclInvalidUsage);
      CODE(ncclGroupEnd(), ncclInvalidUsage);
      for (int stream = 0; stream <= two; stream++) {
        CUgraph graph = NULL;
        CUDA(cuStreamEndCapture(scene->streams[stream], &graph));
        if (graph) CUDA(cuGraphDestroy(graph));
      }
    }
  int rounds = 2;
  void* argument = scene->self->argument;
  scene->self->argument = &rounds;
  eager(scene);
  scene->self->argument = argument;
}

/* Holds a stream until the host has the other communicator's result. */
static void hold(void* is_free) {
  while (!atomic_load((atomic_bool*)is_free)) usleep(100);
}

/* In one group calls of two communicators: the first one's stream is held until the second one's result is there. */
static void apart(struct scene* scene, ncclComm_t other) {
  static const enum kind kinds[][2] = {{SUM, SUM}, {AVERAGE, SUM}, {SUM, AVERAGE}, {RING, SUM}, {AVERAGE, AVERAGE}};
  struct scene second = {.self = scene->self, .communicator = other, .doubled = scene->doubled};
  memcpy(second.streams, scene->streams, sizeof second.streams);
  for (size_t round = 0; round < sizeof kinds / sizeof *kinds; round++) {
    scene->count = 4;
    for (int place = 0; place < 4; place++) {
      struct call* call = &scene->calls[place];
      call->kind = kinds[round][place % 2], call->count = 50, call->root = 0, call->stream = place;
    }
    prepare(scene);
    for (int place = 0; place < 4; place++) {
      struct call* call = &scene->calls[place];
      fill(call->in, call->count, value(scene->self->rank, place));
    }
    atomic_bool is_free = false;
    meet(scene->self);
    CUDA(cuLaunchHostFunc(scene->streams[0], hold, &is_free));
    NCCL(ncclGroupStart());
    for (int place = 0; place < 4; place++) EQUAL(issue(place < 2 ? scene : &second, &scene->calls[place]), ncclSuccess);
    end_group(scene->communicator);
    EQUAL(settled(other, ncclInProgress), ncclSuccess);
    wait_for(scene->streams[2]);
    wait_for(scene->streams[3]);
    atomic_store(&is_free, true);
    for (int stream = 0; stream < STREAMS; stream++) wait_for(scene->streams[stream]);
    look(scene);
    verify(scene);
  }
}

static void all(struct rank* self) {
  struct scene scene = {.self = self, .communicator = world(self, 0)};
  ncclComm_t other = world(self, 1);
  int32_t two = 2;
  NCCL(ncclRedOpCreatePreMulSum(&scene.doubled, &two, ncclInt32, ncclScalarHostImmediate, scene.communicator));
  for (int stream = 0; stream < STREAMS; stream++) scene.streams[stream] = new_stream();
  scene.snapshots = device_alloc(2 * STREAMS * CALLS_MAX * sizeof(int32_t));
  for (int place = 0; place < CALLS_MAX; place++) {
    struct call* call = &scene.calls[place];
    call->in = device_alloc(LARGEST * sizeof(int32_t)), call->late = device_alloc(LARGEST * sizeof(int32_t));
    call->out = device_alloc(LARGEST * sizeof(int32_t) * (size_t)self->ranks);
  }
  RUN_PART(eager, &scene);
  RUN_PART(captured, &scene);
  RUN_PART(unlike, &scene);
  RUN_PART(apart, &scene, other);
  together(self);
  NCCL(ncclRedOpDestroy(scene.doubled, scene.communicator));
  destroy_each((ncclComm_t[]){other, scene.communicator}, 2);
  for (int place = 0; place < CALLS_MAX; place++)
    device_free(scene.calls[place].in), device_free(scene.calls[place].late), device_free(scene.calls[place].out);
  device_free(scene.snapshots);
  for (int stream = 0; stream < STREAMS; stream++) CUDA(cuStreamDestroy_v2(scene.streams[stream]));
}

int main(int count, char** words) {
  const char* operations = getenv("CTESTS_OPERATIONS");
  int groups = operations ? atoi(operations) : GROUPS;
  choose(count, words);
  begin("group_streams", 280);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, &groups);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, &groups);
  return finish();
}
