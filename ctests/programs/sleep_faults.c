/* Holds that a suspend or resume that a rank refuses fails on all ranks and changes nothing: a rank captures, comes late, or has no memory to
 * wake with. It may be tried again, and graphs stay valid. Where a rank's process ends in the middle, whenever that is, the others get
 * ncclRemoteError, and a call on another communicator goes on. */
#include "../support/collective.h"
#include "../support/messages.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static bool sleeps(ncclComm_t communicator) {
  uint64_t value = 9;
  NCCL(ncclCommMemStats(communicator, ncclStatGpuMemSuspended, &value));
  return value == 1;
}

static struct transfer reduction(const struct rank* self, uint64_t key) {
  struct transfer one = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 3001, .rank = self->rank,
                         .ranks = self->ranks, .key = key};
  transfer_prepare(&one);
  return one;
}

static void run(struct rank* self, struct transfer* one, ncclComm_t communicator) {
  transfer_clear(one);
  transfer_launch(one, communicator, self->stream);
  wait_for(self->stream);
  transfer_verify(one, self);
}

struct graph { CUgraph graph; CUgraphExec executable; };

static struct graph capture(struct rank* self, struct transfer* one, ncclComm_t communicator) {
  struct graph captured;
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  transfer_launch(one, communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &captured.graph));
  CUDA(cuGraphInstantiateWithFlags(&captured.executable, captured.graph, 0));
  return captured;
}

static void replay(struct rank* self, struct graph* captured, struct transfer* one) {
  transfer_clear(one);
  CUDA(cuGraphLaunch(captured->executable, self->stream));
  wait_for(self->stream);
  transfer_verify(one, self);
}

/* One rank after the other takes all memory of its device while the communicator sleeps. All ranks stay asleep, again and again. */
static void without_memory(struct rank* self, ncclComm_t communicator) {
  struct transfer one = reduction(self, 1);
  struct graph captured = capture(self, &one, communicator);
  replay(self, &captured, &one);
  for (int which = 0; which < self->ranks; which++) {
    NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
    void* all = NULL;
    if (which == self->rank) {
      size_t free = 0, total = 0;
      CUDA(cuMemGetInfo_v2(&free, &total));
      all = device_alloc(free - (4 << 20));
    }
    meet(self);
    for (int again = 0; again < 2; again++) {
      CODE(ncclCommResume(communicator), ncclUnhandledCudaError);
      CHECK(sleeps(communicator));
      CODE(ncclAllReduce(one.send, one.receive, 1, ncclInt64, ncclSum, communicator, as_cuda(self->stream)), ncclInvalidUsage);
    }
    meet(self);
    if (all) device_free(all);
    NCCL(ncclCommResume(communicator));
    CHECK(!sleeps(communicator));
    replay(self, &captured, &one);
    run(self, &one, communicator);
  }
  CUDA(cuGraphExecDestroy(captured.executable));
  CUDA(cuGraphDestroy(captured.graph));
  transfer_release(&one);
}

/* One rank has an open capture with a call of the communicator. */
static void while_it_captures(struct rank* self, ncclComm_t communicator) {
  struct transfer one = reduction(self, 2), other = reduction(self, 3);
  run(self, &one, communicator);
  for (int which = 0; which < self->ranks; which++) {
    if (which == self->rank) {
      CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
      transfer_launch(&other, communicator, self->stream);
    }
    CODE(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM), ncclInvalidUsage);
    CHECK(!sleeps(communicator));
    if (which == self->rank) {
      CUgraph graph = NULL;
      cuStreamEndCapture(self->stream, &graph); /* the capture may be broken, as NCCL's own suspend leaves it */
      if (graph) CUDA(cuGraphDestroy(graph));
    }
    meet(self);
    run(self, &one, communicator);
  }
  NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
  NCCL(ncclCommResume(communicator));
  run(self, &one, communicator);
  transfer_release(&one);
  transfer_release(&other);
}

static void refusals(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  RUN_PART(without_memory, self, communicator);
  RUN_PART(while_it_captures, self, communicator);
  NCCL(ncclCommDestroy(communicator));
}

/* The last rank comes when the others have stopped waiting. */
static void late(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  struct transfer one = reduction(self, 4);
  run(self, &one, communicator);
  double began = seconds();
  if (self->rank + 1 == self->ranks) sleep(63);
  CODE(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM), ncclInvalidUsage);
  CHECK(seconds() - began > 55 && !sleeps(communicator));
  meet(self);
  run(self, &one, communicator);
  NCCL(ncclCommSuspend(communicator, NCCL_SUSPEND_MEM));
  /* To wake all wait as long as it takes. */
  if (self->rank == 0) usleep(200000);
  NCCL(ncclCommResume(communicator));
  run(self, &one, communicator);
  NCCL(ncclCommDestroy(communicator));
  transfer_release(&one);
}

static void* end_soon(void* delay) {
  usleep(*(const unsigned*)delay);
  _exit(0);
}

/* The last rank's process ends some time after all have begun to sleep and wake. */
static void dies(struct rank* self) {
  ncclComm_t all = world(self, 0), rest = NULL;
  int others = self->ranks - 1;
  ncclUniqueId id = share_id(self, 1, 0);
  struct transfer one = reduction(self, 5);
  run(self, &one, all);
  meet(self);
  if (self->rank == others) {
    pthread_t thread;
    count_calls("ncclCommInitRank", -1);
    count_calls("ncclAllReduce", -1);
    if (pthread_create(&thread, NULL, end_soon, self->argument)) abort();
    /* Not counted: nobody reports them. */
    for (;;) ncclCommSuspend(all, NCCL_SUSPEND_MEM), ncclCommResume(all);
  }
  NCCL(ncclCommInitRank(&rest, others, id, self->rank));
  ncclResult_t seen = ncclSuccess, state = ncclSuccess;
  bool resumes = false;
  int calls[2] = {0, 0};
  double began = seconds();
  while (seen == ncclSuccess && seconds() - began < 30) {
    seen = resumes ? ncclCommResume(all) : ncclCommSuspend(all, NCCL_SUSPEND_MEM);
    calls[resumes]++;
    resumes = !resumes;
  }
  count_calls("ncclCommSuspend", calls[0]);
  count_calls("ncclCommResume", calls[1]);
  EQUAL(seen, ncclRemoteError);
  NCCL(ncclCommGetAsyncError(all, &state));
  EQUAL(state, ncclRemoteError);
  CHECK(ncclCommSuspend(all, NCCL_SUSPEND_MEM) != ncclSuccess && ncclCommResume(all) != ncclSuccess);
  count_calls("ncclCommSuspend", 1);
  count_calls("ncclCommResume", 1);
  struct transfer other = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = 77, .rank = self->rank, .ranks = others, .key = 6};
  transfer_run(&other, rest, self);
  NCCL(ncclCommAbort(all));
  transfer_run(&other, rest, self);
  NCCL(ncclCommDestroy(rest));
  transfer_release(&one);
}

int main(int count, char** arguments) {
  begin("sleep_faults", 280);
  int ranks = rank_count(4);
  if (is_wanted(count, arguments, "refusals")) run_ranks("refusals", PROCESSES, ranks, refusals, NULL);
  if (is_wanted(count, arguments, "dies")) {
    struct random random = random_from(program_seed(5));
    for (unsigned run = 0; run < 25; run++) {
      unsigned delay = (unsigned)random_below(&random, 400u << run % 6);
      run_ranks("dies", PROCESSES, ranks, dies, &delay);
    }
  }
  if (is_wanted(count, arguments, "late")) run_ranks("late", PROCESSES, ranks, late, NULL);
  return finish();
}
