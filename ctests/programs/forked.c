/* Holds that a process with communicators may fork: the child runs a program or exits cleanly, the parent's communicators go on,
 * and what the child closes does not harm them. In a child a handle of Windlass's own is refused. */
#include "../support/collective.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void reduce(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 9001,
                              .rank = self->rank, .ranks = self->ranks, .key = key};
  transfer_run(&transfer, communicator, self);
}

static void check_exit(pid_t child) {
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Checks without counting: the output is compared with that of runs without such a child. */
static void check_child(pid_t child) {
  int status = -1;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status)) CHECK(!"refused");
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  reduce(self, communicator, 1);
  pid_t child = fork();
  if (child == 0) _exit(0);
  check_exit(child);
  reduce(self, communicator, 2);
  /* A child that makes harmless calls and leaves by exit(), so that destructors run in it. */
  child = fork();
  if (child == 0) {
    int version = 0;
    ncclResult_t answer = ncclGetVersion(&version);
    alarm(20);
    exit(answer == ncclSuccess && version > 20000 ? 0 : 1);
  }
  check_exit(child);
  reduce(self, communicator, 3);
  /* A child that executes another program. */
  child = fork();
  if (child == 0) {
    execl("/bin/true", "true", (char*)NULL);
    _exit(1);
  }
  check_exit(child);
  reduce(self, communicator, 4);
  /* A handle of Windlass's own is never given to NCCL in a child. With NCCL's own handle this call would crash or wait. */
  const char* lazy = getenv("WINDLASS_LAZY");
  child = lazy && !strcmp(lazy, "all") ? fork() : -1;
  if (child == 0) {
    int count = -1;
    alarm(20);
    bool refused = ncclCommCount(communicator, &count) == ncclInvalidArgument &&
                   ncclReduce(NULL, NULL, 1, ncclFloat, ncclSum, 0, communicator, NULL) == ncclInvalidArgument &&
                   ncclCommDestroy(communicator) == ncclInvalidArgument &&
                   ncclCommAbort(communicator) == ncclInvalidArgument && ncclCommDestroy(NULL) != ncclInvalidArgument;
    _exit(refused ? 0 : 1);
  }
  if (child > 0) check_child(child);
  reduce(self, communicator, 5);
  /* A child that asks for a communicator of its own: CUDA does not work there, and Windlass's log and report name its parent.
   * NCCL's own answer on GPUs is not checked. */
  child = on_gpus() ? -1 : fork();
  if (child == 0) {
    ncclComm_t own = NULL;
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    alarm(20);
    exit(ncclCommInitRank(&own, 1, id, 0) == ncclSuccess);
  }
  if (child > 0) check_child(child);
  reduce(self, communicator, 6);
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("forked", 60);
  run_ranks("forked", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
