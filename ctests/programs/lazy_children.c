/* Holds that lazy communicators made from others, and all of a process made by one call, work as those that NCCL builds at once.
 * Cases: colors of one, two and three ranks at a time, ranks without a color or with reversed keys, children of pairs and of
 * children, of destroyed and of revoked parents, shrunk ones, with configurations, several in one group. */
#include "../support/one_thread.h"
#include "../support/team.h"

static int version;

/* The color of each of four ranks. Two ranks use the halves. */
struct coloring { int colors[4]; };
enum { NONE = NCCL_SPLIT_NOCOLOR };

/* Splits off this rank's child, whose ranks keep the parent's order or reverse it. `build` states whether NCCL must build it. */
static struct team child_of(const struct team* parent, const int* colors, bool turned, enum build build,
                            ncclConfig_t* configuration) {
  struct team child = {(ncclComm_t)(uintptr_t)1, 0, 0};
  int color = colors[parent->rank];
  NCCL(ncclCommSplit(parent->communicator, color, turned ? -parent->rank : parent->rank, &child.communicator,
                     configuration));
  if (color == NONE) {
    CHECK(child.communicator == NULL);
    return child;
  }
  for (int rank = 0; rank < parent->ranks; rank++) {
    if (colors[rank] != color) continue;
    child.rank += turned ? rank > parent->rank : rank < parent->rank;
    child.ranks++;
  }
  expect_lazy(child.ranks, child.ranks == 1 ? BUILT : build);
  return child;
}

static void lives(struct rank* self, const struct team* child, enum build build, uint64_t key) {
  if (child->communicator) team_knows_itself(self, child);
  team_passes(self, child, 5003, key);
  if (build == BUILT) team_reduces(self, child, key);
}

static void ends(const struct team* child) {
  if (child->communicator) NCCL(ncclCommDestroy(child->communicator));
}

/* A parent of all ranks of the section. Whether a split needs NCCL to build the parent is not stated. */
static struct team parent_made(struct rank* self) { return team_made(self, self->ranks, EITHER); }

/* Children of different sizes at the same time, with messages alone and with collectives. */
static void mixed(struct rank* self) {
  static const struct coloring colorings[] = {{{0, 1, 1, 1}}, {{4, 4, 2, 2}}, {{0, 1, 2, 2}}, {{3, 3, NONE, NONE}},
                                              {{1, 0, 1, 0}}, {{0, 0, 0, 1}}, {{7, 7, 7, 7}}, {{NONE, NONE, NONE, NONE}}};
  struct team parent = parent_made(self);
  for (int i = 0; i < (int)(sizeof colorings / sizeof *colorings); i++) {
    for (int used = 0; used < 2; used++) {
      if (on_gpus() && used != i % 2) continue;
      enum build build = used ? BUILT : UNBUILT;
      struct team child = child_of(&parent, colorings[i].colors, i % 2, build, NULL);
      lives(self, &child, build, 100 + (uint64_t)(i * 2 + used));
      ends(&child);
    }
  }
  team_passes(self, &parent, 1001, 99);
  team_reduces(self, &parent, 99);
  ends(&parent);
}

/* Several children live at once. Collectives come last, and only on some. */
static void many_alive(struct rank* self) {
  static const struct coloring colorings[] = {{{0, 0, 1, 1}}, {{0, 1, 1, 0}}, {{0, 1, 0, 1}}};
  struct team parent = parent_made(self), children[3];
  for (int i = 0; i < 3; i++) children[i] = child_of(&parent, colorings[i].colors, false, i == 1 ? UNBUILT : BUILT, NULL);
  for (int i = 0; i < 3; i++) lives(self, &children[i], UNBUILT, 140 + (uint64_t)i);
  team_reduces(self, &parent, 143);
  for (int i = 2; i >= 0; i -= 2) lives(self, &children[i], BUILT, 144 + (uint64_t)i);
  destroy_each((ncclComm_t[]){children[0].communicator, children[1].communicator, children[2].communicator}, 3);
  ends(&parent);
}

/* Children of a pair: reversed, of one rank each, with a rank left out, and like the parent. */
static void of_a_pair(struct rank* self) {
  static const int same[] = {5, 5}, parted[] = {0, 1}, left_out[] = {0, NONE};
  struct team parent = team_made(self, 2, EITHER);
  struct team turned = child_of(&parent, same, true, UNBUILT, NULL);
  lives(self, &turned, UNBUILT, 150);
  struct team alone = child_of(&parent, parted, false, BUILT, NULL);
  lives(self, &alone, BUILT, 151);
  struct team some = child_of(&parent, left_out, false, BUILT, NULL);
  lives(self, &some, BUILT, 152);
  team_reduces(self, &parent, 153);
  struct team again = child_of(&parent, same, false, BUILT, NULL);
  lives(self, &again, BUILT, 154);
  ends(&some);
  ends(&alone);
  ends(&turned);
  ends(&again);
  ends(&parent);
}

/* Children of children. Every parent is destroyed as soon as it has a child. */
static void nested(struct rank* self) {
  static const struct coloring colorings[] = {{{0, 0, 0, NONE}}, {{2, 2, NONE}}, {{6, 6}}, {{1, 0}}};
  struct team parent = parent_made(self);
  for (int i = self->ranks == 2 ? 2 : 0; i < 4; i++) {
    bool splits = parent.communicator != NULL;
    enum build build = i == 1 ? EITHER : BUILT;
    struct team child = {NULL, 0, 0};
    if (splits) child = child_of(&parent, colorings[i].colors, i % 2, build, NULL);
    ends(&parent);
    lives(self, &child, i == 1 ? UNBUILT : BUILT, 160 + (uint64_t)i);
    parent = child;
  }
  ends(&parent);
}

static void configured(struct rank* self) {
  static const int halves[] = {0, 0, 1, 1};
  struct team parent = parent_made(self);
  char name[] = "child";
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 1;
  configuration.maxCTAs = 8;
  configuration.splitShare = 1;
  configuration.commName = name;
  struct team child = child_of(&parent, halves, true, BUILT, &configuration);
  configuration.blocking = 77;
  name[0] = '?';
  lives(self, &child, BUILT, 170);
  ends(&child);
  ends(&parent);
}

/* Without rank 0, which does not call. */
static void shrunk(struct rank* self) {
  if (version < 22703 || self->ranks < 3) return;
  struct team parent = parent_made(self);
  struct team first = {NULL, self->rank - 1, self->ranks - 1}, second = {NULL, self->rank - 2, self->ranks - 2};
  int excluded = 0;
  if (self->rank > 0) {
    NCCL(ncclCommShrink(parent.communicator, &excluded, 1, &first.communicator, NULL, NCCL_SHRINK_DEFAULT));
    expect_lazy(first.ranks, EITHER);
  }
  lives(self, &first, BUILT, 180);
  if (self->rank > 1) {
    NCCL(ncclCommShrink(first.communicator, &excluded, 1, &second.communicator, NULL, NCCL_SHRINK_DEFAULT));
    expect_lazy(second.ranks, UNBUILT);
  }
  lives(self, &second, UNBUILT, 181);
  ends(&second);
  ends(&first);
  ends(&parent);
}

/* A revoked communicator can still have children. */
static void of_a_revoked_one(struct rank* self) {
  static const int halves[] = {0, 0, 1, 1};
  if (version < 22807) return;
  struct team parent = parent_made(self);
  team_passes(self, &parent, 300, 190);
  meet(self);
  NCCL(ncclCommRevoke(parent.communicator, NCCL_REVOKE_DEFAULT));
  meet(self);
  struct team child = child_of(&parent, halves, false, BUILT, NULL);
  lives(self, &child, BUILT, 191);
  ends(&child);
  ends(&parent);
}

/* Splits of two parents in one group. NCCL makes such children; their ranks hold no session. */
static void grouped(struct rank* self) {
  static const int halves[] = {0, 0, 1, 1};
  struct team first = parent_made(self), second = parent_made(self);
  NCCL(ncclGroupStart());
  ncclComm_t made[2] = {NULL, NULL};
  NCCL(ncclCommSplit(first.communicator, halves[first.rank], first.rank, &made[0], NULL));
  NCCL(ncclCommSplit(second.communicator, 0, -second.rank, &made[1], NULL));
  NCCL(ncclGroupEnd());
  struct team half = {made[0], first.rank % 2, 2}, turned = {made[1], second.ranks - 1 - second.rank, second.ranks};
  expect_lazy(2, BUILT);
  expect_lazy(second.ranks, BUILT);
  lives(self, &half, BUILT, 200);
  lives(self, &turned, BUILT, 201);
  destroy_each((ncclComm_t[]){half.communicator, turned.communicator, first.communicator, second.communicator}, 4);
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  RUN_PART(mixed, self);
  RUN_PART(many_alive, self);
  RUN_PART(of_a_pair, self);
  RUN_PART(nested, self);
  RUN_PART(configured, self);
  RUN_PART(shrunk, self);
  RUN_PART(of_a_revoked_one, self);
  RUN_PART(grouped, self);
}

/* Every rank of a pair sends the other a message, on all communicators in one group. */
static void exchanges(struct one_thread* all, const ncclComm_t* communicators, uint64_t key) {
  struct message from[RANKS_MAX], to[RANKS_MAX];
  for (int device = 0; device < all->ranks; device++) {
    one_thread_use(all, device);
    from[device] = message_to_send(key + (uint64_t)device, 6007, 0);
    to[device] = message_to_receive(key + (uint64_t)(device ^ 1), 6007, 0);
  }
  NCCL(ncclGroupStart());
  for (int device = 0; device < all->ranks; device++) {
    message_receive(&to[device], 1 - device % 2, communicators[device], all->streams[device]);
    message_send(&from[device], 1 - device % 2, communicators[device], all->streams[device]);
  }
  NCCL(ncclGroupEnd());
  for (int device = 0; device < all->ranks; device++) {
    one_thread_use(all, device);
    wait_for(all->streams[device]);
    message_verify(&to[device], &all->all);
    message_release(&from[device]);
    message_release(&to[device]);
  }
}

/* All pairs of one process are made by one thread, by one call each: messages first, then the first collectives of all pairs in
 * one group. */
static void pairs_of_one_process(int ranks) {
  struct one_thread all = one_thread_begin("one thread", ranks);
  ncclComm_t quiet[RANKS_MAX], loud[RANKS_MAX], turned[RANKS_MAX];
  for (int low = 0; low < ranks; low += 2) {
    int devices[] = {low, low + 1};
    NCCL(ncclCommInitAll(&quiet[low], 2, devices));
    NCCL(ncclCommInitAll(&loud[low], 2, devices));
    for (int i = 0; i < 2; i++) {
      expect_lazy(2, UNBUILT);
      expect_lazy(2, BUILT);
    }
  }
  exchanges(&all, quiet, 300);
  exchanges(&all, loud, 320);
  struct transfer transfers[RANKS_MAX];
  for (int device = 0; device < ranks; device++) {
    one_thread_use(&all, device);
    transfers[device] = (struct transfer){.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 901,
                                          .rank = device % 2, .ranks = 2, .key = 340};
    transfer_prepare(&transfers[device]);
  }
  CUcontext before = NULL, after = NULL;
  CUDA(cuCtxGetCurrent(&before));
  NCCL(ncclGroupStart());
  for (int device = ranks - 1; device >= 0; device--) transfer_launch(&transfers[device], loud[device], all.streams[device]);
  NCCL(ncclGroupEnd());
  CUDA(cuCtxGetCurrent(&after));
  CHECK(before == after);
  for (int device = 0; device < ranks; device++) {
    one_thread_use(&all, device);
    wait_for(all.streams[device]);
    transfer_verify(&transfers[device], &all.all);
    transfer_release(&transfers[device]);
  }
  exchanges(&all, loud, 360);
  /* Children of those pairs, made in one group, each with its ranks reversed. */
  for (int low = 0; low < ranks; low += 2) {
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) NCCL(ncclCommSplit(loud[low + i], 0, -i, &turned[low + 1 - i], NULL));
    NCCL(ncclGroupEnd());
    for (int i = 0; i < 2; i++) expect_lazy(2, UNBUILT);
  }
  for (int device = 0; device < ranks; device++) {
    int rank = -1;
    NCCL(ncclCommUserRank(turned[device], &rank));
    EQUAL(rank, device % 2);
  }
  one_thread_end_streams(&all);
  NCCL(ncclGroupStart());
  for (int device = 0; device < ranks; device++) NCCL(ncclCommDestroy(turned[device]));
  NCCL(ncclGroupEnd());
  for (int device = 0; device < ranks; device++) NCCL(ncclCommDestroy(quiet[device]));
  NCCL(ncclGroupStart());
  for (int device = 0; device < ranks; device++) NCCL(ncclCommDestroy(loud[device]));
  NCCL(ncclGroupEnd());
  one_thread_print(&all, "one-thread");
}

/* One thread shrinks all its ranks in one group: no rank can wait for another. */
static void shrunk_by_one_thread(int ranks) {
  struct one_thread all = one_thread_begin("shrunk", ranks);
  ncclComm_t whole[RANKS_MAX], parts[RANKS_MAX] = {NULL};
  int devices[RANKS_MAX], excluded = ranks - 1;
  for (int device = 0; device < ranks; device++) devices[device] = device;
  NCCL(ncclCommInitAll(whole, ranks, devices));
  for (int device = 0; device < ranks; device++) expect_lazy(ranks, EITHER);
  NCCL(ncclGroupStart());
  for (int device = 0; device < excluded; device++) {
    one_thread_use(&all, device);
    NCCL(ncclCommShrink(whole[device], &excluded, 1, &parts[device], NULL, NCCL_SHRINK_DEFAULT));
  }
  NCCL(ncclGroupEnd());
  one_thread_end_streams(&all);
  for (int device = 0; device < excluded; device++) NCCL(ncclCommDestroy(parts[device]));
  for (int device = 0; device < ranks; device++) NCCL(ncclCommDestroy(whole[device]));
  one_thread_print(&all, "one-thread");
}

int main(int count, char** words) {
  begin("lazy_children", 200);
  choose(count, words);
  int ranks = rank_count(4);
  ranks -= ranks % 2;
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  if (is_section_chosen("one_thread")) {
    pairs_of_one_process(ranks);
    if (ranks >= 4) shrunk_by_one_thread(ranks);
  }
  return finish();
}
