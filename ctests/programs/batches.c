/* Holds that many collectives in one group give the results that each would give alone. Cases: of any kinds, types, operations
 * and sizes, in and out of place, on several streams and communicators, among messages and larger collectives, eager and
 * captured, in any order on each rank. Through Windlass with a peer group, those that fit run as one kernel. Words: "few", the
 * run limits blocks (NCCL_MAX_CTAS); "few_on_one", rank 1 alone does: one kernel then takes small collectives only; "forwarded",
 * NCCL runs all; "tuned", collectives of all sizes are native. */
#include "../support/collective.h"
#include "../support/fused.h"
#include "../support/tuning.h"

#include <stdlib.h>
#include <string.h>

enum { LIST_MAX = 160 };

/* `tuned`: this program writes a tuning table. */
static bool few, few_on_one, forwarded, tuned;

static bool is_word(const char* word, const char* known) { return strcmp(word, known) == 0; }

/* See fused_since. No kernel fuses calls where NCCL runs all. */
static void batches_since(const struct rank* self, const struct fused* then, int kernels, int calls) {
  fused_since(self, then, forwarded ? 0 : kernels, forwarded ? 0 : calls);
}

static struct transfer transfer_of(const struct rank* self, enum collective which, size_t count, uint64_t key) {
  return (struct transfer){.which = which, .type = ncclFloat32, .op = ncclSum, .count = count,
                           .rank = self->rank, .ranks = self->ranks, .key = key};
}

static void prepare(struct rank* self, struct transfer* list, int count) {
  for (int i = 0; i < count; i++) transfer_prepare(&list[i]);
  together(self);
}

static void launch(const struct transfer* list, int count, ncclComm_t communicator, CUstream stream) {
  NCCL(ncclGroupStart());
  for (int i = 0; i < count; i++) transfer_launch(&list[i], communicator, stream);
  NCCL(ncclGroupEnd());
}

static void settle(struct rank* self, struct transfer* list, int count) {
  wait_for(self->stream);
  together(self);
  for (int i = 0; i < count; i++) {
    transfer_verify(&list[i], self);
    transfer_release(&list[i]);
  }
}

/* Groups of small collectives: a kernel has room for 64 calls, so a group takes one kernel for each 64. */
static void many(struct rank* self, ncclComm_t communicator) {
  static const struct { int calls, kernels, fused; } groups[] = {{1, 0, 0},   {2, 1, 2},    {3, 1, 3},     {32, 1, 32},
                                                                 {64, 1, 64}, {65, 1, 64}, {128, 2, 128}, {130, 3, 130}};
  static const enum collective kinds[] = {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER};
  struct transfer list[LIST_MAX];
  for (size_t group = 0; group < sizeof groups / sizeof *groups; group++) {
    for (int kind = 0; kind < 3; kind++) {
      int calls = groups[group].calls;
      for (int i = 0; i < calls; i++) list[i] = transfer_of(self, kinds[kind], (size_t)(1 + i * 7 % 50), 100 * group + (uint64_t)i);
      prepare(self, list, calls);
      struct fused then = fused_now();
      launch(list, calls, communicator, self->stream);
      wait_for(self->stream);
      batches_since(self, &then, groups[group].kernels, groups[group].fused);
      settle(self, list, calls);
    }
  }
}

/* More packets than a kernel has channels, then one call more than a kernel has room for over LL. That call runs alone, or all
 * run by LL128. */
static void full(struct rank* self, ncclComm_t communicator) {
  enum { CALLS = 9, KIB_16 = 4096 /* elements: 64 packets of LL, of 512 that fit */ };
  struct transfer list[CALLS];
  for (int calls = CALLS - 1; calls <= CALLS; calls++) {
    for (int i = 0; i < calls; i++)
      list[i] = transfer_of(self, ALL_REDUCE, KIB_16, 2000 + (uint64_t)(10 * calls + i)), list[i].in_place = i % 2;
    prepare(self, list, calls);
    struct fused then = fused_now();
    launch(list, calls, communicator, self->stream);
    wait_for(self->stream);
    bool is_measured = tuned || (on_gpus() && (self->ranks == 2 || self->ranks == 4));
    batches_since(self, &then, 1, !few && is_measured ? calls : CALLS - 1);
    settle(self, list, calls);
  }
}

/* By LL128, one kind after the other and then all kinds: empty ones, sizes around a packet and a share, and more than half a
 * ring; in and out of place. NCCL runs sizes that were not measured. */
static void larger(struct rank* self, ncclComm_t communicator) {
  static const enum collective kinds[] = {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER};
  static const ncclDataType_t types[] = {ncclFloat32, ncclInt8, ncclFloat32};
  static const size_t counts[] = {200000, 1, 0, 70001, 480, 479, 481, 16385, 0, 1500003, 0};
  enum { SIZES = sizeof counts / sizeof *counts };
  struct transfer list[3 * SIZES];
  for (int kind = 0; kind <= 3; kind++) {
    int calls = 0, moving = 0;
    for (int i = 0; i < 3 * SIZES; i++) {
      if (kind < 3 && i % 3 != kind) continue;
      size_t count = counts[i / 3] * (types[i % 3] == ncclInt8 ? 4 : 1) / (i % 3 ? (size_t)self->ranks : 1);
      list[calls] = transfer_of(self, kinds[i % 3], count, 3000 + (uint64_t)(100 * kind + i));
      list[calls].type = types[i % 3];
      list[calls].in_place = i / 3 % 2 && collective_can_be_in_place(list[calls].which);
      moving += list[calls++].count > 0;
    }
    prepare(self, list, calls);
    struct fused then = fused_now();
    launch(list, calls, communicator, self->stream);
    wait_for(self->stream);
    if (tuned && !few) fused_since(self, &then, kind == 3 ? 3 : 1, moving);
    settle(self, list, calls);
  }
}

/* More bytes than one kernel may take on three or more ranks: there each call runs alone, or NCCL runs all. */
static void largest(struct rank* self, ncclComm_t communicator) {
  enum { CALLS = 3 };
  struct transfer list[CALLS];
  for (int i = 0; i < CALLS; i++) list[i] = transfer_of(self, ALL_REDUCE, (3 << 20) / 4 + 1, 4000 + (uint64_t)i);
  prepare(self, list, CALLS);
  struct fused then = fused_now();
  launch(list, CALLS, communicator, self->stream);
  wait_for(self->stream);
  bool fits = !few && self->ranks == 2;
  if (tuned) batches_since(self, &then, fits ? 1 : 0, fits ? CALLS : 0);
  settle(self, list, CALLS);
}

/* Random groups: kinds with roots, types, operations, empty and large sizes, two streams. */
static void any(struct rank* self, ncclComm_t communicator) {
  static const enum collective kinds[] = {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE};
  static const ncclDataType_t types[] = {ncclFloat32, ncclInt8, ncclInt32, ncclUint64};
  static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclProd, ncclAvg};
  struct random random = random_from(77);
  CUstream other = new_stream();
  struct transfer list[40];
  for (uint64_t round = 0; round < 25; round++) {
    int calls = 1 + (int)random_below(&random, 40);
    bool alike = random_below(&random, 2), streams = random_below(&random, 4) == 0;
    for (int i = 0; i < calls; i++) {
      size_t count = random_below(&random, random_below(&random, 8) ? 300 : 9000);
      list[i] = transfer_of(self, kinds[random_below(&random, 6)], count, 5000 + 100 * round + (uint64_t)i);
      list[i].root = (int)random_below(&random, (uint64_t)self->ranks);
      if (!alike) list[i].type = types[random_below(&random, 4)], list[i].op = ops[random_below(&random, 4)];
      if (list[i].op == ncclAvg && !average_is_exact(list[i].type, self->ranks)) list[i].op = ncclSum;
      list[i].in_place = random_below(&random, 2) && collective_can_be_in_place(list[i].which);
    }
    prepare(self, list, calls);
    NCCL(ncclGroupStart());
    for (int i = 0; i < calls; i++) transfer_launch(&list[i], communicator, streams && i % 3 == 0 ? other : self->stream);
    NCCL(ncclGroupEnd());
    wait_for(other);
    settle(self, list, calls);
  }
  CUDA(cuStreamDestroy_v2(other));
}

/* Two communicators and a ring of messages in the same group. */
static void among_others(struct rank* self, ncclComm_t first, ncclComm_t second) {
  enum { COUNT = 500, CALLS = 12 };
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  int32_t give[COUNT], get[COUNT], wanted[COUNT];
  input_fill(give, 30, self->rank, 0, COUNT, ncclInt32, ncclSum);
  input_fill(wanted, 30, before, 0, COUNT, ncclInt32, ncclSum);
  void *from = device_alloc(sizeof give), *to = device_alloc(sizeof get);
  upload(from, give, sizeof give);
  struct transfer list[CALLS];
  for (int i = 0; i < CALLS; i++) list[i] = transfer_of(self, i % 2 ? ALL_REDUCE : ALL_GATHER, (size_t)(50 * i + 1), 9000 + (uint64_t)i);
  prepare(self, list, CALLS);
  NCCL(ncclGroupStart());
  for (int i = 0; i < CALLS; i++) {
    transfer_launch(&list[i], i % 4 < 2 ? first : second, self->stream);
    if (i == 3) NCCL(ncclSend(from, COUNT, ncclInt32, next, first, as_cuda(self->stream)));
    if (i == 8) NCCL(ncclRecv(to, COUNT, ncclInt32, before, first, as_cuda(self->stream)));
  }
  NCCL(ncclGroupEnd());
  settle(self, list, CALLS);
  download(get, to, sizeof get);
  CHECK(memcmp(get, wanted, sizeof get) == 0);
  record(self, get, sizeof get);
  device_free(from);
  device_free(to);
}

/* Since 2.22 NCCL sorts a group by size, so ranks may call it in any order, if no two calls move equally many bytes. */
static bool is_sorted(void) {
  int version = 0;
  NCCL(ncclGetVersion(&version));
  return version >= 22203;
}

/* Ranks begin at different places of the list, and odd ranks go backwards. */
static void launch_as_rank_likes(const struct rank* self, const struct transfer* list, int count, ncclComm_t communicator) {
  int turn = is_sorted() ? self->rank : 0;
  NCCL(ncclGroupStart());
  for (int i = 0; i < count; i++) {
    int place = turn % 2 ? count - 1 - i : i;
    transfer_launch(&list[(place + turn / 2) % count], communicator, self->stream);
  }
  NCCL(ncclGroupEnd());
}

/* Every rank calls the group in another order. Each call moves twice the bytes of the one before. The small calls run as one
 * kernel; then come all kinds. */
static void opposite_orders(struct rank* self, ncclComm_t communicator) {
  enum { SMALL = 6, MIXED = 11 };
  static const struct { enum collective which; int root; } mixed[MIXED] = {
    {ALL_REDUCE, 0}, {ALL_GATHER, 0}, {REDUCE_SCATTER, 0}, {BCAST, 1}, {BROADCAST, 0}, {REDUCE, 1}, {ALL_REDUCE, 0},
    {REDUCE, 0}, {ALL_GATHER, 0}, {REDUCE_SCATTER, 0}, {ALL_REDUCE, 0}};
  struct transfer list[MIXED];
  for (int i = 0; i < SMALL; i++) list[i] = transfer_of(self, ALL_REDUCE, (size_t)128 << i, 15000 + (uint64_t)i);
  prepare(self, list, SMALL);
  struct fused then = fused_now();
  launch_as_rank_likes(self, list, SMALL, communicator);
  wait_for(self->stream);
  batches_since(self, &then, 1, SMALL);
  settle(self, list, SMALL);
  for (int i = 0; i < MIXED; i++) {
    /* Elements of a call that moves 1 KiB, 2 KiB and so on, as NCCL counts them. */
    size_t moved = (size_t)256 << i;
    bool by_rank = mixed[i].which == ALL_GATHER || mixed[i].which == REDUCE_SCATTER;
    size_t count = mixed[i].which == ALL_REDUCE ? moved / 2 : by_rank ? moved / (size_t)self->ranks : moved;
    list[i] = transfer_of(self, mixed[i].which, count, 15100 + (uint64_t)i);
    list[i].root = mixed[i].root % self->ranks;
  }
  prepare(self, list, MIXED);
  launch_as_rank_likes(self, list, MIXED, communicator);
  settle(self, list, MIXED);
}

/* A group captured into a graph, replayed between eager groups. Where all sizes are native it runs by LL128. */
static void captured(struct rank* self, ncclComm_t communicator) {
  enum { CALLS = 20, REPLAYS = 4 };
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  struct transfer list[CALLS];
  /* All calls of a kind together stay within the limit for this number of ranks. */
  size_t times = tuned && !few ? (self->ranks > 4 ? 50 : 100) : 1;
  for (int i = 0; i < CALLS; i++)
    list[i] = transfer_of(self, i % 2 ? ALL_REDUCE : ALL_GATHER, times * (size_t)(30 * i + 1), 12000 + (uint64_t)i);
  prepare(self, list, CALLS);
  struct fused then = fused_now();
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  launch(list, CALLS, communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  batches_since(self, &then, 2, CALLS);
  for (int replay = 0; replay < REPLAYS; replay++) {
    struct transfer eager[5];
    for (int i = 0; i < 5; i++) eager[i] = transfer_of(self, REDUCE_SCATTER, (size_t)(9 * i + 1), 13000 + (uint64_t)(10 * replay + i));
    for (int i = 0; i < CALLS; i++) transfer_clear(&list[i]);
    prepare(self, eager, 5);
    CUDA(cuGraphLaunch(executable, self->stream));
    launch(eager, 5, communicator, self->stream);
    settle(self, eager, 5);
    for (int i = 0; i < CALLS; i++) transfer_verify(&list[i], self);
  }
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  for (int i = 0; i < CALLS; i++) transfer_release(&list[i]);
}

static void write_table(const struct rank* self) {
  static const char* const collectives[] = {"all_reduce", "all_gather", "reduce_scatter"};
  FILE* file = tuning_begin(self);
  if (!file) return;
  for (int i = 0; i < 3; i++) tuning_row(file, self, collectives[i], "native_bytes_max", "64M");
  tuning_end(file);
}

static void all(struct rank* self) {
  if (few_on_one && self->rank == 1) setenv("NCCL_MAX_CTAS", "16", 1); /* before the first call of NCCL, which reads the variable */
  if (tuned) write_table(self);
  ncclComm_t first = world(self, 0), second = world(self, 1);
  RUN_PART(many, self, first);
  RUN_PART(full, self, second);
  RUN_PART(larger, self, first);
  RUN_PART(largest, self, first);
  RUN_PART(any, self, first);
  RUN_PART(among_others, self, first, second);
  RUN_PART(opposite_orders, self, first);
  RUN_PART(captured, self, second);
  NCCL(ncclCommDestroy(second));
  NCCL(ncclCommDestroy(first));
}

int main(int count, char** words) {
  choose(count, words);
  for (int i = 1; i < count; i++) {
    few_on_one |= is_word(words[i], "few_on_one");
    few |= few_on_one || is_word(words[i], "few");
    forwarded |= is_word(words[i], "forwarded");
    tuned |= is_word(words[i], "tuned");
  }
  begin("batches", 280);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
