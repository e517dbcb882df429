/* Holds: all-gathers that are large enough to go into peers' windows give what they must, whatever their buffers lie in: in and out of
 * place, in one window and in two, at any offset, beside windows, after these have ended and come again, captured, and
 * grouped. And, with the word "unlike" (Windlass that goes directly; NCCL alone would hang or mix up memory): where ranks' buffers lie in
 * unlike windows, at unlike places, or on some ranks in none. */
#include "../support/tuning.h"
#include "../support/windows.h"

#include <string.h>

enum { PLACES = 4096, EACH = 2 };

/* By name: what NCCL alone cannot do; that all sizes are fast, on devices that nobody measured. */
static bool unlike, tuned;

/* Elements of one byte that each rank gives: 12 MiB in all and whole vectors, and so many more. */
static size_t count_of(const struct rank* self, size_t more) { return (gather_count(self, 0) * 3 / 2 + 15) / 16 * 16 + more; }

/* Bytes that a gather's buffers take, the output first, its input behind it. */
static size_t room(const struct rank* self) { return (gather_room(self, count_of(self, 64)) + count_of(self, 64) + 2 * PLACES) / PLACES * PLACES; }

static struct gather gather_at(const struct rank* self, const struct memory* memory, size_t offset, bool in_place, size_t more, uint64_t key) {
  size_t count = count_of(self, more), behind = (gather_room(self, count) + PLACES - 1) / PLACES * PLACES;
  return gather_into(self, in_place ? NULL : memory->at + offset + behind, memory, offset, count, key);
}

static void run_at(struct rank* self, ncclComm_t communicator, const struct memory* memory, size_t offset, bool in_place, size_t more, uint64_t key) {
  struct gather gather = gather_at(self, memory, offset, in_place, more, key);
  gather_run(self, communicator, &gather);
}

static ncclComm_t begun(struct rank* self, struct memory* memory, size_t bytes) {
  *memory = memory_alloc(self, NCCLS, bytes);
  return world(self, 0);
}

static void in_windows(struct rank* self) {
  struct memory memory;
  ncclComm_t communicator = begun(self, &memory, room(self) + PLACES);
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  for (int variant = 0; variant < 4; variant++) run_at(self, communicator, &memory, variant & 2 ? PLACES : 0, variant & 1, 0, 10 + (uint64_t)variant);
  /* No whole vectors. */
  run_at(self, communicator, &memory, 4, false, 3, 20);
  meet(self);
  window_end(communicator, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* A window for each buffer; then only the output is in one, then none is. */
static void two_windows(struct rank* self) {
  struct memory memory;
  ncclComm_t communicator = begun(self, &memory, room(self));
  struct gather gather = gather_at(self, &memory, 0, false, 0, 30);
  size_t behind = (size_t)(gather.send - memory.at);
  ncclWindow_t windows[] = {window_over(communicator, memory.at, behind), window_over(communicator, memory.at + behind, memory.bytes - behind)};
  for (int left = EACH; left >= 0; left--) {
    gather.key = 30 + (uint64_t)left;
    gather_run(self, communicator, &gather);
    meet(self);
    if (left > 0) window_end(communicator, windows[left - 1]);
  }
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* Windows end, come again, and blocks of the same size do, while gathers go on. */
static void come_and_go(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  for (uint64_t round = 0; round < 3; round++) {
    struct memory memory = memory_alloc(self, NCCLS, room(self));
    for (uint64_t again = 0; again < 2; again++) {
      ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
      run_at(self, communicator, &memory, 0, false, 0, 40 + 4 * round + again);
      meet(self);
      window_end(communicator, window);
    }
    memory_free(self, &memory);
  }
  NCCL(ncclCommDestroy(communicator));
}

/* A graph of several gathers, launched again and again between others. */
static void captured(struct rank* self) {
  struct memory memory;
  ncclComm_t communicator = begun(self, &memory, EACH * room(self));
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  struct gather gathers[EACH];
  CUgraph graph;
  CUgraphExec runnable;
  for (int i = 0; i < EACH; i++) gathers[i] = gather_at(self, &memory, (size_t)i * room(self), i & 1, 0, 0);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  for (int i = 0; i < EACH; i++) gather_launch(&gathers[i], communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&runnable, graph, 0));
  for (uint64_t round = 0; round < 3; round++) {
    for (int i = 0; i < EACH; i++) {
      gathers[i].key = 80 + EACH * round + (uint64_t)i;
      gather_prepare(&gathers[i]);
    }
    together(self);
    CUDA(cuGraphLaunch(runnable, self->stream));
    wait_for(self->stream);
    together(self);
    for (int i = 0; i < EACH; i++) gather_verify(&gathers[i], self);
    if (round == 1) gather_run(self, communicator, &gathers[0]);
  }
  CUDA(cuGraphExecDestroy(runnable));
  CUDA(cuGraphDestroy(graph));
  meet(self);
  window_end(communicator, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

static void grouped(struct rank* self) {
  struct memory memory;
  ncclComm_t communicator = begun(self, &memory, EACH * room(self));
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  struct gather gathers[EACH];
  for (int i = 0; i < EACH; i++) {
    gathers[i] = gather_at(self, &memory, (size_t)i * room(self), i & 1, 0, 100 + (uint64_t)i);
    gather_prepare(&gathers[i]);
  }
  together(self);
  NCCL(ncclGroupStart());
  for (int i = 0; i < EACH; i++) gather_launch(&gathers[i], communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  for (int i = 0; i < EACH; i++) gather_verify(&gathers[i], self);
  window_end(communicator, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* One rank's buffers lie elsewhere than the others': in the same window, in another, in none, at no whole vectors. */
static void unlike_buffers(struct rank* self) {
  struct memory memory, beside = memory_alloc(self, PLAIN, room(self));
  ncclComm_t communicator = begun(self, &memory, 2 * room(self) + PLACES);
  ncclWindow_t windows[] = {window_over(communicator, memory.at, room(self) + PLACES),
                            window_over(communicator, memory.at + room(self) + PLACES, room(self))};
  for (int variant = 0; variant < 4; variant++) {

    size_t offsets[] = {PLACES, room(self) + PLACES, 0, 4};
    bool is_apart = self->rank == variant % self->ranks;
    run_at(self, communicator, is_apart && variant == 2 ? &beside : &memory, is_apart ? offsets[variant] : 0, false, 0, 120 + (uint64_t)variant);
  }
  meet(self);
  for (int i = 0; i < 2; i++) window_end(communicator, windows[i]);
  memory_free(self, &memory);
  memory_free(self, &beside);
  NCCL(ncclCommDestroy(communicator));
}

/* The window itself begins elsewhere in each rank's block. */
static void unlike_windows(struct rank* self) {
  struct memory memory;
  ncclComm_t communicator = begun(self, &memory, room(self) + (size_t)self->ranks * PLACES);
  size_t offset = (size_t)self->rank * PLACES;
  ncclWindow_t window = window_over(communicator, memory.at + offset, room(self));
  for (int variant = 0; variant < 2; variant++) run_at(self, communicator, &memory, offset, variant & 1, 0, 140 + (uint64_t)variant);
  meet(self);
  window_end(communicator, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* One rank calls a gather before it registers the communicator's first window, where the others do after: none may take it for one of
 * those that ask for windows. Then all do. */
static void out_of_turn(struct rank* self) {
  struct memory memory;
  ncclComm_t communicator = begun(self, &memory, room(self));
  struct gather gather = gather_at(self, &memory, 0, false, 0, 160);
  gather_prepare(&gather);
  together(self);
  ncclWindow_t window = NULL;
  if (self->rank > 0) window = window_over(communicator, memory.at, memory.bytes);
  gather_launch(&gather, communicator, self->stream);
  if (self->rank == 0) window = window_over(communicator, memory.at, memory.bytes);
  wait_for(self->stream);
  together(self);
  gather_verify(&gather, self);
  run_at(self, communicator, &memory, 0, true, 0, 161);
  meet(self);
  window_end(communicator, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

static void write_table(const struct rank* self) {
  FILE* file = tuning_begin(self);
  if (!file) return;
  tuning_row(file, self, "all_gather", "fast_bytes_max", "64M");
  tuning_end(file);
}

static void all(struct rank* self) {
  int version = 0;
  if (tuned) write_table(self); /* before the first call, which reads it */
  NCCL(ncclGetVersion(&version));
  if (version < 22803) return;
  RUN_PART(in_windows, self);
  RUN_PART(two_windows, self);
  RUN_PART(come_and_go, self);
  RUN_PART(captured, self);
  RUN_PART(grouped, self);
  if (!unlike) return;
  RUN_PART(unlike_buffers, self);
  RUN_PART(unlike_windows, self);
  RUN_PART(out_of_turn, self);
}

int main(int count, char** words) {
  begin("window_direct", 280);
  choose(count, words);
  for (int i = 1; i < count; i++) unlike |= strcmp(words[i], "unlike") == 0, tuned |= strcmp(words[i], "tuned") == 0;
  int ranks = rank_count(3);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
