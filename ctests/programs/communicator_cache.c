/* Holds that pair communicators work when they are made again from cached ones. Cases: after finalize, unused in between, with
 * another configuration, in other roles, ended in a group or with work in flight, captured, with a child, and where one rank has
 * none to reuse. The runner compares how many the reports call reused with what this program states (--reused).
 *
 * Parts that run only if named: in `differing` one rank caches nothing; `kept` and `short` hold that unused cached communicators
 * end after some seconds, or at once where memory is short. */
#include "../support/held.h"
#include "../support/team.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* States that a communicator of this rank reuses a cached one of NCCL. */
static void expect_reuse(void) { count_calls("reused", 1); }

static struct team configured(struct rank* self, ncclConfig_t* config) {
  struct team team = {NULL, self->rank % 2, 2};
  ncclUniqueId id = team_id(self, 2);
  NCCL(ncclCommInitRankConfig(&team.communicator, 2, id, team.rank, config));
  expect_lazy(2, BUILT);
  return team;
}

static void used_and_ended(struct rank* self, struct team team, uint64_t key) {
  team_passes(self, &team, 3000, key);
  team_reduces(self, &team, key + 1);
  team_passes(self, &team, 70000, key + 2);
  team_reduces(self, &team, key + 3);
  team_knows_itself(self, &team);
  NCCL(ncclCommDestroy(team.communicator));
}

static void again(struct rank* self) {
  for (uint64_t round = 0; round < 4; round++) {
    used_and_ended(self, team_made(self, 2, BUILT), 10 + round * 10);
    /* Earlier parts may have left a cached one for the first round. */
    if (round) expect_reuse();
  }
}

static void finalized(struct rank* self) {
  struct team team = team_made(self, 2, BUILT);
  expect_reuse();
  team_reduces(self, &team, 50);
  NCCL(ncclCommFinalize(team.communicator));
  CODE(ncclCommFinalize(team.communicator), ncclInvalidArgument);
  NCCL(ncclCommDestroy(team.communicator));
  used_and_ended(self, team_made(self, 2, BUILT), 51);
  expect_reuse();
}

/* A communicator that reused a cached one and never needed it gives it back unchanged. */
static void not_needed(struct rank* self) {
  for (int round = 0; round < 3; round++) {
    struct team team = team_made(self, 2, UNBUILT);
    team_passes(self, &team, 999, 60);
    NCCL(ncclCommDestroy(team.communicator));
  }
  used_and_ended(self, team_made(self, 2, BUILT), 61);
  expect_reuse();
}

static void other_configuration(struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 4;
  used_and_ended(self, configured(self, &config), 70);
  used_and_ended(self, configured(self, &config), 75);
  expect_reuse();
  config.maxCTAs = 5;
  used_and_ended(self, configured(self, &config), 80);
}

/* Rank 0 and rank 1 change places: a cached communicator with the former ranks does not fit. */
static void other_roles(struct rank* self) {
  for (int round = 0; round < 2; round++) {
    struct team team = {NULL, 1 - self->rank % 2, 2};
    ncclUniqueId id = team_id(self, 2);
    NCCL(ncclCommInitRank(&team.communicator, 2, id, team.rank));
    expect_lazy(2, BUILT);
    if (round) expect_reuse();
    team_reduces(self, &team, 90);
    NCCL(ncclCommDestroy(team.communicator));
  }
}

/* Two communicators live at once, three times over. The last operation is in flight when they end. */
static void in_a_group(struct rank* self) {
  for (uint64_t round = 0; round < 3; round++) {
    struct team first = team_made(self, 2, BUILT), second = team_made(self, 2, BUILT);
    /* An earlier part has left one. */
    expect_reuse();
    if (round) expect_reuse();
    team_reduces(self, &first, 100 + round);
    team_reduces(self, &second, 110 + round);
    struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 60001, .rank = first.rank,
                                .ranks = 2, .key = 120 + round};
    transfer_prepare(&transfer);
    together(self);
    transfer_launch(&transfer, first.communicator, self->stream);
    NCCL(ncclGroupStart());
    NCCL(ncclCommDestroy(first.communicator));
    NCCL(ncclCommDestroy(second.communicator));
    NCCL(ncclGroupEnd());
    wait_for(self->stream);
    together(self);
    transfer_verify(&transfer, self);
    transfer_release(&transfer);
  }
}

/* Rank 0 has registered a buffer with NCCL's communicator, so only rank 1 caches its own, which alone is of no use: NCCL builds
 * twice. */
static void unfit_on_one_rank(struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 6;
  void* buffer = device_alloc(4096);
  for (uint64_t round = 0; round < 3; round++) {
    struct team team = configured(self, &config);
    team_reduces(self, &team, 130 + round);
    if (team.rank == 0 && round < 2) {
      void* registration = NULL;
      NCCL(ncclCommRegister(team.communicator, buffer, 4096, &registration));
      NCCL(ncclCommDeregister(team.communicator, registration));
    }
    NCCL(ncclCommDestroy(team.communicator));
  }
  used_and_ended(self, configured(self, &config), 135);
  expect_reuse();
  device_free(buffer);
}

/* A communicator is cached only if its own operators are destroyed first. */
static void operators(struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 7;
  for (int round = 0; round < 2; round++) {
    struct team team = configured(self, &config);
    if (round) expect_reuse();
    float two = 2, values[2] = {1, 3}, sums[2] = {0, 0};
    void* buffer = device_alloc(sizeof values);
    ncclRedOp_t twice = ncclSum;
    NCCL(ncclRedOpCreatePreMulSum(&twice, &two, ncclFloat, ncclScalarHostImmediate, team.communicator));
    upload(buffer, values, sizeof values);
    together(self);
    NCCL(ncclAllReduce(buffer, buffer, 2, ncclFloat, twice, team.communicator, as_cuda(self->stream)));
    wait_for(self->stream);
    together(self);
    download(sums, buffer, sizeof sums);
    CHECK(sums[0] == 4 && sums[1] == 12);
    device_free(buffer);
    NCCL(ncclRedOpDestroy(twice, team.communicator));
    NCCL(ncclCommDestroy(team.communicator));
  }
}

/* A communicator that a graph has captured is not cached, as the graph may run later. */
static void captured(struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 9;
  struct team team = configured(self, &config);
  team_reduces(self, &team, 150);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 501, .rank = team.rank,
                              .ranks = 2, .key = 151};
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  transfer_prepare(&transfer);
  together(self);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  transfer_launch(&transfer, team.communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA(cuGraphLaunch(executable, self->stream));
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  NCCL(ncclCommDestroy(team.communicator));
  used_and_ended(self, configured(self, &config), 152);
  used_and_ended(self, configured(self, &config), 156);
  expect_reuse();
}

/* A communicator with a child that NCCL makes, as it does in a group, is not cached: the child may share resources of its
 * parent. */
static void with_a_child(struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 10;
  struct team team = configured(self, &config), child = team;
  team_reduces(self, &team, 160);
  NCCL(ncclGroupStart());
  NCCL(ncclCommSplit(team.communicator, 0, team.rank, &child.communicator, NULL));
  NCCL(ncclGroupEnd());
  NCCL(ncclCommDestroy(team.communicator));
  team_reduces(self, &child, 161);
  NCCL(ncclCommDestroy(child.communicator));
  used_and_ended(self, configured(self, &config), 162);
}

/* An aborted communicator is not cached. */
static void aborted(struct rank* self) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 8;
  for (uint64_t round = 0; round < 3; round++) {
    struct team team = configured(self, &config);
    team_reduces(self, &team, 140 + round);
    meet(self);
    if (round < 2) NCCL(ncclCommAbort(team.communicator));
    else NCCL(ncclCommDestroy(team.communicator));
  }
  /* This one takes a cached communicator, which it does not need, and is aborted. */
  struct team team = {NULL, self->rank % 2, 2};
  ncclUniqueId id = team_id(self, 2);
  NCCL(ncclCommInitRankConfig(&team.communicator, 2, id, team.rank, &config));
  expect_lazy(2, UNBUILT);
  NCCL(ncclCommAbort(team.communicator));
  used_and_ended(self, configured(self, &config), 145);
}

static void all(struct rank* self) {
  RUN_PART(again, self);
  RUN_PART(finalized, self);
  RUN_PART(not_needed, self);
  RUN_PART(other_configuration, self);
  RUN_PART(other_roles, self);
  RUN_PART(in_a_group, self);
  RUN_PART(unfit_on_one_rank, self);
  RUN_PART(operators, self);
  RUN_PART(captured, self);
  RUN_PART(with_a_child, self);
  RUN_PART(aborted, self);
}

/* 150 communicators of one configuration and 150 of 30 others, more than are cached. The counters are those of the last 255. */
static void cycles(struct rank* self) {
  /* The simulator keeps the sockets of its latest 256 ids until the process ends. */
  for (int i = 0; i < 260; i++) team_id(self, 2);
  struct held warm = held_now();
  const struct held rooms = {24, 12, 48, (size_t)64 << 20};
  for (uint64_t round = 0; round < 300; round++) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (round % 2) config.maxCTAs = 2 + (int)(round / 2 % 30);
    struct team team = {NULL, self->rank % 2, 2};
    ncclUniqueId id = team_id(self, 2);
    NCCL(ncclCommInitRankConfig(&team.communicator, 2, id, team.rank, &config));
    team_reduces(self, &team, round);
    NCCL(ncclCommDestroy(team.communicator));
    if (round == 99) {
      meet(self);
      warm = held_now();
      meet(self);
    }
  }
  meet(self);
  CHECK(held_again(&warm, &rooms));
  meet(self);
}

static void differing(struct rank* self) {
  if (self->rank % 2) setenv("WINDLASS_CACHE_MAX", "0", 1);
  for (uint64_t round = 0; round < 3; round++) used_and_ended(self, team_made(self, 2, BUILT), 10 * round);
}

/* How many of NCCL's communicators this process caches, from its own counters. */
static int kept_now(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s.counts-%d", getenv("CTESTS_CALLS"), (int)getpid());
  ncclResult_t (*dump)(const char*) = NULL;
  *(void**)&dump = dlsym(RTLD_DEFAULT, "windlassDump");
  FILE* file = dump && dump(path) == ncclSuccess ? fopen(path, "r") : NULL;
  if (!file) return -1;
  static char text[1 << 20];
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  fclose(file);
  unlink(path);
  const char* kept = strstr(text, "\"cached\":");
  return kept ? atoi(kept + strlen("\"cached\":")) : -1;
}

/* Whether exactly `kept` are cached within `seconds`. */
static bool keeps_within(int kept, int seconds) {
  time_t until = time(NULL) + seconds;
  while (kept_now() != kept && time(NULL) <= until) usleep(20 * 1000);
  return kept_now() == kept;
}

/* A pair that is made again quickly reuses the cached communicator. An unused one ends after some seconds, but while another
 * communicator lives only with that communicator's end. */
static void kept(struct rank* self) {
  used_and_ended(self, team_made(self, 2, BUILT), 10);
  CHECK(kept_now() == 1);
  used_and_ended(self, team_made(self, 2, BUILT), 20);
  expect_reuse();
  CHECK(kept_now() == 1);
  meet(self);
  CHECK(keeps_within(0, 8));
  meet(self);
  used_and_ended(self, team_made(self, 2, BUILT), 30);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 4;
  struct team other = configured(self, &config);
  team_reduces(self, &other, 40);
  sleep(6);
  CHECK(kept_now() == 1);
  meet(self);
  NCCL(ncclCommDestroy(other.communicator));
  CHECK(kept_now() == 1);
  meet(self);
  used_and_ended(self, configured(self, &config), 50);
  expect_reuse();
}

/* Where memory is short cached communicators end soon, and no more are cached. */
static void short_of_memory(struct rank* self) {
  used_and_ended(self, team_made(self, 2, BUILT), 10);
  CHECK(kept_now() == 1);
  meet(self);
  size_t free_bytes = 0, total = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total));
  const size_t left = (size_t)100 << 20;
  void* taken = device_alloc(free_bytes > left ? free_bytes - left : 1);
  CHECK(keeps_within(0, 2));
  meet(self);
  used_and_ended(self, team_made(self, 2, BUILT), 20);
  CHECK(kept_now() == 0);
  meet(self);
  device_free(taken);
  used_and_ended(self, team_made(self, 2, BUILT), 30);
  used_and_ended(self, team_made(self, 2, BUILT), 40);
  expect_reuse();
}

int main(int count, char** words) {
  begin("communicator cache", 110);
  int ranks = rank_count(2) / 2 * 2;
  if (count > 1 && !strcmp(words[1], "differing")) run_ranks("differing", PROCESSES, ranks, differing, NULL);
  else if (count > 1 && !strcmp(words[1], "cycles")) run_ranks("cycles", PROCESSES, ranks, cycles, NULL);
  else if (count > 1 && !strcmp(words[1], "kept")) run_ranks("kept", PROCESSES, ranks, kept, NULL);
  else if (count > 1 && !strcmp(words[1], "short")) run_ranks("short", PROCESSES, ranks, short_of_memory, NULL);
  else {
    choose(count, words);
    if (is_section_chosen("processes")) run_ranks("pairs", PROCESSES, ranks, all, NULL);
    if (is_section_chosen("threads")) run_ranks("pairs by threads", THREADS, ranks, all, NULL);
  }
  return finish();
}
