/* Holds that communicators made from others carry collectives and messages. Cases: two colors, ranks reversed by keys, ranks
 * without a color or alone, children of children, several in one group, with configurations, shrunk ones, many one after the
 * other. In one part a rank groups two splits that the others make one by one. With two hosts, or more than 16 ranks, the parent
 * has no peer group. With the argument `faults`, and where ranks meet at init: a shrink after a rank has died, also the one that
 * made the id. */
#include "../support/one_thread.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int version;

/* How often `reduces` and `passes_on` call `together`, in sum. */
enum { STEPS = 4 };

static void reduces(struct rank* self, ncclComm_t communicator, int rank, int ranks, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 389, .rank = rank,
                              .ranks = ranks, .key = key};
  transfer_prepare(&transfer);
  together(self);
  transfer_launch(&transfer, communicator, self->stream);
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
}

/* Every rank sends to the next and receives from the one before, both at once. */
static void passes_on(struct rank* self, ncclComm_t communicator, int rank, int ranks, uint64_t key) {
  enum { COUNT = 3001 };
  int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
  static _Thread_local unsigned char sent[COUNT], wanted[COUNT], seen[COUNT];
  for (int i = 0; i < COUNT; i++) {
    sent[i] = (unsigned char)(key * 31 + (uint64_t)rank * 7 + (uint64_t)i);
    wanted[i] = (unsigned char)(key * 31 + (uint64_t)before * 7 + (uint64_t)i);
  }
  void *from = device_alloc(COUNT), *to = device_alloc(COUNT);
  upload(from, sent, COUNT);
  device_fill(to, 0xa5, COUNT);
  together(self);
  NCCL(ncclGroupStart());
  NCCL(ncclSend(from, COUNT, ncclUint8, next, communicator, as_cuda(self->stream)));
  NCCL(ncclRecv(to, COUNT, ncclUint8, before, communicator, as_cuda(self->stream)));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  download(seen, to, COUNT);
  CHECK(memcmp(seen, wanted, COUNT) == 0);
  record(self, seen, COUNT);
  device_free(from);
  device_free(to);
}

/* Holds that this rank is `rank` of `ranks` in `communicator`, and that calls on it work. All ranks of the section call it,
 * those outside of the communicator with NULL. */
static void works(struct rank* self, ncclComm_t communicator, int rank, int ranks, uint64_t key) {
  if (!communicator) {
    for (int step = 0; step < STEPS; step++) together(self);
    return;
  }
  int seen_rank = -1, seen_ranks = -1;
  NCCL(ncclCommUserRank(communicator, &seen_rank));
  NCCL(ncclCommCount(communicator, &seen_ranks));
  EQUAL(seen_rank, rank);
  EQUAL(seen_ranks, ranks);
  reduces(self, communicator, rank, ranks, key);
  passes_on(self, communicator, rank, ranks, key);
}

static int half_of(int rank) { return rank % 2; }

static int of_half(struct rank* self) { return (self->ranks + 1 - half_of(self->rank)) / 2; }

/* Runs two communicators without a common rank: at the same time, but as threads on GPUs (`together`) one after the other. */
static void apart(struct rank* self, ncclComm_t communicator, int which, int rank, int ranks, uint64_t key) {
  for (int turn = 0; turn < 2; turn++) works(self, turn == which ? communicator : NULL, rank, ranks, key);
}

static void halves(struct rank* self, ncclComm_t communicator, uint64_t key) {
  apart(self, communicator, half_of(self->rank), self->rank / 2, of_half(self), key);
}

static void two_colors(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = NULL;
  NCCL(ncclCommSplit(parent, half_of(self->rank), self->rank, &child, NULL));
  halves(self, child, 10);
  works(self, parent, self->rank, self->ranks, 11);
  NCCL(ncclCommDestroy(child));
}

static void turned_round(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = NULL;
  NCCL(ncclCommSplit(parent, 5, -self->rank, &child, NULL));
  works(self, child, self->ranks - 1 - self->rank, self->ranks, 20);
  NCCL(ncclCommDestroy(child));
}

/* Rank 1 has no color. The others split once more, in reverse, and the result is shrunk where NCCL can. */
static void nested(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = (ncclComm_t)(uintptr_t)1, grandchild = NULL, last = NULL;
  NCCL(ncclCommSplit(parent, self->rank == 1 ? NCCL_SPLIT_NOCOLOR : 3, self->rank, &child, NULL));
  if (self->rank == 1) CHECK(child == NULL);
  int ranks = self->ranks - 1, rank = self->rank ? self->rank - 1 : 0;
  works(self, child, rank, ranks, 30);
  if (child) NCCL(ncclCommSplit(child, 0, -rank, &grandchild, NULL));
  works(self, grandchild, ranks - 1 - rank, ranks, 31);
  if (version >= 22703 && ranks >= 3) {
    int excluded[] = {0};
    if (child && ranks - 1 - rank != 0) {
      NCCL(ncclCommShrink(grandchild, excluded, 1, &last, NULL, NCCL_SHRINK_DEFAULT));
    }
    works(self, last, ranks - 2 - rank, ranks - 1, 32);
    if (last) NCCL(ncclCommDestroy(last));
  }
  if (!child) return;
  destroy_each((ncclComm_t[]){grandchild, child}, 2);
}

static void alone(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = NULL;
  NCCL(ncclCommSplit(parent, self->rank, 0, &child, NULL));
  works(self, child, 0, 1, 40);
  NCCL(ncclCommDestroy(child));
  /* Rank 0 is alone in its child, the others are together. */
  NCCL(ncclCommSplit(parent, self->rank == 0, 0, &child, NULL));
  apart(self, child, self->rank == 0, self->rank ? self->rank - 1 : 0, self->rank ? self->ranks - 1 : 1, 41);
  NCCL(ncclCommDestroy(child));
}

static void nobody(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = NULL;
  NCCL(ncclCommSplit(parent, NCCL_SPLIT_NOCOLOR, self->rank, &child, NULL));
  CHECK(child == NULL);
}

/* Splits of two parents and an init from an id, in one group. (Two splits of one parent mix up their ranks in NCCL 2.28.9.) */
static void grouped(struct rank* self, ncclComm_t parent) {
  ncclComm_t other = world(self, 1), half = NULL, turned = NULL, made = NULL;
  ncclUniqueId id = share_id(self, 2, self->ranks - 1);
  NCCL(ncclGroupStart());
  NCCL(ncclCommSplit(parent, half_of(self->rank), self->rank, &half, NULL));
  NCCL(ncclCommSplit(other, 9, -self->rank, &turned, NULL));
  NCCL(ncclCommInitRank(&made, self->ranks, id, self->rank));
  NCCL(ncclGroupEnd());
  halves(self, half, 50);
  works(self, turned, self->ranks - 1 - self->rank, self->ranks, 51);
  works(self, made, self->rank, self->ranks, 52);
  destroy_each((ncclComm_t[]){made, half, turned, other}, 4);
}

/* Children with configurations: limits, shared resources as PyTorch asks for them, nonblocking. */
static void configured(struct rank* self, ncclComm_t parent) {
  ncclComm_t child = NULL;
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 1;
  configuration.maxCTAs = 4;
  configuration.splitShare = 1;
  NCCL(ncclCommSplit(parent, half_of(self->rank), self->rank, &child, &configuration));
  halves(self, child, 60);
  NCCL(ncclCommDestroy(child));
  /* The split waits as the parent was configured; later calls on the child wait as the child was. */
  configuration = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 0;
  NCCL(ncclCommSplit(parent, 0, self->rank, &child, &configuration));
  CHECK(child != NULL);
  NCCL(ncclCommAbort(child));
}

static void shrink(struct rank* self, ncclComm_t parent) {
  ncclComm_t smaller = NULL;
  if (version < 22703) return;
  for (int excluded = 0; excluded < 2; excluded++) {
    int list[1] = {excluded};
    if (self->rank != excluded) {
      NCCL(ncclCommShrink(parent, list, 1, &smaller, NULL, NCCL_SHRINK_DEFAULT));
    }
    works(self, smaller, self->rank - (self->rank > excluded), self->ranks - 1, 70 + (uint64_t)excluded);
    if (smaller) NCCL(ncclCommDestroy(smaller));
    smaller = NULL;
    meet(self);
  }
}

/* The parent is destroyed at once; rank 0's process hosts a session that it is not in. */
static void outlives_its_parent(struct rank* self) {
  ncclComm_t parent = world(self, 3), child = NULL;
  NCCL(ncclCommSplit(parent, self->rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, 0, &child, NULL));
  NCCL(ncclCommDestroy(parent));
  works(self, child, self->rank - 1, self->ranks - 1, 80);
  if (child) NCCL(ncclCommDestroy(child));
}

/* Late ranks are waited for, and many children leave nothing behind. On GPUs there are few, as each takes 0.6 s, or 1.5 s with
 * calls (0.5 s of either for its destroy). */
static void many(struct rank* self, ncclComm_t parent) {
  uint64_t rounds = on_gpus() ? 2 : 24;
  for (uint64_t round = 0; round < rounds; round++) {
    ncclComm_t child = NULL;
    if (round < 4 && self->rank == (int)round % self->ranks) usleep(20000);
    NCCL(ncclCommSplit(parent, (self->rank + (int)round) % 2, self->rank, &child, NULL));
    if (round % 4 == 3 || round + 1 == rounds) {
      int rank = 0, ranks = 0;
      for (int other = 0; other < self->ranks; other++) {
        if ((other + (int)round) % 2 != (self->rank + (int)round) % 2) continue;
        rank += other < self->rank;
        ranks++;
      }
      apart(self, child, (self->rank + (int)round) % 2, rank, ranks, 90 + round);
    }
    NCCL(ncclCommDestroy(child));
  }
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  ncclComm_t parent = world(self, 0);
  RUN_PART(two_colors, self, parent);
  RUN_PART(turned_round, self, parent);
  RUN_PART(nested, self, parent);
  RUN_PART(alone, self, parent);
  RUN_PART(nobody, self, parent);
  RUN_PART(grouped, self, parent);
  RUN_PART(configured, self, parent);
  RUN_PART(shrink, self, parent);
  RUN_PART(many, self, parent);
  RUN_PART(outlives_its_parent, self);
  works(self, parent, self->rank, self->ranks, 1);
  NCCL(ncclCommDestroy(parent));
}

/* One thread makes the splits of all ranks of one process, in one group. */
static void by_one_thread(int ranks) {
  struct one_thread all = one_thread_begin("one thread", ranks);
  ncclComm_t parents[RANKS_MAX], children[RANKS_MAX];
  int places[RANKS_MAX];
  NCCL(ncclCommInitAll(parents, ranks, NULL));
  NCCL(ncclGroupStart());
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommSplit(parents[rank], 0, -rank, &children[rank], NULL));
  NCCL(ncclGroupEnd());
  for (int rank = 0; rank < ranks; rank++) places[rank] = ranks - 1 - rank;
  one_thread_runs(&all, (struct transfer){.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 1203, .key = 95},
                  children, places);
  one_thread_end_streams(&all);
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommDestroy(children[rank]));
  for (int rank = 0; rank < ranks; rank++) NCCL(ncclCommDestroy(parents[rank]));
  one_thread_print(&all, "one-thread");
}

/* A rank dies and the others shrink without it. It leaves no report, so its calls are not counted. */
static void shrink_without_the_dead(struct rank* self) {
  int dead = *(int*)self->argument;
  ncclComm_t parent = NULL, smaller = NULL;
  ncclUniqueId id = share_id(self, dead, dead);
  if (self->rank == dead) {
    count_calls("ncclGetUniqueId", -1);
    ncclCommInitRank(&parent, self->ranks, id, self->rank);
    usleep(100000);
    _exit(0);
  }
  NCCL(ncclCommInitRank(&parent, self->ranks, id, self->rank));
  usleep(300000);
  NCCL(ncclCommShrink(parent, &dead, 1, &smaller, NULL, NCCL_SHRINK_ABORT));
  works(self, smaller, self->rank - (self->rank > dead), self->ranks - 1, 100 + (uint64_t)dead);
  NCCL(ncclCommDestroy(smaller));
  NCCL(ncclCommAbort(parent));
}

/* Rank 1 splits two communicators in one group, the others one after the other. */
static void in_turn(struct rank* self) {
  ncclComm_t first = world(self, 0), second = world(self, 1), child = NULL, other = NULL;
  if (self->rank == 1) NCCL(ncclGroupStart());
  NCCL(ncclCommSplit(first, 0, 0, &child, NULL));
  NCCL(ncclCommSplit(second, 0, 0, &other, NULL));
  if (self->rank == 1) NCCL(ncclGroupEnd());
  works(self, child, self->rank, self->ranks, 109);
  works(self, other, self->rank, self->ranks, 110);
  NCCL(ncclCommDestroy(child));
  NCCL(ncclCommDestroy(other));
  NCCL(ncclCommDestroy(first));
  NCCL(ncclCommDestroy(second));
}

/* Splits of a world over two hosts, in which one rank may be without Windlass (CTESTS_LONER): children on one host, over both,
 * of a child, in a group, nonblocking, and after the parent is destroyed. */
static void on_hosts(struct rank* self) {
  const char* loner = getenv("CTESTS_LONER");
  if (loner && atoi(loner) == self->rank) setenv("WINDLASS_PEER_GROUPS", "off", 1);
  enum { HOSTS = 2 };
  NCCL(ncclGetVersion(&version));
  ncclComm_t parent = world(self, 0), child = NULL, all = NULL;
  int per = self->ranks / HOSTS, host = self->rank / per, place = self->rank % per;
  NCCL(ncclCommSplit(parent, host, self->rank, &child, NULL));
  apart(self, child, host, place, per, 200);
  NCCL(ncclCommDestroy(child));
  /* Children with a rank of each host. */
  NCCL(ncclCommSplit(parent, place, self->rank, &child, NULL));
  for (int turn = 0; turn < per; turn++) works(self, turn == place ? child : NULL, host, HOSTS, 210 + (uint64_t)turn);
  NCCL(ncclCommDestroy(child));
  /* A child with all ranks but the first of one host, in reverse; ranks of the other host have no color. */
  child = NULL;
  NCCL(ncclCommSplit(parent, host == 1 && place ? 3 : NCCL_SPLIT_NOCOLOR, -self->rank, &child, NULL));
  works(self, child, per - 1 - place, per - 1, 220);
  if (child) NCCL(ncclCommDestroy(child));
  /* Children of a child over both hosts. */
  NCCL(ncclCommSplit(parent, 0, -self->rank, &all, NULL));
  NCCL(ncclCommSplit(all, host, self->rank, &child, NULL));
  apart(self, child, host, place, per, 230);
  NCCL(ncclCommDestroy(child));
  NCCL(ncclCommDestroy(all));
  /* A shrink without the last rank, then splits of the result; and a shrink to the first host alone. */
  if (version >= 22703) {
    int last[] = {self->ranks - 1}, second[RANKS_MAX];
    for (int other = 0; other < per; other++) second[other] = per + other;
    all = child = NULL;
    if (self->rank != last[0]) {
      NCCL(ncclCommShrink(parent, last, 1, &all, NULL, NCCL_SHRINK_DEFAULT));
      NCCL(ncclCommSplit(all, host, self->rank, &child, NULL));
    }
    for (int turn = 0; turn < HOSTS; turn++) works(self, turn == host ? child : NULL, place, turn ? per - 1 : per, 235 + (uint64_t)turn);
    if (child) destroy_each((ncclComm_t[]){child, all}, 2);
    child = NULL;
    if (host == 0) NCCL(ncclCommShrink(parent, second, per, &child, NULL, NCCL_SHRINK_DEFAULT));
    works(self, child, place, per, 237);
    if (child) NCCL(ncclCommDestroy(child));
  }
  NCCL(ncclGroupStart());
  NCCL(ncclCommSplit(parent, host, self->rank, &child, NULL));
  NCCL(ncclGroupEnd());
  apart(self, child, host, place, per, 240);
  NCCL(ncclCommDestroy(child));
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.splitShare = 1;
  configuration.maxCTAs = 4;
  for (int round = 0; round < 12; round++) {
    if (self->rank == round % self->ranks) usleep(20000);
    NCCL(ncclCommSplit(parent, host, -self->rank, &child, round % 2 ? &configuration : NULL));
    if (round % 4 == 3) apart(self, child, host, per - 1 - place, per, 250 + (uint64_t)round);
    NCCL(ncclCommDestroy(child));
  }
  configuration.blocking = 0;
  NCCL(ncclCommSplit(parent, host, self->rank, &child, &configuration));
  CHECK(child != NULL);
  NCCL(ncclCommAbort(child));
  works(self, parent, self->rank, self->ranks, 270);
  NCCL(ncclCommSplit(parent, host, self->rank, &child, NULL));
  NCCL(ncclCommDestroy(parent));
  apart(self, child, host, place, per, 280);
  NCCL(ncclCommDestroy(child));
}

int main(int count, char** words) {
  begin("splits", 110);
  choose(count, words);
  int ranks = rank_count(4);
  if (is_section_chosen("faults")) {
    if (ranks < 4) skip("needs four ranks");
    int first = 0, second = 2;
    run_ranks("shrinks", PROCESSES, ranks, shrink_without_the_dead, &second);
    run_ranks("shrinks without its host", PROCESSES, ranks, shrink_without_the_dead, &first);
    return finish();
  }
  if (getenv("CTESTS_HOSTS") || ranks > 16) {
    if (ranks < 4) skip("needs four ranks");
    run_ranks("hosts", PROCESSES, ranks / 2 * 2, on_hosts, NULL);
    return finish();
  }
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("in_turn")) run_ranks("in turn", PROCESSES, ranks, in_turn, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  if (is_section_chosen("one_thread")) by_one_thread(ranks);
  return finish();
}
