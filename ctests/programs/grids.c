/* Holds that the number of blocks of a call's kernels depends on the call and on what its ranks have agreed on, not on which
 * other communicators live. Cases: with none, with many idle ones of the same ranks, and where one rank is in more of them than
 * its peer, eager and in graphs. Collectives have equal grids on all ranks; the largest has as many blocks as the argument says.
 * Runs on the simulator, which records launches. */
#define _GNU_SOURCE
#include "../support/collective.h"
#include "../support/messages.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { IDLE = 40, ROOM = 4, GROUP = 3, KIB = 1024 };

/* One call, a group of collectives of equal bytes, or a message to the next rank beside one from the rank before. */
enum shape { CALL, TOGETHER, RING };

struct step { enum shape shape; enum collective which; size_t bytes; };

/* Few and small, just enough for a grid of all blocks: on the simulator each warp is a thread. */
static const struct step STEPS[] = {
  {CALL, ALL_REDUCE, 4},          {CALL, ALL_REDUCE, 16 * KIB},     {CALL, ALL_REDUCE, 96 * KIB},
  {CALL, ALL_GATHER, 4},          {CALL, ALL_GATHER, 16 * KIB},     {CALL, ALL_GATHER, 64 * KIB},
  {CALL, REDUCE_SCATTER, 4},      {CALL, REDUCE_SCATTER, 16 * KIB}, {CALL, REDUCE_SCATTER, 64 * KIB},
  {CALL, BROADCAST, 4},           {CALL, BROADCAST, 16 * KIB},      {CALL, BROADCAST, 48 * KIB},
  {CALL, ALL_TO_ALL, 16 * KIB},   {CALL, ALL_TO_ALL, 128 * KIB},    {RING, COLLECTIVES, 4},
  {RING, COLLECTIVES, 64 * KIB},  {RING, COLLECTIVES, 256 * KIB},   {TOGETHER, COLLECTIVES, KIB},
  {TOGETHER, COLLECTIVES, 32 * KIB},
};
enum { STEPS_COUNT = sizeof STEPS / sizeof *STEPS, MODES = 2 };
static const char* const MODE_NAMES[MODES] = {"eager", "graph"};

/* The grids of one step's kernels. */
struct grids { size_t count; unsigned blocks[ROOM]; };
struct seen { struct grids of[MODES][STEPS_COUNT]; };

/* Written by all ranks, which are processes, so it is mapped before they start. */
static struct seen* shared;
static unsigned largest;

/* The grids of Windlass's kernels on this rank's device since the last call of `take`. */
static struct grids take(void) {
  static CUresult (*taking)(const char*, unsigned*, size_t, size_t*);
  struct grids grids = {0};
  if (!taking) *(void**)&taking = dlsym(RTLD_DEFAULT, "simTakeGrids");
  if (!CHECK(taking != NULL)) return grids;
  CUDA(taking("ncclWindlass", grids.blocks, ROOM, &grids.count));
  return grids;
}

/* The buffers of a step. */
struct work { const struct step* step; int count; struct transfer list[GROUP]; struct message from, to; };

/* Two kinds only, which two kernels run. NCCL would run a group of more kinds. */
static enum collective member(const struct step* step, int i) {
  static const enum collective group[GROUP] = {ALL_REDUCE, ALL_REDUCE, ALL_GATHER};
  return step->shape == TOGETHER ? group[i] : step->which;
}

static struct work work_prepare(int rank, int ranks, const struct step* step) {
  struct work work = {.step = step, .count = step->shape == TOGETHER ? GROUP : step->shape == CALL};
  for (int i = 0; i < work.count; i++) {
    work.list[i] = (struct transfer){.which = member(step, i), .type = ncclFloat, .op = ncclSum, .count = step->bytes / sizeof(float),
                                     .rank = rank, .ranks = ranks, .key = step->bytes + (uint64_t)i};
    transfer_prepare(&work.list[i]);
  }
  if (step->shape != RING) return work;
  work.from = message_to_send((uint64_t)rank, step->bytes, 0);
  work.to = message_to_receive((uint64_t)((rank + ranks - 1) % ranks), step->bytes, 0);
  return work;
}

static void work_issue(const struct work* work, int rank, int ranks, ncclComm_t communicator, CUstream stream) {
  if (work->step->shape != CALL) NCCL(ncclGroupStart());
  for (int i = 0; i < work->count; i++) transfer_launch(&work->list[i], communicator, stream);
  if (work->step->shape == RING) {
    message_send(&work->from, (rank + 1) % ranks, communicator, stream);
    message_receive(&work->to, (rank + ranks - 1) % ranks, communicator, stream);
  }
  if (work->step->shape != CALL) NCCL(ncclGroupEnd());
}

static void work_verify(struct rank* self, struct work* work, int rank, int ranks) {
  for (int i = 0; i < work->count; i++) {
    transfer_verify(&work->list[i], self);
    transfer_clear(&work->list[i]);
  }
  if (work->step->shape != RING) return;
  message_verify(&work->to, self);
  message_clear(&work->to, (uint64_t)((rank + ranks - 1) % ranks));
}

static void work_release(struct work* work) {
  for (int i = 0; i < work->count; i++) transfer_release(&work->list[i]);
  if (work->step->shape != RING) return;
  message_release(&work->from);
  message_release(&work->to);
}

static CUgraphExec capture(const struct work* work, int rank, int ranks, ncclComm_t communicator, CUstream stream) {
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  CUDA(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  work_issue(work, rank, ranks, communicator, stream);
  CUDA(cuStreamEndCapture(stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
  return executable;
}

/* Runs all steps; returns the grids of each. */
static struct seen look(struct rank* self, int rank, int ranks, ncclComm_t communicator) {
  struct seen seen = {0};
  take();
  for (int i = 0; i < STEPS_COUNT; i++) {
    struct work work = work_prepare(rank, ranks, &STEPS[i]);
    work_issue(&work, rank, ranks, communicator, self->stream);
    wait_for(self->stream);
    seen.of[0][i] = take();
    work_verify(self, &work, rank, ranks);
    CUgraphExec executable = capture(&work, rank, ranks, communicator, self->stream);
    CUDA(cuGraphLaunch(executable, self->stream));
    wait_for(self->stream);
    seen.of[1][i] = take();
    work_verify(self, &work, rank, ranks);
    CUDA(cuGraphExecDestroy(executable));
    work_release(&work);
  }
  return seen;
}

static const char* name_of(const struct step* step) {
  if (step->shape == CALL) return collective_name(step->which);
  return step->shape == RING ? "ring of sends" : "group of collectives";
}

static void say(const char* who, const struct grids* grids) {
  fprintf(stderr, "  %s:", who);
  for (size_t i = 0; i < grids->count && i < ROOM; i++) fprintf(stderr, " %u", grids->blocks[i]);
  fprintf(stderr, grids->count ? " blocks\n" : " no kernel of Windlass\n");
}

/* Holds that both have the same grids in every step. */
static void hold_equal(const char* one_name, const struct seen* one, const char* other_name, const struct seen* other) {
  for (int place = 0; place < MODES * STEPS_COUNT; place++) {
    const struct grids *left = &one->of[place / STEPS_COUNT][place % STEPS_COUNT], *right = &other->of[place / STEPS_COUNT][place % STEPS_COUNT];
    if (CHECK(memcmp(left, right, sizeof *left) == 0 && "the same grids")) continue;
    const struct step* step = &STEPS[place % STEPS_COUNT];
    fprintf(stderr, "  %s of %zu bytes, %s\n", name_of(step), step->bytes, MODE_NAMES[place / STEPS_COUNT]);
    say(one_name, left);
    say(other_name, right);
  }
}

/* Holds that kernels of Windlass ran each step, and that the largest grid of a collective has `largest` blocks. All-to-all is
 * left out: more blocks, which wait for nobody, copy what a rank sends to itself. */
static void hold_largest(const struct seen* seen) {
  unsigned most = 0;
  for (int place = 0; place < MODES * STEPS_COUNT; place++) {
    const struct grids* grids = &seen->of[place / STEPS_COUNT][place % STEPS_COUNT];
    CHECK(grids->count > 0 && grids->count <= ROOM);
    if (STEPS[place % STEPS_COUNT].which == ALL_TO_ALL) continue;
    for (size_t i = 0; i < grids->count && i < ROOM; i++) most = grids->blocks[i] > most ? grids->blocks[i] : most;
  }
  EQUAL(most, largest);
}

/* Every step moves equal bytes on every rank, so grids of messages are equal, too. */
static void hold_on_all_ranks(struct rank* self, int rank, int ranks, const struct seen* seen) {
  shared[rank] = *seen;
  meet(self);
  for (int other = 0; rank >= 0 && other < ranks; other++) {
    if (other != rank) hold_equal("here", seen, "on another rank", &shared[other]);
  }
  meet(self);
}

/* A communicator of all ranks that has run one call and then stays idle. */
static ncclComm_t used_once(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 1, .rank = self->rank, .ranks = self->ranks};
  transfer_run(&transfer, communicator, self);
  return communicator;
}

/* Looks with no other communicator, with idle ones, and after these have ended. */
static void alike(struct rank* self) {
  ncclComm_t communicator = world(self, 0), idle[IDLE];
  struct seen alone = look(self, self->rank, self->ranks, communicator);
  hold_largest(&alone);
  hold_on_all_ranks(self, self->rank, self->ranks, &alone);
  for (int i = 0; i < IDLE; i++) idle[i] = used_once(self);
  struct seen among = look(self, self->rank, self->ranks, communicator);
  hold_equal("alone", &alone, "among idle ones", &among);
  hold_on_all_ranks(self, self->rank, self->ranks, &among);
  destroy_each(idle, IDLE);
  struct seen after = look(self, self->rank, self->ranks, communicator);
  hold_equal("alone", &alone, "after idle ones", &after);
  NCCL(ncclCommDestroy(communicator));
}

/* A communicator of ranks 0 and `other`; NULL on the third rank. */
static ncclComm_t pair_with(struct rank* self, int other) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, 0, 0);
  if (self->rank == 0 || self->rank == other) NCCL(ncclCommInitRank(&communicator, 2, id, self->rank != 0));
  return communicator;
}

static void run_pair(struct rank* self, ncclComm_t communicator) {
  if (!communicator) return;
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 1, .rank = self->rank != 0, .ranks = 2};
  transfer_run(&transfer, communicator, self);
}

/* Of three ranks two run the steps. The first of them is in two more communicators than the second. */
static void unlike(struct rank* self) {
  ncclComm_t communicator = pair_with(self, 1), more[2];
  struct seen alone = {0}, among = {0};
  int rank = self->rank < 2 ? self->rank : -1;
  if (communicator) alone = look(self, rank, 2, communicator);
  if (communicator) hold_largest(&alone);
  for (int i = 0; i < 2; i++) run_pair(self, more[i] = pair_with(self, 2));
  meet(self);
  if (communicator) among = look(self, rank, 2, communicator);
  if (communicator) hold_equal("alone", &alone, "with one rank in more communicators", &among);
  if (rank >= 0) shared[rank] = among;
  meet(self);
  if (rank >= 0) hold_equal("here", &among, "on the other rank", &shared[!rank]);
  for (int i = 0; i < 2; i++) {
    if (more[i]) NCCL(ncclCommDestroy(more[i]));
  }
  if (communicator) NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** words) {
  begin("grids", 280);
  if (on_gpus() || count < 3) skip("on the simulator; which part, and how many blocks the largest has");
  largest = (unsigned)atoi(words[2]);
  shared = mmap(NULL, RANKS_MAX * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  bool is_unlike = strcmp(words[1], "unlike") == 0;
  run_ranks(words[1], PROCESSES, rank_count(is_unlike ? 3 : 2), is_unlike ? unlike : alike, NULL);
  return finish();
}
