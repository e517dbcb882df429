/* Holds that where the simulator lets NCCL's build of a lazy communicator fail on one rank, the other ranks' calls fail, too.
 * Messages go on, and the next call of all ranks gives the right result. Children of a communicator that was built on some ranks
 * only work, made in groups and outside. An abort ends a wait for an id from a dead rank. Runs with
 * WINDLASS_FIRST_LAUNCH_GUARD=off, as the guard's own communicator would count as an init. */
#include "../support/team.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The rank whose builds fail. Its variables are set before its first call, as the simulator reads them once. */
enum { LOSER = 1 };
static void lose_on(struct rank* self, const char* name, const char* inits) {
  if (self->rank == LOSER) setenv(name, inits, 1);
}

static ncclResult_t reduce(struct rank* self, const struct team* team, void* buffer) {
  count_calls("ncclAllReduce", 1);
  return ncclAllReduce(buffer, buffer, 100, ncclFloat, ncclSum, team->communicator, as_cuda(self->stream));
}

/* The loser's build fails before NCCL has met any other rank; twice, the second time in a group. A rank that calls later gets
 * the error, too. */
static void refused(struct rank* self) {
  lose_on(self, "WINDLASS_SIM_REFUSED_INITS", "1,2");
  struct team team = team_made(self, *(int*)self->argument, BUILT);
  void* buffer = device_alloc(4096);
  bool loses = self->rank / team.ranks == LOSER / team.ranks;
  for (int round = 0; round < 2 && loses; round++) {
    double began = seconds();
    if (round) NCCL(ncclGroupStart());
    /* The first rank is waiting when the loser fails; the last rank calls after that. */
    if (team.rank == team.ranks - 1 && self->rank != LOSER) usleep(700000);
    ncclResult_t answer = reduce(self, &team, buffer);
    if (round) {
      EQUAL(answer, ncclSuccess);
      answer = ncclGroupEnd();
      count_calls("ncclGroupEnd", 1);
    }
    EQUAL(answer, self->rank == LOSER ? ncclSystemError : ncclRemoteError);
    CHECK(seconds() - began < 15);
    team_passes(self, &team, 3001, 10 + (uint64_t)round);
  }
  meet(self);
  team_knows_itself(self, &team);
  team_reduces(self, &team, 20);
  team_passes(self, &team, 3002, 21);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* The loser's build fails when all ranks have met, so that the others have built their part. */
static struct team partly_built(struct rank* self, void* buffer) {
  lose_on(self, "WINDLASS_SIM_LOST_INITS", "1");
  struct team team = team_made(self, self->ranks, EITHER);
  ncclResult_t answer = reduce(self, &team, buffer);
  CHECK(self->rank == LOSER ? answer == ncclRemoteError : answer == ncclSuccess || answer == ncclRemoteError);
  meet(self);
  return team;
}

/* Ends the parent with the collective in flight; its child works after that. */
static void ends(struct rank* self, const struct team* parent, const struct team* child, void* buffer) {
  meet(self);
  NCCL(ncclCommAbort(parent->communicator));
  cuStreamSynchronize(self->stream);
  if (child->communicator) {
    team_knows_itself(self, child);
    team_passes(self, child, 5003, 31);
    if (child->ranks > 1) team_reduces(self, child, 32);
    NCCL(ncclCommDestroy(child->communicator));
  }
  device_free(buffer);
}

/* The last rank is alone in its child, which NCCL makes. */
static void split(struct rank* self) {
  void* buffer = device_alloc(4096);
  struct team parent = partly_built(self, buffer);
  int last = self->ranks - 1;
  struct team child = {NULL, self->rank == last ? 0 : self->rank, self->rank == last ? 1 : last};
  NCCL(ncclCommSplit(parent.communicator, self->rank == last, self->rank, &child.communicator, NULL));
  expect_lazy(child.ranks, EITHER);
  ends(self, &parent, &child, buffer);
}

/* Without the last rank, which does not call, and with the parent's collective in flight. */
static void shrink(struct rank* self, bool grouped) {
  void* buffer = device_alloc(4096);
  struct team parent = partly_built(self, buffer);
  int last = self->ranks - 1;
  struct team child = {NULL, self->rank, last};
  if (grouped) usleep(500000); /* A rank that does not wait goes by what it has heard, so give it time. */
  if (self->rank != last) {
    if (grouped) NCCL(ncclGroupStart());
    NCCL(ncclCommShrink(parent.communicator, &last, 1, &child.communicator, NULL, NCCL_SHRINK_ABORT));
    if (grouped) NCCL(ncclGroupEnd());
    expect_lazy(child.ranks, EITHER);
  }
  ends(self, &parent, &child, buffer);
}

static void shrink_at_once(struct rank* self) { shrink(self, false); }
static void shrink_in_a_group(struct rank* self) { shrink(self, true); }

struct aborting { struct rank* self; ncclComm_t communicator; };

static void* aborts(void* argument) {
  struct aborting* aborting = argument;
  CUDA(cuCtxSetCurrent(aborting->self->context));
  usleep(500000);
  NCCL(ncclCommAbort(aborting->communicator));
  return NULL;
}

/* The rank whose process would make the children's id dies first. It leaves no report, so its calls are not counted. The
 * configuration is one that only NCCL can check, so the ranks wait for no round of all. */
static void id_of_the_dead(struct rank* self) {
  enum { DEAD = 1 };
  ncclUniqueId id = share_id(self, 0, 0);
  ncclComm_t parent = NULL, child = NULL;
  if (self->rank == DEAD) {
    ncclCommInitRank(&parent, self->ranks, id, self->rank);
    usleep(100000);
    _exit(0);
  }
  NCCL(ncclCommInitRank(&parent, self->ranks, id, self->rank));
  expect_lazy(self->ranks, UNBUILT);
  usleep(400000);
  if (self->rank > DEAD) {
    struct aborting aborting = {self, parent};
    pthread_t thread;
    ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
    configuration.netName = "Socket";
    int excluded = 0;
    double began = seconds();
    if (pthread_create(&thread, NULL, aborts, &aborting)) return;
    ncclResult_t answer = ncclCommShrink(parent, &excluded, 1, &child, &configuration, NCCL_SHRINK_DEFAULT);
    count_calls("ncclCommShrink", 1);
    CHECK(answer != ncclSuccess);
    pthread_join(thread, NULL);
    CHECK(seconds() - began < 10);
  } else {
    NCCL(ncclCommAbort(parent));
  }
}

int main(int count, char** parts) {
  begin("lazy failures", 100);
  int ranks = rank_count(4), two = 2;
  if (is_wanted(count, parts, "refused")) {
    run_ranks("a refused pair", PROCESSES, ranks, refused, &two);
    if (ranks > 2) run_ranks("refused", PROCESSES, ranks, refused, &ranks);
  }
  if (ranks > 2 && is_wanted(count, parts, "split")) run_ranks("split", PROCESSES, ranks, split, NULL);
  if (ranks > 2 && is_wanted(count, parts, "shrink")) run_ranks("shrink", PROCESSES, ranks, shrink_at_once, NULL);
  if (ranks > 2 && is_wanted(count, parts, "grouped")) run_ranks("grouped", PROCESSES, ranks, shrink_in_a_group, NULL);
  if (ranks > 2 && is_wanted(count, parts, "dead")) run_ranks("dead", PROCESSES, ranks, id_of_the_dead, NULL);
  return finish();
}
