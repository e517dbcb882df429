/* Holds that collectives of six communicators, each on its own stream, finish with right results although half of the ranks
 * launch them in the opposite order. Cases: small and large ones, eager and from graphs, also while other work fills the device
 * of some ranks. */
#include "../support/collective.h"
#include "../support/tuning.h"

#include <stdlib.h>
#include <unistd.h>

enum { COMMUNICATORS = 6, KINDS = 5, ROUNDS = 3 };

/* PTX of a kernel in which every thread spins for `nanoseconds`. The driver compiles it. */
static const char occupying[] =
  ".version 7.0\n.target sm_70\n.address_size 64\n"
  ".visible .entry occupy(.param .u64 nanoseconds) {\n"
  ".reg .u64 %began, %now, %wanted;\n.reg .pred %early;\n"
  "ld.param.u64 %wanted, [nanoseconds];\nmov.u64 %began, %globaltimer;\n"
  "again: mov.u64 %now, %globaltimer;\nsub.u64 %now, %now, %began;\nsetp.lt.u64 %early, %now, %wanted;\n@%early bra again;\nret;\n}\n";

struct occupant { CUmodule module; CUfunction function; int blocks; };

/* Empty on simulators, which have no compiler. */
static struct occupant occupant_made(const struct rank* self) {
  struct occupant occupant = {0};
  if (!on_gpus()) return occupant;
  CUDA(cuModuleLoadData(&occupant.module, occupying));
  CUDA(cuModuleGetFunction(&occupant.function, occupant.module, "occupy"));
  CUDA(cuDeviceGetAttribute(&occupant.blocks, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self->device));
  occupant.blocks *= 2; /* of 1024 threads each: all that a multiprocessor holds */
  return occupant;
}

static void nap(void* milliseconds) { usleep(*(useconds_t*)milliseconds * 1000); }

static void occupy(const struct occupant* occupant, CUstream stream) {
  static useconds_t milliseconds = 3;
  if (!occupant->module) {
    CUDA(cuLaunchHostFunc(stream, nap, &milliseconds));
    return;
  }
  unsigned long long nanoseconds = milliseconds * 1000000ull;
  void* parameters[] = {&nanoseconds};
  CUDA(cuLaunchKernel(occupant->function, (unsigned)occupant->blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL));
}

struct lane { ncclComm_t communicator; CUstream stream; CUgraphExec executable; struct transfer list[KINDS]; };

static void lane_prepare(struct rank* self, struct lane* lane, uint64_t number, size_t count) {
  static const enum collective kinds[KINDS] = {ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE};
  for (int i = 0; i < KINDS; i++) {
    lane->list[i] = (struct transfer){.which = kinds[i], .type = ncclFloat, .op = ncclSum, .count = count, .rank = self->rank,
                                      .root = (int)number % self->ranks, .ranks = self->ranks, .key = 10 * number + (uint64_t)i};
    transfer_prepare(&lane->list[i]);
  }
}

static void lane_issue(struct lane* lane) {
  for (int i = 0; i < KINDS; i++) transfer_launch(&lane->list[i], lane->communicator, lane->stream);
}

static void lane_capture(struct lane* lane) {
  CUgraph graph = NULL;
  CUDA(cuStreamBeginCapture_v2(lane->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  lane_issue(lane);
  CUDA(cuStreamEndCapture(lane->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&lane->executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
}

/* Both halves of the ranks have launched their first three communicators before they begin with the others. */
static void round_of(struct rank* self, struct lane* lanes, const struct occupant* occupant, bool in_graphs) {
  for (int i = 0; i < COMMUNICATORS * KINDS; i++) transfer_clear(&lanes[i / KINDS].list[i % KINDS]);
  for (int i = 0; i < COMMUNICATORS; i++) {
    struct lane* lane = &lanes[self->rank % 2 ? COMMUNICATORS - 1 - i : i];
    if (self->rank % 3 == 0) occupy(occupant, lane->stream);
    if (in_graphs) {
      CUDA(cuGraphLaunch(lane->executable, lane->stream));
    } else {
      lane_issue(lane);
    }
    if (i == COMMUNICATORS / 2 - 1) meet(self);
  }
  for (int i = 0; i < COMMUNICATORS; i++) wait_for(lanes[i].stream);
  for (int i = 0; i < COMMUNICATORS; i++) {
    for (int kind = 0; kind < KINDS; kind++) transfer_verify(&lanes[i].list[kind], self);
  }
}

static void write_table(const struct rank* self) {
  static const char* const collectives[] = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"};
  FILE* file = tuning_begin(self);
  if (!file) return;
  for (int i = 0; i < KINDS; i++) tuning_row(file, self, collectives[i], "native_bytes_max", "256M");
  tuning_end(file);
}

/* Small collectives, some over each wire of Windlass, and on GPUs sizes that take every block that a communicator may have. */
static void all(struct rank* self) {
  const size_t counts[] = {100, 9000, on_gpus() ? (size_t)1 << 20 : 40000};
  struct lane lanes[COMMUNICATORS] = {{0}};
  write_table(self);
  for (int i = 0; i < COMMUNICATORS; i++) {
    lanes[i].communicator = world(self, i);
    lanes[i].stream = new_stream();
  }
  struct occupant occupant = occupant_made(self);
  for (uint64_t size = 0; size < sizeof counts / sizeof *counts; size++) {
    for (uint64_t i = 0; i < COMMUNICATORS; i++) lane_prepare(self, &lanes[i], 100 * size + i, counts[size]);
    /* In its first calls NCCL connects, and ranks wait for each other: one communicator after the other. */
    for (int i = 0; i < COMMUNICATORS; i++) {
      lane_issue(&lanes[i]);
      wait_for(lanes[i].stream);
    }
    for (int i = 0; i < COMMUNICATORS; i++) lane_capture(&lanes[i]);
    for (int round = 0; round < ROUNDS; round++) round_of(self, lanes, &occupant, false);
    for (int round = 0; round < ROUNDS; round++) round_of(self, lanes, &occupant, true);
    for (int i = 0; i < COMMUNICATORS; i++) {
      CUDA(cuGraphExecDestroy(lanes[i].executable));
      for (int kind = 0; kind < KINDS; kind++) transfer_release(&lanes[i].list[kind]);
    }
  }
  if (occupant.module) CUDA(cuModuleUnload(occupant.module));
  for (int i = COMMUNICATORS - 1; i >= 0; i--) {
    CUDA(cuStreamDestroy_v2(lanes[i].stream));
    NCCL(ncclCommDestroy(lanes[i].communicator));
  }
}

int main(void) {
  /* Streams that share a hardware queue wait for each other's kernels. */
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  begin("crowded", 280);
  run_ranks("ranks", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
