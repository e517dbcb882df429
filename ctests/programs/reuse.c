/* Holds that hundreds of communicators of two to four ranks give right results and leak nothing. Members and order of ranks are
 * random; some are never used, some carry messages, some collectives; configurations differ; they end in every way, sometimes by
 * an abort of one rank alone. The process holds no more descriptors, threads, mappings and device memory at the end than after
 * the first quarter. The argument is their number. */
#include "../support/held.h"
#include "../support/team.h"

#include <stdlib.h>

enum { MEMBERS_MAX = 4 };

/* A communicator's random properties, known to all ranks: its members in the order of their ranks, and its calls. */
struct life {
  int members[MEMBERS_MAX], ranks, maker;
  int ctas_max; /* 0 for no configuration */
  int aborter;  /* the rank that ends it by an abort, or none */
  bool passes, reduces, finalizes;
};

static struct life drawn(struct random* random, int ranks) {
  int all[RANKS_MAX];
  int most = ranks < MEMBERS_MAX ? ranks : MEMBERS_MAX;
  struct life life = {.ranks = 2 + (int)random_below(random, (uint64_t)most - 1)};
  for (int i = 0; i < ranks; i++) all[i] = i;
  for (int i = 0; i < life.ranks; i++) {
    int chosen = i + (int)random_below(random, (uint64_t)(ranks - i)), member = all[chosen];
    all[chosen] = all[i];
    all[i] = member;
    life.members[i] = member;
  }
  life.maker = life.members[random_below(random, (uint64_t)life.ranks)];
  uint64_t use = random_below(random, 8), end = random_below(random, 16);
  life.passes = use & 1;
  life.reduces = use == 4 || use == 5;
  life.finalizes = end & 1;
  /* On GPUs a peer may still read from a rank whose stream has finished; only destroy waits for it. */
  bool may_abort = !on_gpus() || !(life.passes || life.reduces);
  life.aborter = may_abort && end < 4 ? (int)end : RANKS_MAX;
  life.ctas_max = (int)random_below(random, 3) * 4;
  return life;
}

static void lived(struct rank* self, const struct life* life, ncclUniqueId id, uint64_t key) {
  struct team team = {NULL, -1, life->ranks};
  for (int i = 0; i < life->ranks; i++) {
    if (life->members[i] == self->rank) team.rank = i;
  }
  if (team.rank < 0) return;
  if (life->ctas_max) {
    ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
    configuration.blocking = 1;
    configuration.maxCTAs = life->ctas_max;
    NCCL(ncclCommInitRankConfig(&team.communicator, life->ranks, id, team.rank, &configuration));
  } else {
    NCCL(ncclCommInitRank(&team.communicator, life->ranks, id, team.rank));
  }
  expect_lazy(life->ranks, life->reduces ? BUILT : UNBUILT);
  if (life->passes) team_passes(self, &team, 1 + key * 37 % 9000, key);
  if (life->reduces) team_reduces(self, &team, key);
  team_knows_itself(self, &team);
  bool aborts = team.rank == life->aborter;
  if (aborts) NCCL(ncclCommAbort(team.communicator));
  else if (life->finalizes) NCCL(ncclCommFinalize(team.communicator));
  if (!aborts) NCCL(ncclCommDestroy(team.communicator));
}

/* The simulator keeps the sockets of its latest 256 ids until the process ends, as if each had a waiting root. Make these first,
 * so that they do not count as a leak. */
static void fill_with_ids(void) {
  ncclUniqueId id;
  for (int i = 0; i < 260; i++) NCCL(ncclGetUniqueId(&id));
}

static void soak(struct rank* self) {
  if (!on_gpus()) fill_with_ids();
  int rounds = *(int*)self->argument;
  struct random random = random_from(program_seed(2024));
  struct held warm = held_now();
  /* Less than a leak of one in ten communicators. */
  const int room = rounds / 100 < 12 ? 12 : rounds / 100;
  const struct held rooms = {room, room, 4 * room, (size_t)64 << 20};
  for (int round = 0; round < rounds; round++) {
    struct life life = drawn(&random, self->ranks);
    ncclUniqueId id = share_id(self, 0, life.maker);
    lived(self, &life, id, (uint64_t)round);
    if ((round + 1) * 4 % rounds < 4) {
      meet(self);
      struct held now = held_now();
      if (round + 1 == rounds / 4) warm = now;
      if (self->rank == 0) {
        fprintf(stderr, "reuse: after %d: descriptors %d, threads %d, mappings %d, device memory %.1f MiB\n", round + 1,
                now.descriptors, now.threads, now.mappings, (double)now.device_bytes / (1 << 20));
      }
      meet(self);
    }
  }
  meet(self);
  CHECK(held_again(&warm, &rooms));
  meet(self);
}

int main(int count, char** words) {
  begin("reuse", 280);
  int ranks = rank_count(4), rounds = on_gpus() ? 200 : 1000;
  if (count > 1) rounds = atoi(words[1]);
  run_ranks("soak", PROCESSES, ranks, soak, &rounds);
  return finish();
}
