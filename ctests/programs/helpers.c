/* Holds that no helper that a program forks beside its inits, without an exec, inherits a descriptor of Windlass's: one could keep a
 * rank's connection open after its end. Ranks are new processes in each round, since the first init is the one that begins to guard
 * forks. Argument: inits a rank and round. Standard error has the number of helpers. */
#include "../support/harness.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DESCRIPTORS_MAX = 512, ROUNDS = 8 };

struct helpers {
  atomic_bool over;
  int count, holding;
};

/* How many Unix sockets and pidfds this process has. NCCL's simulator opens none. Allocates nothing, as it runs in forked children. */
static int held(void) {
  int count = 0;
  for (int number = 3; number < DESCRIPTORS_MAX; number++) {
    struct sockaddr address;
    socklen_t bytes = sizeof address;
    char path[32], target[32] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", number);
    bool is_socket = !getsockname(number, &address, &bytes) && address.sa_family == AF_UNIX;
    count += is_socket || (readlink(path, target, sizeof target - 1) > 0 && strstr(target, "pidfd"));
  }
  return count;
}

static void* fork_helpers(void* of) {
  struct helpers* helpers = of;
  while (!atomic_load(&helpers->over)) {
    int status = 1;
    pid_t helper = fork();
    if (!helper) _exit(held() > 0);
    CHECK(helper > 0 && waitpid(helper, &status, 0) == helper);
    helpers->count++;
    helpers->holding += status != 0;
  }
  return NULL;
}

static void all(struct rank* self) {
  int inits = *(int*)self->argument;
  struct helpers helpers = {false, 0, 0};
  pthread_t thread;
  if (!CHECK(!held() && !pthread_create(&thread, NULL, fork_helpers, &helpers))) return;
  for (int init = 0; init < inits; init++) {
    ncclComm_t communicator = world(self, init % SLOTS_MAX);
    NCCL(ncclCommDestroy(communicator));
    meet(self);
  }
  atomic_store(&helpers.over, true);
  pthread_join(thread, NULL);
  EQUAL(helpers.holding, 0);
  fprintf(stderr, "rank %d: %d of %d helpers hold descriptors\n", self->rank, helpers.holding, helpers.count);
}

int main(int count, char** arguments) {
  int inits = count > 1 ? atoi(arguments[1]) : 5;
  begin("helpers", 100);
  for (int round = 0; round < ROUNDS; round++) run_ranks("helpers", PROCESSES, rank_count(4), all, &inits);
  return finish();
}
