/* Holds that other threads of a rank and its registered all-gathers do not disturb each other. One thread captures in global
 * mode, in which unsafe calls of any thread break the capture, while registrations are made and ended. Windlass's worker
 * deregisters freed memory when the communicator ends. Another thread (only with the word `aborts`, where deregistering is slow)
 * aborts the communicator while a call is inside. Ranks are processes, then threads; words as `choose` has them. */
#include "../support/gathers.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { MIB = 1 << 20, INPUTS = 72 /* more than Windlass keeps registered */, OUTPUTS = 8 };

/* Slots of share_id, one for each communicator that lives at a time. */
enum { FIRST, SECOND };

struct place {
  struct memory inputs[INPUTS], output;
  size_t count, room;
};

static struct place place_made(struct rank* self) {
  struct place place = {.count = gather_count(self, 0)};
  place.room = gather_room(self, place.count);
  for (int i = 0; i < INPUTS; i++) place.inputs[i] = memory_alloc(self, i % 2 ? NCCLS : MAPPED, place.count);
  place.output = memory_alloc(self, NCCLS, OUTPUTS * place.room);
  return place;
}

static void place_freed(struct rank* self, struct place* place) {
  for (int i = 0; i < INPUTS; i++) memory_free(self, &place->inputs[i]);
  memory_free(self, &place->output);
}

static struct gather gather_at(const struct rank* self, const struct place* place, uint64_t number, uint64_t key) {
  return gather_into(self, place->inputs[number % INPUTS].at, &place->output, number % OUTPUTS * place->room, place->count, key);
}

/* Enough calls that the ranks register. */
static void first_few(struct rank* self, ncclComm_t communicator, const struct place* place) {
  for (uint64_t round = 0; round < 6; round++) {
    struct gather gather = gather_at(self, place, 0, 10 + round);
    gather_run(self, communicator, &gather);
  }
}

struct capturing {
  struct rank* self;
  CUstream stream;
  char* memory;
  pthread_barrier_t turns;
};

static void* captures(void* argument) {
  struct capturing* capturing = argument;
  CUgraph graph = NULL;
  CUDA(cuCtxSetCurrent(capturing->self->context));
  CUDA(cuStreamBeginCapture_v2(capturing->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  pthread_barrier_wait(&capturing->turns);
  CUDA(cuMemsetD8Async((CUdeviceptr)(uintptr_t)capturing->memory, 1, MIB, capturing->stream));
  pthread_barrier_wait(&capturing->turns);
  CHECK(cuStreamEndCapture(capturing->stream, &graph) == CUDA_SUCCESS && graph && "nothing has broken the capture");
  if (graph) CUDA(cuGraphDestroy(graph));
  return NULL;
}

/* Waits in relaxed mode, so that this thread's wait does not break the capture of the other. */
static void wait_aside(CUstream stream) {
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUDA(cuThreadExchangeStreamCaptureMode(&mode));
  wait_for(stream);
  CUDA(cuThreadExchangeStreamCaptureMode(&mode));
}

/* Registered calls over more memory than is kept registered, and a destroy, while another thread captures. */
static void captured_beside(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct place place = place_made(self);
  struct capturing capturing = {.self = self, .stream = new_stream(), .memory = device_alloc(MIB)};
  struct gather gathers[INPUTS];
  pthread_t thread;
  first_few(self, communicator, &place);
  for (uint64_t i = 0; i < INPUTS; i++) {
    gathers[i] = gather_at(self, &place, i, 100 + i);
    gather_prepare(&gathers[i]);
  }
  meet(self);
  pthread_barrier_init(&capturing.turns, NULL, 2);
  if (!CHECK(pthread_create(&thread, NULL, captures, &capturing) == 0)) return;
  pthread_barrier_wait(&capturing.turns);
  meet(self);
  for (int i = 0; i < INPUTS; i++) {
    gather_launch(&gathers[i], communicator, self->stream);
    if (i % 8 == 7) wait_aside(self->stream);
  }
  /* On GPUs NCCL's destroy waits for the device. */
  if (!on_gpus()) NCCL(ncclCommDestroy(communicator));
  meet(self);
  pthread_barrier_wait(&capturing.turns);
  pthread_join(thread, NULL);
  meet(self);
  for (int i = INPUTS - OUTPUTS; i < INPUTS; i++) gather_verify(&gathers[i], self);
  if (on_gpus()) NCCL(ncclCommDestroy(communicator));
  pthread_barrier_destroy(&capturing.turns);
  place_freed(self, &place);
  device_free(capturing.memory);
  CUDA(cuStreamDestroy_v2(capturing.stream));
}

struct working {
  struct rank* self;
  ncclComm_t communicator;
  struct place place;
  atomic_int calls;
  atomic_bool stops;
};

/* After the first 66 or so each call ends a registration. */
static void* works(void* argument) {
  struct working* working = argument;
  CUDA(cuCtxSetCurrent(working->self->context));
  while (!atomic_load(&working->stops)) {
    struct gather gather = gather_at(working->self, &working->place, (uint64_t)atomic_fetch_add(&working->calls, 1), 0);
    /* The call that is aborted may return anything. */
    (void)ncclAllGather(gather.send, gather.receive, gather.count, gather.type, working->communicator, as_cuda(working->self->stream));
    wait_for(working->self->stream);
  }
  return NULL;
}

/* Waits until that thread is surely inside a call, which takes it four times as long as the sleep below, or in a wait. */
static void until_inside(struct working* working) {
  int seen, before = 0;
  do {
    while ((seen = atomic_load(&working->calls)) < 66 || seen == before) usleep(100);
    before = seen;
    usleep(50000);
  } while (atomic_load(&working->calls) != seen);
}

static void aborted_inside(struct rank* self) {
  for (int round = 0; round < 2; round++) {
    struct working working = {.self = self, .communicator = world(self, FIRST), .place = place_made(self)};
    pthread_t thread;
    first_few(self, working.communicator, &working.place);
    if (!CHECK(pthread_create(&thread, NULL, works, &working) == 0)) return;
    /* No rank aborts before all are inside: one that came later would wait for ever. In the first round all abort at once, in
     * the second rank 0 before the others. */
    until_inside(&working);
    meet(self);
    if (round == 1 && self->rank) meet(self);
    until_inside(&working);
    atomic_store(&working.stops, true);
    NCCL(ncclCommAbort(working.communicator));
    if (round == 1 && !self->rank) meet(self);
    pthread_join(thread, NULL);
    count_calls("ncclAllGather", atomic_load(&working.calls));
    meet(self);
    ncclComm_t next = world(self, SECOND);
    first_few(self, next, &working.place);
    NCCL(ncclCommDestroy(next));
    place_freed(self, &working.place);
    together(self);
  }
}

/* Memory is freed by the driver's calls, without a call of NCCL. The worker has begun to deregister it when the communicator
 * ends, and has more to do. */
static void ended_while_freed(struct rank* self) {
  enum { FREED = 6 };
  for (int round = 0; round < 3; round++) {
    ncclComm_t communicator = world(self, FIRST);
    struct place place = place_made(self);
    first_few(self, communicator, &place);
    for (uint64_t i = 0; i < 2 * FREED; i++) {
      struct gather gather = gather_at(self, &place, i, 1000 + i);
      gather_run(self, communicator, &gather);
    }
    meet(self);
    for (int i = 0; i < 2 * FREED; i += 2) {
      memory_free(self, &place.inputs[i]);
      place.inputs[i] = memory_alloc(self, PLAIN, MIB);
    }
    /* Any moment is right; the worker is most likely deregistering now. */
    usleep(200000);
    meet(self);
    if (round == 0) NCCL(ncclCommDestroy(communicator));
    /* In round 1 rank 0 aborts before the others, else all end at once. */
    if (round == 1 && self->rank) meet(self);
    if (round) NCCL(ncclCommAbort(communicator));
    if (round == 1 && !self->rank) meet(self);
    meet(self);
    place_freed(self, &place);
    together(self);
  }
}

static void all(struct rank* self) {
  RUN_PART(captured_beside, self);
  RUN_PART(ended_while_freed, self);
}

static void aborts(struct rank* self) {
  RUN_PART(aborted_inside, self);
  RUN_PART(ended_while_freed, self);
}

int main(int count, char** words) {
  begin("registered_beside", 280);
  bool is_asked = count > 1 && !strcmp(words[1], "aborts");
  choose(count - is_asked, words + is_asked);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, is_asked ? aborts : all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, is_asked ? aborts : all, NULL);
  return finish();
}
