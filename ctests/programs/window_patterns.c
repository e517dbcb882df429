/* Holds that the ways in which clients use symmetric memory give the right bytes while windows are kept. Parts: vLLM (segments
 * that stay, graphs over superseded buffers), SGLang (one pool for several communicators, windows never ended), Megatron (the
 * whole pool deregistered and registered again), PyTorch's MemPool (segments that come and go), graphs over windows of recycled
 * blocks, threads that allocate beside all that. Where windows are kept, Megatron's pool makes no new ones after the first
 * rounds. */
#include "../support/reference.h"
#include "../support/windows.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MIB = 1 << 20, SEGMENTS_MAX = 16, CIRCLES_MAX = 3, ALIGNMENT = 512 };

/* A communicator, with this rank's number in it and its ranks. */
struct circle { ncclComm_t communicator; int rank, ranks; };

/* A block of a pool, handed out from its start. Several communicators may have windows over it. */
struct segment {
  struct memory memory;
  size_t used;
  bool is_registered[CIRCLES_MAX];
  ncclWindow_t windows[CIRCLES_MAX];
};

struct pool { struct segment segments[SEGMENTS_MAX]; int count; };

/* The output and input of a gather of `count` bytes a rank: at the same offset of its segment on all ranks. */
struct piece { struct memory memory; size_t offset, count; };

struct live_graph { struct gather gather; CUgraph graph; CUgraphExec executable; };

static struct circle everyone(struct rank* self) { return (struct circle){world(self, 0), self->rank, self->ranks}; }

/* Ranks of a smaller communicator: half of all, but no fewer than two. */
static int half_of(const struct rank* self) { return self->ranks >= 4 ? self->ranks / 2 : self->ranks; }

static struct circle split(const struct rank* self, const struct circle* parent, int color, int rank) {
  struct circle circle = {NULL, rank, half_of(self)};
  NCCL(ncclCommSplit(parent->communicator, color, rank, &circle.communicator, NULL));
  return circle;
}

/* A communicator of neighbouring ranks, as in tensor parallelism. */
static struct circle neighbours(const struct rank* self, const struct circle* parent) {
  return split(self, parent, self->rank / half_of(self), self->rank % half_of(self));
}

/* A communicator of one rank of each such group, as in data parallelism. */
static struct circle counterparts(const struct rank* self, const struct circle* parent) {
  int apart = self->ranks / half_of(self);
  return split(self, parent, self->rank % apart, self->rank / apart);
}

/* Destroys children before their parents. */
static void destroy_circles(const struct circle* circles, int count) {
  ncclComm_t communicators[CIRCLES_MAX];
  for (int i = 0; i < count; i++) communicators[i] = circles[count - 1 - i].communicator;
  destroy_each(communicators, count);
}

static struct segment* segment_new(struct rank* self, struct pool* pool, size_t bytes) {
  if (!CHECK(pool->count < SEGMENTS_MAX)) exit(1);
  struct segment* segment = &pool->segments[pool->count++];
  *segment = (struct segment){.memory = memory_alloc(self, NCCLS, bytes)};
  return segment;
}

static size_t piece_bytes(const struct rank* self, size_t count) {
  return (gather_room(self, count) + count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static struct piece divide(const struct rank* self, struct segment* segment, size_t count) {
  struct piece piece = {segment->memory, segment->used, count};
  segment->used += piece_bytes(self, count);
  return piece;
}

/* Takes a piece from the first segment with room, as a caching allocator does, else from a new segment. */
static struct piece take(struct rank* self, struct pool* pool, size_t count) {
  size_t bytes = piece_bytes(self, count);
  for (int i = 0; i < pool->count; i++) {
    struct segment* segment = &pool->segments[i];
    if (segment->used + bytes <= segment->memory.bytes) return divide(self, segment, count);
  }
  return divide(self, segment_new(self, pool, (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB)), count);
}

/* Registers every segment without a window of this communicator, which has the index `which`. */
static void register_new(struct pool* pool, const struct circle* circle, int which) {
  for (int i = 0; i < pool->count; i++) {
    struct segment* segment = &pool->segments[i];
    if (segment->is_registered[which]) continue;
    segment->windows[which] = window_over(circle->communicator, segment->memory.at, segment->memory.bytes);
    segment->is_registered[which] = true;
  }
}

/* All ranks must have met: NCCL hangs where a peer is still in a call. */
static void deregister_all(struct pool* pool, const struct circle* circle, int which) {
  for (int i = 0; i < pool->count; i++) {
    struct segment* segment = &pool->segments[i];
    if (segment->is_registered[which]) window_end(circle->communicator, segment->windows[which]);
    segment->is_registered[which] = false;
  }
}

/* Frees all segments but the first `kept`: upwards on even ranks, downwards on odd ones, as garbage collectors free in any
 * order. */
static void free_but(struct rank* self, struct pool* pool, int kept) {
  int leaving = pool->count - kept;
  for (int i = 0; i < leaving; i++) {
    int at = self->rank % 2 ? pool->count - 1 - i : kept + i;
    memory_free(self, &pool->segments[at].memory);
  }
  pool->count = kept;
}

static struct gather gather_at(const struct rank* self, const struct circle* circle, const struct piece* piece, uint64_t key) {
  struct rank there = *self;
  there.rank = circle->rank;
  there.ranks = circle->ranks;
  const char* send = piece->memory.at + piece->offset + gather_room(&there, piece->count);
  return gather_into(&there, send, &piece->memory, piece->offset, piece->count, key);
}

static void runs(struct rank* self, const struct circle* circle, const struct piece* piece, uint64_t key) {
  struct gather gather = gather_at(self, circle, piece, key);
  gather_run(self, circle->communicator, &gather);
}

/* An all-reduce in place, of the piece's first bytes. */
static void reduces(struct rank* self, const struct circle* circle, const struct piece* piece, uint64_t key) {
  enum { COUNT = 4099 };
  static _Thread_local float values[COUNT], wanted[COUNT];
  void* at = piece->memory.at + piece->offset;
  input_fill(values, key, circle->rank, 0, COUNT, ncclFloat, ncclSum);
  reduced_fill(wanted, key, circle->ranks, 0, COUNT, ncclFloat, ncclSum, 1);
  upload(at, values, sizeof values);
  together(self);
  NCCL(ncclAllReduce(at, at, COUNT, ncclFloat, ncclSum, circle->communicator, as_cuda(self->stream)));
  wait_for(self->stream);
  together(self);
  download(values, at, sizeof values);
  CHECK(memcmp(values, wanted, sizeof values) == 0);
  record(self, values, sizeof values);
}

/* Captures a gather, on a communicator that has run one before. */
static struct live_graph captures(struct rank* self, const struct circle* circle, const struct piece* piece) {
  struct live_graph live = {.gather = gather_at(self, circle, piece, 0)};
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  gather_launch(&live.gather, circle->communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &live.graph));
  CUDA(cuGraphInstantiateWithFlags(&live.executable, live.graph, 0));
  return live;
}

static void replays(struct rank* self, struct live_graph* live, uint64_t key) {
  live->gather.key = key;
  gather_prepare(&live->gather);
  together(self);
  CUDA(cuGraphLaunch(live->executable, self->stream));
  wait_for(self->stream);
  together(self);
  gather_verify(&live->gather, self);
}

static void graph_ends(const struct live_graph* live) {
  CUDA(cuGraphExecDestroy(live->executable));
  CUDA(cuGraphDestroy(live->graph));
}

/* At the end of each context all new segments become windows. The scratch buffer doubles, and the former one is kept, as graphs
 * captured over it are replayed later. */
static void vllm(struct rank* self) {
  enum { STEPS = 5 };
  struct circle circle = everyone(self);
  struct pool pool = {.count = 0};
  struct live_graph graphs[STEPS];
  for (uint64_t step = 0; step < STEPS; step++) {
    struct piece scratch = take(self, &pool, (size_t)(64 << 10) << step);
    struct piece tensor = take(self, &pool, 16 << 10);
    register_new(&pool, &circle, 0);
    runs(self, &circle, &tensor, 1000 + step);
    runs(self, &circle, &scratch, 1100 + step);
    graphs[step] = captures(self, &circle, &scratch);
    for (uint64_t old = 0; old <= step; old++) replays(self, &graphs[old], 1200 + 10 * step + old);
    reduces(self, &circle, &scratch, 1300 + step);
  }
  for (int step = 0; step < STEPS; step++) graph_ends(&graphs[step]);
  /* The program would end here. The simulator forgets captured calls only when their windows end. */
  meet(self);
  deregister_all(&pool, &circle, 0);
  free_but(self, &pool, 0);
  NCCL(ncclCommDestroy(circle.communicator));
}

/* One large block is divided first. Each context registers all new blocks with its own communicator. The blocks are freed while
 * they have windows, when the process ends. */
static void sglang(struct rank* self) {
  enum { CONTEXTS = 9 };
  struct circle circles[CIRCLES_MAX] = {everyone(self)};
  circles[1] = neighbours(self, &circles[0]);
  circles[2] = counterparts(self, &circles[0]);
  struct pool pool = {.count = 0};
  segment_new(self, &pool, 8 * MIB);
  struct piece pieces[CONTEXTS];
  for (uint64_t context = 0; context < CONTEXTS; context++) {
    int which = (int)context % CIRCLES_MAX;
    pieces[context] = take(self, &pool, (size_t)(256 << 10) * (1 + context / 3));
    register_new(&pool, &circles[which], which);
    runs(self, &circles[which], &pieces[context], 2000 + context);
    /* A piece of another communicator's context. */
    runs(self, &circles[which], &pieces[context / 2], 2100 + context);
    reduces(self, &circles[which], &pieces[context], 2200 + context);
  }
  meet(self);
  for (int i = 0; i < pool.count; i++) memory_free(self, &pool.segments[i].memory);
  meet(self);
  /* The program ends with its windows. On GPUs they end before the communicators, after the blocks were freed. */
  for (int i = CIRCLES_MAX - 1; i >= 0; i--) {
    if (on_gpus()) deregister_all(&pool, &circles[i], i);
    else NCCL(ncclCommAbort(circles[i].communicator));
  }
  if (on_gpus()) destroy_circles(circles, CIRCLES_MAX);
  together(self);
}

/* For NCCL's own communicators only: the simulator does not know the handles of lazy ones. */
static long long made_of(const struct circle* circles) {
  long long made = 0;
  for (int i = 0; i < CIRCLES_MAX; i++) {
    long long of_one = windows_made(circles[i].communicator);
    made += of_one > 0 ? of_one : 0;
  }
  return made;
}

/* At each context's begin the pool is deregistered from all communicators, at its end registered. */
static void megatron(struct rank* self) {
  enum { ROUNDS = 60, GROWING = 3 };
  struct circle circles[CIRCLES_MAX] = {everyone(self)};
  circles[1] = neighbours(self, &circles[0]);
  circles[2] = counterparts(self, &circles[0]);
  struct pool pool = {.count = 0};
  struct piece pieces[GROWING];
  long long made = 0;
  for (uint64_t round = 0; round < ROUNDS; round++) {
    meet(self);
    for (int i = 0; i < CIRCLES_MAX; i++) deregister_all(&pool, &circles[i], i);
    if (round < GROWING) pieces[round] = take(self, &pool, (size_t)(300 << 10) << round);
    for (int i = 0; i < CIRCLES_MAX; i++) register_new(&pool, &circles[i], i);
    if (round == GROWING) made = made_of(circles);
    CHECK(round <= GROWING || !windows_kept() || made_of(circles) == made);
    for (uint64_t i = 0; i < CIRCLES_MAX && (round < GROWING || round % 10 == 9); i++) {
      runs(self, &circles[i], &pieces[(round + i) % (round < GROWING ? round + 1 : GROWING)], 3000 + 10 * round + i);
      reduces(self, &circles[i], &pieces[0], 3005 + 10 * round + i);
    }
  }
  meet(self);
  for (int i = 0; i < CIRCLES_MAX; i++) deregister_all(&pool, &circles[i], i);
  free_but(self, &pool, 0);
  destroy_circles(circles, CIRCLES_MAX);
}

/* Segments change their sizes. In some rounds the pool is registered, in some a later segment, which PyTorch registers by
 * itself. Most segments are released, in an order that differs between ranks. */
static void mem_pool(struct rank* self) {
  enum { ROUNDS = 16, COUNT = 48 << 10 };
  struct circle circle = everyone(self);
  struct pool pool = {.count = 0};
  struct random random = random_from(0x4d656d506f6f6c);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    for (uint64_t more = 1 + random_below(&random, 3); more; more--) {
      segment_new(self, &pool, (size_t)(2 * MIB) * (1 + random_below(&random, 4)));
    }
    if (round % 4 != 3) register_new(&pool, &circle, 0);
    for (uint64_t i = 0; i < 2; i++) {
      struct segment* segment = &pool.segments[random_below(&random, (uint64_t)pool.count)];
      segment->used = ALIGNMENT * random_below(&random, 64);
      struct piece piece = divide(self, segment, COUNT);
      runs(self, &circle, &piece, 4000 + 10 * round + i);
    }
    if (round % 3 == 1) {
      struct segment* late = segment_new(self, &pool, 2 * MIB);
      struct piece piece = divide(self, late, COUNT);
      void* handle = NULL;
      NCCL(ncclCommRegister(circle.communicator, late->memory.at, late->memory.bytes, &handle));
      runs(self, &circle, &piece, 4005 + 10 * round);
      meet(self);
      NCCL(ncclCommDeregister(circle.communicator, handle));
    }
    meet(self);
    deregister_all(&pool, &circle, 0);
    free_but(self, &pool, (int)random_below(&random, 3) % pool.count);
  }
  free_but(self, &pool, 0);
  NCCL(ncclCommDestroy(circle.communicator));
}

/* Each round has a graph over a window whose block comes again. Another graph lives all the time. */
static void live_graphs(struct rank* self) {
  enum { ROUNDS = 6, COUNT = 200 << 10 };
  struct circle circle = everyone(self);
  struct pool lasting = {.count = 0};
  struct piece piece = take(self, &lasting, COUNT);
  register_new(&lasting, &circle, 0);
  runs(self, &circle, &piece, 5000);
  struct live_graph always = captures(self, &circle, &piece);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    struct pool pool = {.count = 0};
    piece = take(self, &pool, COUNT);
    register_new(&pool, &circle, 0);
    struct live_graph graph = captures(self, &circle, &piece);
    for (uint64_t i = 0; i < 2; i++) {
      replays(self, &graph, 5100 + 10 * round + 2 * i);
      replays(self, &always, 5101 + 10 * round + 2 * i);
    }
    runs(self, &circle, &piece, 5105 + 10 * round);
    graph_ends(&graph);
    meet(self);
    deregister_all(&pool, &circle, 0);
    if (round % 2) replays(self, &always, 5106 + 10 * round);
    free_but(self, &pool, 0);
  }
  replays(self, &always, 5900);
  graph_ends(&always);
  meet(self);
  deregister_all(&lasting, &circle, 0);
  free_but(self, &lasting, 0);
  NCCL(ncclCommDestroy(circle.communicator));
}

enum { HELPERS = 3, TURNS = 30, LOOKED_AT = 4096 };

struct helper { const struct rank* self; pthread_t thread; unsigned char number; };

static bool all_are(const unsigned char* bytes, unsigned char value) {
  return bytes[0] == value && memcmp(bytes, bytes + 1, LOOKED_AT - 1) == 0;
}

/* Holds that no other thread has been given this block or a part of it. */
static void holds(const struct memory* memory, unsigned char value, CUstream stream) {
  unsigned char first[LOOKED_AT], last[LOOKED_AT];
  CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory->at;
  CUDA(cuMemcpyDtoHAsync_v2(first, at, sizeof first, stream));
  CUDA(cuMemcpyDtoHAsync_v2(last, at + memory->bytes - sizeof last, sizeof last, stream));
  wait_for(stream);
  CHECK(all_are(first, value) && all_are(last, value));
}

static void* allocates(void* argument) {
  const struct helper* helper = argument;
  CUDA(cuCtxSetCurrent(helper->self->context));
  CUstream stream = new_stream();
  for (unsigned turn = 0; turn < TURNS; turn++) {
    struct memory memory[2];
    for (unsigned i = 0; i < 2; i++) {
      memory[i] = memory_alloc(helper->self, NCCLS, (size_t)(2 * MIB) * (1 + (turn + i + helper->number) % 3));
      unsigned char value = (unsigned char)(helper->number * 64 + 2 * turn + i);
      CUDA(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory[i].at, value, memory[i].bytes, stream));
    }
    wait_for(stream);
    for (unsigned i = 0; i < 2; i++) {
      holds(&memory[i], (unsigned char)(helper->number * 64 + 2 * turn + i), stream);
      memory_free(helper->self, &memory[i]);
    }
  }
  CUDA(cuStreamDestroy_v2(stream));
  return NULL;
}

static void many_threads(struct rank* self) {
  enum { ROUNDS = 12, COUNT = 300 << 10 };
  struct circle circle = everyone(self);
  struct helper helpers[HELPERS];
  for (int i = 0; i < HELPERS; i++) {
    helpers[i] = (struct helper){.self = self, .number = (unsigned char)i};
    if (pthread_create(&helpers[i].thread, NULL, allocates, &helpers[i])) abort();
  }
  for (uint64_t round = 0; round < ROUNDS; round++) {
    struct pool pool = {.count = 0};
    struct piece piece = take(self, &pool, COUNT);
    register_new(&pool, &circle, 0);
    runs(self, &circle, &piece, 6000 + round);
    meet(self);
    /* In every second round after the free, when another thread may have the memory. */
    if (round % 2) deregister_all(&pool, &circle, 0);
    memory_free(self, &pool.segments[0].memory);
    deregister_all(&pool, &circle, 0);
  }
  for (int i = 0; i < HELPERS; i++) pthread_join(helpers[i].thread, NULL);
  NCCL(ncclCommDestroy(circle.communicator));
}

static void all(struct rank* self) {
  RUN_PART(vllm, self);
  RUN_PART(sglang, self);
  RUN_PART(megatron, self);
  RUN_PART(mem_pool, self);
  RUN_PART(live_graphs, self);
  /* Threads of one process that allocate beside others' kernels hang on GPUs with NCCL alone: see `together`. */
  if (!on_gpus() || self->kind == PROCESSES) RUN_PART(many_threads, self);
}

int main(int count, char** words) {
  begin("window_patterns", 280);
  choose(count, words);
  windows_sections(rank_count(4), all);
  return finish();
}
