/* What a sleep costs and gives: a communicator of all ranks and 15 more of them sleep and wake, one after the other as vLLM has them do, in
 * 50 cycles. The same graph replays with the same bits. Prints on standard error the device's memory in use before the first communicator,
 * awake and asleep, the time of a cycle, and the median of 200 replays before the first sleep and after the last. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GROUPS = 16, CYCLES = 50, REPLAYS = 200, CALLS = 64, MIB = 1 << 20 };

static double microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static double used_mib(void) {
  size_t free = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free, &total));
  return (double)(total - free) / MIB;
}

static int compare(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

static double median_us(struct rank* self, CUgraphExec graph) {
  double times[REPLAYS];
  for (int i = 0; i < REPLAYS; i++) {
    double began = microseconds();
    CUDA(cuGraphLaunch(graph, self->stream));
    wait_for(self->stream);
    times[i] = microseconds() - began;
  }
  qsort(times, REPLAYS, sizeof times[0], compare);
  return times[REPLAYS / 2];
}

static void all(struct rank* self) {
  ncclComm_t communicators[GROUPS];
  struct transfer one = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 65536, .rank = self->rank,
                         .ranks = self->ranks, .key = 1};
  transfer_prepare(&one);
  char* bytes = malloc(one.receive_bytes);
  char* wanted = malloc(one.receive_bytes);
  double before = used_mib();
  meet(self);
  for (int i = 0; i < GROUPS; i++) communicators[i] = world(self, i);
  for (int i = 0; i < GROUPS; i++) {
    transfer_clear(&one);
    transfer_launch(&one, communicators[i], self->stream);
    wait_for(self->stream);
    transfer_verify(&one, self);
  }
  CUgraph graph;
  CUgraphExec executable;
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  for (int i = 0; i < CALLS; i++) transfer_launch(&one, communicators[i % GROUPS], self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  meet(self);
  double first = median_us(self, executable);
  download(wanted, one.receive, one.receive_bytes);
  meet(self);
  double awake = used_mib(), asleep = 0, took[2] = {0, 0};
  for (int cycle = 0; cycle < CYCLES; cycle++) {
    double began = microseconds();
    for (int i = 0; i < GROUPS; i++) NCCL(ncclCommSuspend(communicators[i], NCCL_SUSPEND_MEM));
    took[0] += microseconds() - began;
    meet(self);
    asleep = used_mib();
    CHECK(asleep < awake);
    meet(self);
    began = microseconds();
    for (int i = 0; i < GROUPS; i++) NCCL(ncclCommResume(communicators[i]));
    took[1] += microseconds() - began;
    transfer_clear(&one);
    CUDA(cuGraphLaunch(executable, self->stream));
    wait_for(self->stream);
    download(bytes, one.receive, one.receive_bytes);
    CHECK(memcmp(bytes, wanted, one.receive_bytes) == 0);
  }
  meet(self);
  double again = used_mib(), last = median_us(self, executable);
  if (self->rank == 0) {
    fprintf(stderr, "device memory in use, MiB: %.0f before the first communicator, %.0f with %d awake, %.0f asleep, %.0f awake after %d cycles\n",
            before, awake, GROUPS, asleep, again, CYCLES);
    fprintf(stderr, "%d communicators, us: suspend %.0f, resume %.0f\n", GROUPS, took[0] / CYCLES, took[1] / CYCLES);
    fprintf(stderr, "graph of %d all-reduces of 256 KiB, median of %d replays, us: %.1f before, %.1f after, ratio %.3f\n", CALLS,
            REPLAYS, first, last, last / first);
  }
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  destroy_each(communicators, GROUPS);
  transfer_release(&one);
  free(bytes);
  free(wanted);
}

int main(void) {
  begin("sleep_times", 280);
  run_ranks("all", PROCESSES, rank_count(2), all, NULL);
  return finish();
}
