/* Teams: see team.h. */
#include "team.h"

#include <stdio.h>

void expect_lazy(int ranks, enum build build) {
  static const char* const builds[] = {"unbuilt", "built", "either"};
  char name[32];
  snprintf(name, sizeof name, "lazy/%d/%s", ranks, builds[build]);
  count_calls(name, 1);
}

ncclUniqueId team_id(struct rank* self, int ranks) {
  ncclUniqueId own = {{0}};
  for (int first = 0; first < self->ranks; first += ranks) {
    ncclUniqueId id = share_id(self, first / ranks, first);
    if (self->rank / ranks == first / ranks) own = id;
  }
  return own;
}

struct team team_made(struct rank* self, int ranks, enum build build) {
  struct team team = {NULL, self->rank % ranks, ranks};
  ncclUniqueId id = team_id(self, ranks);
  NCCL(ncclCommInitRank(&team.communicator, ranks, id, team.rank));
  CHECK(team.communicator != NULL);
  expect_lazy(ranks, build);
  return team;
}

int team_next(const struct team* team) { return (team->rank + 1) % team->ranks; }

int team_before(const struct team* team) { return (team->rank + team->ranks - 1) % team->ranks; }

static void stand_by(struct rank* self) {
  for (int step = 0; step < TEAM_STEPS; step++) together(self);
}

void team_runs(struct rank* self, const struct team* team, struct transfer what) {
  if (!team->communicator) {
    stand_by(self);
    return;
  }
  what.rank = team->rank;
  what.ranks = team->ranks;
  transfer_prepare(&what);
  together(self);
  transfer_launch(&what, team->communicator, self->stream);
  wait_for(self->stream);
  together(self);
  transfer_verify(&what, self);
  transfer_release(&what);
}

void team_reduces(struct rank* self, const struct team* team, uint64_t key) {
  team_runs(self, team, (struct transfer){.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 1021, .key = key});
}

void team_passes(struct rank* self, const struct team* team, size_t bytes, uint64_t key) {
  if (!team->communicator) {
    stand_by(self);
    return;
  }
  struct message from = message_to_send(key * 16 + (uint64_t)team->rank, bytes, 0);
  struct message to = message_to_receive(key * 16 + (uint64_t)team_before(team), bytes, 3);
  together(self);
  NCCL(ncclGroupStart());
  message_send(&from, team_next(team), team->communicator, self->stream);
  message_receive(&to, team_before(team), team->communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  message_verify(&to, self);
  message_release(&from);
  message_release(&to);
}

void team_knows_itself(struct rank* self, const struct team* team) {
  int rank = -1, ranks = -1, device = -1;
  ncclResult_t state = ncclInternalError;
  NCCL(ncclCommUserRank(team->communicator, &rank));
  NCCL(ncclCommCount(team->communicator, &ranks));
  NCCL(ncclCommCuDevice(team->communicator, &device));
  NCCL(ncclCommGetAsyncError(team->communicator, &state));
  EQUAL(rank, team->rank);
  EQUAL(ranks, team->ranks);
  EQUAL(device, self->device);
  EQUAL(state, ncclSuccess);
  CHECK(ncclGetLastError(team->communicator) != NULL);
}
