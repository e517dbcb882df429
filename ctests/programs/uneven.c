/* Holds that broadcasts, or reduces, with a root each in one group give what each would give alone. Cases: of any sizes, also
 * none, in any order, of all types, in and out of place, eager and captured, on several streams and communicators, among other
 * calls, above every limit, and beside wrong arguments. windlassAllGatherV and windlassReduceScatterV do, too, and refuse wrong
 * arguments. Through Windlass with a peer group each such group within the limits runs as one kernel. */
#include "../support/collective.h"
#include "../support/fused.h"
#include "../support/uneven.h"

#include <stdlib.h>
#include <string.h>

enum { LIST_MAX = 64, KIB = 1024 };

/* Elements of each part; ranks have these in turn. */
static const size_t SIZES[][3] = {{1, 0, 0},       {5, 7, 961},    {240, 241, 0},  {0, 0, 2000},
                                  {700, 3, 64},    {1000, 1000, 1000}, {0, 0, 0},  {1, 2, 3}};
enum { SIZES_COUNT = sizeof SIZES / sizeof *SIZES };

static struct uneven uneven_of(const struct rank* self, bool reduces, const size_t (*sizes)[3], uint64_t key) {
  struct uneven u = {.reduces = reduces, .type = reduces ? ncclFloat32 : ncclInt8, .op = ncclSum,
                     .rank = self->rank, .ranks = self->ranks, .key = key};
  for (int rank = 0; rank < self->ranks; rank++) u.counts[rank] = (*sizes)[((size_t)rank + key) % 3];
  return u;
}

/* NCCL runs reduces of other types and operations, unless limits were measured: here, or for 2 ranks of such GPUs. */
static bool is_native(const struct uneven* u) {
  if (u->ranks == 2 && (getenv("WINDLASS_SIM_MULTIPROCESSORS") || on_gpus())) return true;
  const char* cache = getenv("WINDLASS_CACHE");
  if (cache && strcmp(cache, "off") != 0) return true;
  bool is_short_float = u->type == ncclFloat16 || u->type == ncclFloat32 || u->type == ncclBfloat16;
  return !u->reduces || (is_short_float && u->op == ncclSum);
}

/* Runs all without a wait between, then verifies all. Each with several parts must be one kernel. */
static void run_all(struct rank* self, ncclComm_t communicator, struct uneven* list, int count, bool whole) {
  int kernels = 0, calls = 0;
  for (int i = 0; i < count; i++) {
    uneven_prepare(&list[i]);
    int parts = is_native(&list[i]) ? uneven_parts(&list[i]) : 0;
    kernels += parts > 1;
    calls += parts > 1 ? parts : 0;
  }
  together(self);
  struct fused then = fused_now();
  for (int i = 0; i < count; i++) (whole ? uneven_launch_whole : uneven_launch)(&list[i], communicator, self->stream);
  wait_for(self->stream);
  fused_since(self, &then, kernels, calls);
  together(self);
  for (int i = 0; i < count; i++) {
    uneven_verify(&list[i], self);
    uneven_release(&list[i]);
  }
}

static void sizes(struct rank* self, ncclComm_t communicator) {
  for (int variant = 0; variant < 4; variant++) {
    struct uneven list[LIST_MAX];
    int count = 0;
    for (int number = 0; number < SIZES_COUNT; number++, count++) {
      list[count] = uneven_of(self, (number + variant / 2) & 1, &SIZES[number], (uint64_t)(100 + 10 * variant + number));
      list[count].in_place = variant & 1;
      list[count].backwards = number & 2;
      list[count].packed = number & 4;
    }
    run_all(self, communicator, list, count, false);
  }
}

static void types(struct rank* self, ncclComm_t communicator) {
  struct uneven list[LIST_MAX];
  int count = 0;
  for (int type = 0; type < REDUCIBLE_COUNT; type++) {
    for (int reduces = 0; reduces < 2; reduces++, count++) {
      list[count] = uneven_of(self, reduces, &SIZES[1 + type % 2], (uint64_t)(200 + count));
      list[count].type = REDUCIBLE[type];
      list[count].op = type % 3 ? ncclSum : ncclMax;
    }
  }
  run_all(self, communicator, list, count, false);
}

static void functions(struct rank* self, ncclComm_t communicator) {
  struct uneven list[LIST_MAX];
  int count = 0;
  for (int number = 0; number < SIZES_COUNT; number++) {
    for (int reduces = 0; reduces < 2; reduces++, count++) {
      list[count] = uneven_of(self, reduces, &SIZES[number], (uint64_t)(300 + count));
      list[count].packed = number & 1;
      list[count].in_place = number & 2;
    }
  }
  run_all(self, communicator, list, count, true);
}

/* Two uneven collectives, on two streams and communicators, with other calls between, in one group of the program's. */
static void among_others(struct rank* self, ncclComm_t first, ncclComm_t second) {
  enum { LISTED = 4 };
  CUstream other = new_stream();
  struct uneven list[LISTED];
  for (int i = 0; i < LISTED; i++) {
    list[i] = uneven_of(self, i & 1, &SIZES[i + 1], (uint64_t)(400 + i));
    uneven_prepare(&list[i]);
  }
  struct transfer reduce = {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 77,
                            .rank = self->rank, .ranks = self->ranks, .key = 410};
  struct transfer broadcast = reduce;
  broadcast.which = BROADCAST;
  broadcast.key = 411;
  transfer_prepare(&reduce);
  transfer_prepare(&broadcast);
  int next = (self->rank + 1) % self->ranks, last = (self->rank + self->ranks - 1) % self->ranks;
  int32_t give = self->rank, get = -1;
  void *from = device_alloc(4), *to = device_alloc(4);
  upload(from, &give, 4);
  together(self);
  NCCL(ncclGroupStart());
  uneven_launch(&list[0], first, self->stream);
  transfer_launch(&reduce, first, other);
  NCCL(ncclSend(from, 1, ncclInt32, next, first, as_cuda(self->stream)));
  uneven_launch_whole(&list[1], first, other);
  uneven_launch_whole(&list[2], second, self->stream);
  transfer_launch(&broadcast, first, self->stream);
  NCCL(ncclRecv(to, 1, ncclInt32, last, first, as_cuda(other)));
  uneven_launch(&list[3], second, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  wait_for(other);
  together(self);
  download(&get, to, 4);
  EQUAL(get, last);
  for (int i = 0; i < LISTED; i++) {
    uneven_verify(&list[i], self);
    uneven_release(&list[i]);
  }
  transfer_verify(&reduce, self);
  transfer_verify(&broadcast, self);
  transfer_release(&reduce);
  transfer_release(&broadcast);
  device_free(from);
  device_free(to);
  CUDA(cuStreamDestroy_v2(other));
}

/* In a graph, replayed with new inputs between eager ones. */
static void captured(struct rank* self, ncclComm_t communicator) {
  enum { CAPTURED = 3, REPLAYS = 4 };
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  struct uneven list[CAPTURED + 1];
  for (int i = 0; i <= CAPTURED; i++) {
    list[i] = uneven_of(self, i & 1, &SIZES[1 + i % 2], (uint64_t)(500 + i));
    uneven_prepare(&list[i]);
  }
  together(self);
  struct fused then = fused_now();
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  uneven_launch(&list[0], communicator, self->stream);
  uneven_launch_whole(&list[1], communicator, self->stream);
  NCCL(ncclGroupStart());
  uneven_launch(&list[2], communicator, self->stream);
  NCCL(ncclGroupEnd());
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  fused_since(self, &then, CAPTURED, uneven_parts(&list[0]) + uneven_parts(&list[1]) + uneven_parts(&list[2]));
  for (int replay = 0; replay < REPLAYS; replay++) {
    for (int i = 0; i <= CAPTURED; i++) {
      list[i].key += 50;
      uneven_fill(&list[i]);
    }
    CUDA(cuGraphLaunch(executable, self->stream));
    uneven_launch(&list[CAPTURED], communicator, self->stream);
    wait_for(self->stream);
    for (int i = 0; i <= CAPTURED; i++) uneven_verify(&list[i], self);
  }
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  for (int i = 0; i <= CAPTURED; i++) uneven_release(&list[i]);
}

/* Parts above the limit of a single call: within the limit of a group; too different, then NCCL runs the small ones, too; only
 * one. Where limits were not measured NCCL runs all. */
static void large(struct rank* self, ncclComm_t communicator) {
  static const size_t sizes[][3] = {{1200 * KIB, 900 * KIB, 1100 * KIB}, {5000 * KIB, 10, 4000}, {6000 * KIB, 0, 0}};
  for (size_t number = 0; number < sizeof sizes / sizeof *sizes; number++) {
    for (int reduces = 0; reduces < 2; reduces++) {
      struct uneven u = uneven_of(self, reduces, &sizes[number], 3 * (200 + number));
      for (int rank = 0; reduces && rank < self->ranks; rank++) u.counts[rank] /= 4;
      uneven_prepare(&u);
      together(self);
      struct fused then = fused_now();
      uneven_launch(&u, communicator, self->stream);
      wait_for(self->stream);
      /* With two ranks the second case is also native, as their limits are higher. */
      bool measured = getenv("WINDLASS_SIM_MULTIPROCESSORS") || on_gpus();
      bool all = measured && (number == 0 || (number == 1 && self->ranks == 2));
      fused_since(self, &then, all, all ? self->ranks : 0);
      together(self);
      uneven_verify(&u, self);
      uneven_release(&u);
    }
  }
}

/* A large call is alone in its group, or beside one that NCCL refuses: then nothing runs, and the next group has no error. */
static void refused(struct rank* self, ncclComm_t communicator) {
  static const size_t sizes[] = {1500 * KIB, 0, 0}, small[] = {5, 6, 7};
  struct uneven large = uneven_of(self, false, &sizes, 600), next = uneven_of(self, true, &small, 601);
  uneven_prepare(&large);
  uneven_prepare(&next);
  together(self);
  NCCL(ncclGroupStart());
  for (int root = 0; root < self->ranks; root++) {
    NCCL(ncclBroadcast(large.memory, large.memory, large.counts[root], large.type, root, communicator, as_cuda(self->stream)));
  }
  CODE(ncclBroadcast(large.memory, large.memory, 1, large.type, self->ranks, communicator, as_cuda(self->stream)), ncclInvalidArgument);
  CODE(ncclGroupEnd(), ncclInvalidArgument);
  uneven_launch(&next, communicator, self->stream);
  uneven_launch(&large, communicator, self->stream);
  wait_for(self->stream);
  together(self);
  uneven_verify(&large, self);
  uneven_verify(&next, self);
  uneven_release(&large);
  uneven_release(&next);
}

/* The functions of Windlass refuse wrong arguments, and inside a group that makes the group fail. Checks nothing where there are
 * no such functions. */
static void arguments(struct rank* self, ncclComm_t communicator) {
  ncclResult_t (*gather)(const void*, void*, const size_t*, const size_t*, ncclDataType_t, ncclComm_t, cudaStream_t) = NULL;
  ncclResult_t (*scatter)(const void*, void*, const size_t*, const size_t*, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) = NULL;
  *(void**)&gather = windlass_function("windlassAllGatherV");
  *(void**)&scatter = windlass_function("windlassReduceScatterV");
  bool has = gather && scatter;
  cudaStream_t stream = as_cuda(self->stream);
  size_t counts[RANKS_MAX] = {0}, nothing[RANKS_MAX] = {0}, negative[RANKS_MAX] = {0};
  for (int rank = 0; rank < self->ranks; rank++) counts[rank] = 1;
  negative[self->ranks - 1] = (size_t)-1;
  char* memory = device_alloc(64);
#define REFUSED(call) EQUAL(has ? (call) : ncclInvalidArgument, ncclInvalidArgument)
  REFUSED(gather(memory, memory, NULL, NULL, ncclInt8, communicator, stream));
  REFUSED(gather(memory, memory, counts, NULL, ncclInt8, NULL, stream));
  REFUSED(gather(memory, memory, counts, NULL, (ncclDataType_t)77, communicator, stream));
  REFUSED(gather(NULL, memory, counts, NULL, ncclInt8, communicator, stream));
  REFUSED(gather(memory, NULL, counts, NULL, ncclInt8, communicator, stream));
  REFUSED(gather(memory, memory, negative, NULL, ncclInt8, communicator, stream));
  REFUSED(gather(memory, memory, counts, negative, ncclInt8, communicator, stream));
  REFUSED(scatter(NULL, memory, counts, NULL, ncclInt32, ncclSum, communicator, stream));
  REFUSED(scatter(memory, NULL, counts, NULL, ncclInt32, ncclSum, communicator, stream));
  REFUSED(scatter(memory, memory, NULL, NULL, ncclInt32, ncclSum, communicator, stream));
  REFUSED(scatter(memory, memory, counts, NULL, (ncclDataType_t)77, ncclSum, communicator, stream));
  REFUSED(scatter(memory, memory, counts, NULL, ncclInt32, ncclSum, NULL, stream));
  REFUSED(scatter(memory, memory, negative, NULL, ncclInt32, ncclSum, communicator, stream));
  REFUSED(scatter(memory, memory, counts, negative, ncclInt32, ncclSum, communicator, stream));
  EQUAL(has ? gather(NULL, NULL, nothing, NULL, ncclInt8, communicator, stream) : ncclSuccess, ncclSuccess);
  EQUAL(has ? scatter(NULL, NULL, nothing, nothing, ncclInt8, ncclSum, communicator, stream) : ncclSuccess, ncclSuccess);
  /* NCCL alone knows which operators exist, and refuses the first call of the group. */
  REFUSED(scatter(memory, memory, counts, NULL, ncclInt32, (ncclRedOp_t)77, communicator, stream));
  /* The counts of the last three calls; all others made no calls of NCCL. */
  if (has) {
    count_calls("ncclGroupStart", 3);
    count_calls("ncclGroupEnd", 3);
    count_calls("ncclBroadcast", self->ranks);
    count_calls("ncclReduce", self->ranks + 1);
  }
  NCCL(ncclGroupStart());
  REFUSED(gather(memory, memory, negative, NULL, ncclInt8, communicator, stream));
  CODE(ncclGroupEnd(), has ? ncclInvalidArgument : ncclSuccess);
#undef REFUSED
  wait_for(self->stream);
  device_free(memory);
}

static void all(struct rank* self) {
  ncclComm_t first = world(self, 0), second = world(self, 1);
  RUN_PART(sizes, self, first);
  if (self->kind == PROCESSES) RUN_PART(types, self, first);
  RUN_PART(functions, self, second);
  RUN_PART(among_others, self, first, second);
  RUN_PART(captured, self, first);
  if (self->kind == PROCESSES) RUN_PART(large, self, second);
  RUN_PART(refused, self, first);
  RUN_PART(arguments, self, second);
  NCCL(ncclCommDestroy(second));
  NCCL(ncclCommDestroy(first));
}

int main(int count, char** words) {
  choose(count, words);
  begin("uneven", 560);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
