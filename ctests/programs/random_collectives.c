/* Holds that random collectives and shifts give what a reference on the host gives and write nothing else, and that ranks get
 * the same bits where all get a result. Calls are of every kind, type, operation, count and alignment, in and out of place, over
 * several communicators and streams, alone, in groups, in groups over two communicators and in graphs. Some graphs are launched
 * again in later batches. All ranks derive the same plan from the seed.
 *
 * CTESTS_OPERATIONS: the number of calls, 400. CTESTS_SECONDS: a time after which no further batch begins. The test ends with
 * the first batch that has an error. */
#include "../support/calls.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PLACES_MAX = 5, STREAMS = 3, ITEMS_MAX = 8, CALLS_MAX = 96, CLEARED = 0xee };
enum { KEPT = 4, KEPT_EVERY = 7 }; /* graphs that live on, and after how many batches one of them is replaced */

/* Calls on one communicator and stream that are launched together. */
struct item {
  int place, stream, first, count;
  bool grouped, with_next, captured;
  int replays;
};

struct batch {
  struct item items[ITEMS_MAX];
  struct call calls[CALLS_MAX];
  int item_count, call_count;
  bool captures;
  size_t begin, used, limit; /* of the received bytes */
  int results;               /* the index of its first call in `board->results` */
};

/* A graph that is launched again in later batches. It has a batch of one item, with its own part of the received bytes. */
struct kept { struct batch batch; CUgraphExec executable; bool is_launched; int after; /* the item after which it is launched */ };

/* Shared by all ranks: written and read between two barriers of a batch. */
struct board { bool over; uint64_t results[(1 + KEPT) * CALLS_MAX][RANKS_MAX]; };
static struct board* board;

struct machine {
  struct rank* self;
  struct place places[PLACES_MAX];
  int place_count, known;
  CUstream streams[STREAMS];
  char *values, *received; /* device */
  unsigned char* seen;
  bool captures;
  struct kept kept[KEPT];
  unsigned long long bytes; /* of all calls, for each its larger buffer */
};

struct options { uint64_t seed; int operations; double seconds; bool captures; };

static size_t pool_bytes(void) { return on_gpus() ? (size_t)72 << 20 : (size_t)1280 << 10; }
static size_t received_bytes(void) { return on_gpus() ? (size_t)384 << 20 : (size_t)8 << 20; }
static size_t kept_bytes(void) { return received_bytes() / 16; }

/* Bytes of a rank's larger buffer. */
static size_t draw_bytes(struct random* random) {
  uint64_t kind = random_below(random, 1000);
  if (kind < 30) return 0;
  if (kind < 400) return random_below(random, 2048);
  if (!on_gpus()) return random_below(random, kind < 900 ? 16 << 10 : kind < 990 ? 64 << 10 : 1 << 20);
  if (kind < 800) return random_below(random, 64 << 10);
  if (kind < 960) return random_below(random, 1 << 20);
  if (kind < 997) return random_below(random, 4 << 20);
  return random_below(random, (uint64_t)64 << 20);
}

/* Adds a call; false if the batch is full. */
static bool add(struct batch* batch, const struct machine* machine, const struct item* item, struct call call) {
  int ranks = machine->places[item->place].ranks;
  size_t bytes = larger_bytes(&call, ranks);
  call.area = (batch->used + LINE - 1) / LINE * LINE;
  if (batch->call_count == CALLS_MAX || call.area + bytes + 2 * SLACK > batch->limit) return false;
  batch->calls[batch->call_count++] = call;
  batch->used = call.area + bytes + SLACK;
  return true;
}

static struct call draw_call(struct random* random, const struct machine* machine, const struct item* item, int which) {
  int ranks = machine->places[item->place].ranks;
  struct call call = {.which = which, .type = REDUCIBLE[random_below(random, REDUCIBLE_COUNT)],
                      .op = (ncclRedOp_t)random_below(random, ncclNumOps),
                      .root = (int)random_below(random, (uint64_t)ranks), .key = random_next(random)};
  call.in_place = random_below(random, 2);
  call.real = type_is_floating(call.type) && random_below(random, 2);
  size_t bytes = draw_bytes(random);
  call.count = 1;
  call.count = bytes / larger_bytes(&call, ranks);
  if (which == SHIFT || which == ALL_TO_ALL || which == GATHER || which == SCATTER) call.in_place = false;
  /* A second launch would take the result for its input. */
  if (item->captured && call_reduces(&call)) call.in_place = false;
  return call;
}

static void draw_item(struct batch* batch, struct random* random, const struct machine* machine, const struct item* item) {
  int ranks = machine->places[item->place].ranks;
  if (item->grouped && random_below(random, 6) == 0) {
    /* Parts of different sizes: a broadcast from each rank, or a reduce to each. */
    int which = random_below(random, 2) ? BROADCAST : REDUCE;
    struct call first = draw_call(random, machine, item, which);
    for (int root = 0; root < ranks; root++) {
      struct call call = first;
      call.root = root;
      call.count = random_below(random, first.count + 1);
      call.key = random_next(random);
      if (!add(batch, machine, item, call)) return;
    }
    return;
  }
  int most = item->grouped ? 8 : 4;
  for (int left = 1 + (int)random_below(random, (uint64_t)most); left > 0; left--) {
    int which = (int)random_below(random, (uint64_t)machine->known + item->grouped);
    if (which == machine->known) which = SHIFT; /* only in groups, as else all ranks would wait for each other */
    if (!add(batch, machine, item, draw_call(random, machine, item, which))) return;
  }
}

static void draw_kept(struct kept* kept, int number, struct random* random, const struct machine* machine) {
  size_t begin = received_bytes() + kept_bytes() * (size_t)number;
  *kept = (struct kept){.batch = {.item_count = 1, .captures = true, .begin = begin, .used = begin, .limit = begin + kept_bytes(),
                                  .results = (1 + number) * CALLS_MAX}};
  struct item* item = &kept->batch.items[0];
  item->place = (int)random_below(random, (uint64_t)machine->place_count);
  item->stream = item->place % STREAMS;
  item->grouped = random_below(random, 2);
  item->captured = true;
  draw_item(&kept->batch, random, machine, item);
  item->count = kept->batch.call_count;
}

static void draw_batch(struct batch* batch, struct random* random, const struct machine* machine) {
  memset(batch, 0, sizeof *batch);
  batch->limit = received_bytes();
  batch->item_count = 1 + (int)random_below(random, ITEMS_MAX);
  bool captures = batch->captures = machine->captures && random_below(random, 3) == 0;
  for (int i = 0; i < batch->item_count; i++) {
    struct item* item = &batch->items[i];
    item->place = (int)random_below(random, (uint64_t)machine->place_count);
    item->stream = (int)random_below(random, STREAMS);
    item->grouped = random_below(random, 2);
    item->captured = captures && random_below(random, 2);
    item->replays = 1 + (int)random_below(random, 3);
    /* NCCL's simulator does not order graphs among eager operations of other streams. */
    if (captures && !on_gpus()) item->stream = item->place % STREAMS;
    item->first = batch->call_count;
    draw_item(batch, random, machine, item);
    item->count = batch->call_count - item->first;
  }
  /* One group over two communicators. */
  for (int i = 0; i + 1 < batch->item_count; i++) {
    struct item *item = &batch->items[i], *next = item + 1;
    bool fit = item->grouped && next->grouped && !item->captured && !next->captured && item->place != next->place;
    item->with_next = random_below(random, 3) == 0 && fit && !(i && batch->items[i - 1].with_next);
  }
}

/* Clears the received bytes of this batch, and writes the inputs of calls in place. */
static void prepare(struct machine* machine, const struct batch* batch) {
  int rank = machine->self->rank;
  device_fill(machine->received + batch->begin, CLEARED, batch->used + SLACK - batch->begin);
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    const struct place* place = &machine->places[item->place];
    for (int j = item->first; place->own >= 0 && j < item->first + item->count; j++) {
      const struct call* call = &batch->calls[j];
      bool gives = (call->which != BROADCAST && call->which != BCAST) || place->own == call->root;
      size_t bytes = block_bytes(call) * blocks_given(call, place->ranks);
      machine->bytes += larger_bytes(call, place->ranks);
      if (!gives || !bytes || !shares_buffer(call, place->own)) continue;
      size_t at = output_of(call, rank);
      if (call->which == ALL_GATHER) at += bytes * (size_t)place->own;
      CUDA(cuMemcpyDtoDAsync_v2((CUdeviceptr)(uintptr_t)(machine->received + at),
                                (CUdeviceptr)(uintptr_t)(machine->values + values_offset(source_of(call, rank, place->ranks))),
                                bytes, machine->streams[0]));
    }
  }
  wait_for(machine->streams[0]);
}

static void issue(const struct machine* machine, const struct place* place, const struct call* call, CUstream stream) {
  call_issue(call, place, machine->self->rank, machine->values, machine->received, stream);
}

/* Launches again a graph that an item has captured. On GPUs it takes another stream, as NCCL orders those. */
static void launch_again(const struct machine* machine, const struct item* item, CUgraphExec executable, int stream) {
  if (executable) CUDA(cuGraphLaunch(executable, machine->streams[on_gpus() ? stream : item->stream]));
}

static void capture(const struct machine* machine, const struct batch* batch, const struct item* item, CUgraphExec* executable) {
  CUgraph graph = NULL;
  CUstream stream = machine->streams[item->stream];
  CUDA(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  if (item->grouped) NCCL(ncclGroupStart());
  for (int j = item->first; j < item->first + item->count; j++) {
    issue(machine, &machine->places[item->place], &batch->calls[j], stream);
  }
  if (item->grouped) NCCL(ncclGroupEnd());
  CUDA(cuStreamEndCapture(stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(executable, graph, 0));
  CUDA(cuGraphDestroy(graph));
}

/* Waits for all streams where ranks are threads of one process on GPUs: there NCCL's first use of a connection may wait for all
 * kernels of the process, and delay launches for which these kernels wait. See `together`. */
static void settle(const struct machine* machine) {
  if (machine->self->kind != THREADS || !on_gpus()) return;
  for (int i = 0; i < STREAMS; i++) wait_for(machine->streams[i]);
  meet(machine->self);
}

static void launch(const struct machine* machine, const struct batch* batch, struct random* random, CUgraphExec* executables) {
  bool open = false, done[KEPT] = {false};
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    const struct place* place = &machine->places[item->place];
    /* Drawn on every rank, to keep the sequences equal. */
    int former = (int)random_below(random, ITEMS_MAX), other = (int)random_below(random, STREAMS);
    bool begins = item->grouped && !open && (place->own >= 0 || (item->with_next && machine->places[item[1].place].own >= 0));
    if (item->captured) {
      if (place->own >= 0 && item->count) capture(machine, batch, item, &executables[i]);
      for (int replay = 0; replay < item->replays; replay++) launch_again(machine, item, executables[i], item->stream);
    } else {
      if (begins) NCCL(ncclGroupStart());
      open = open || begins;
      for (int j = item->first; j < item->first + item->count; j++) {
        if (place->own >= 0) issue(machine, place, &batch->calls[j], machine->streams[item->stream]);
        if (!item->grouped) settle(machine);
      }
      if (open && !item->with_next) NCCL(ncclGroupEnd());
      open = open && item->with_next;
    }
    if (item->with_next) continue;
    settle(machine);
    if (former < i) launch_again(machine, &batch->items[former], executables[former], other);
    for (int k = 0; k < KEPT; k++) {
      const struct kept* kept = &machine->kept[k];
      if (!kept->is_launched || done[k] || i < kept->after) continue;
      launch_again(machine, &kept->batch.items[0], kept->executable, (other + k) % STREAMS);
      done[k] = true;
    }
  }
}

static uint64_t digest_words(const unsigned char* bytes, size_t count) {
  uint64_t digest = count;
  for (size_t at = 0; at < count; at += 8) {
    uint64_t word = 0;
    memcpy(&word, bytes + at, count - at < 8 ? count - at : 8);
    digest = (digest ^ word) * 0x100000001b3u;
    digest ^= digest >> 29;
  }
  return digest;
}

static void tell(const struct machine* machine, const struct batch* batch, int i, int j, int number) {
  const struct item* item = &batch->items[i];
  fprintf(stderr, "  rank %d, batch %d, item %d, call %d: ", machine->self->rank, number, i, j);
  call_tell(&batch->calls[j], &machine->places[item->place]);
  fprintf(stderr, "; communicator %d, stream %d%s%s\n", item->place, item->stream, item->grouped ? ", grouped" : "",
          item->captured ? ", captured" : "");
}

/* Compares a call's output, then clears it from `seen`. Returns whether it is right. */
static bool check_one(struct machine* machine, const struct batch* batch, int i, int j, int number) {
  const struct place* place = &machine->places[batch->items[i].place];
  const struct call* call = &batch->calls[j];
  if (!call_writes(call, place->own)) return true;
  size_t bytes = block_bytes(call) * blocks_gotten(call, place->ranks);
  unsigned char* buffer = machine->seen + output_of(call, machine->self->rank);
  bool apart = shares_buffer(call, place->own) && call->which == REDUCE_SCATTER;
  unsigned char* seen = buffer + (apart ? bytes * (size_t)place->own : 0);
  size_t at = call_differs(call, place, seen, bytes);
  if (!CHECK(at == bytes)) {
    fprintf(stderr, "  byte %zu of %zu is wrong, %02x\n", at, bytes, seen[at]);
    tell(machine, batch, i, j, number);
  }
  if (call->which == ALL_REDUCE) board->results[batch->results + j][machine->self->rank] = digest_words(seen, bytes);
  /* After a reduce-scatter in place the other blocks of the input are undefined. */
  memset(buffer, CLEARED, apart ? larger_bytes(call, place->ranks) : bytes);
  record(machine->self, &call->key, sizeof call->key);
  return at == bytes;
}

static bool check(struct machine* machine, const struct batch* batch, int number) {
  size_t begin = batch->begin, extent = batch->used + SLACK - begin;
  bool right = true;
  download(machine->seen + begin, machine->received + begin, extent);
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    for (int j = item->first; j < item->first + item->count; j++) right &= check_one(machine, batch, i, j, number);
  }
  bool is_clear = machine->seen[begin] == CLEARED && memcmp(machine->seen + begin, machine->seen + begin + 1, extent - 1) == 0;
  if (CHECK(is_clear && "nothing is written beside outputs")) return right;
  size_t at = begin;
  while (machine->seen[at] == CLEARED) at++;
  for (int i = 0; i < batch->item_count; i++) {
    for (int j = batch->items[i].first; j < batch->items[i].first + batch->items[i].count; j++) {
      size_t end = j + 1 < batch->call_count ? batch->calls[j + 1].area : begin + extent;
      if (at < batch->calls[j].area || at >= end) continue;
      fprintf(stderr, "  byte %zu is %02x; output at %zu\n", at, machine->seen[at], output_of(&batch->calls[j], machine->self->rank));
      tell(machine, batch, i, j, number);
    }
  }
  return false;
}

/* Called after a barrier: results that all ranks get have the same bits on all, also where the reference leaves bits open. */
static void compare(struct machine* machine, const struct batch* batch, int number) {
  int rank = machine->self->rank;
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    const struct place* place = &machine->places[item->place];
    for (int j = item->first; place->own >= 0 && j < item->first + item->count; j++) {
      if (batch->calls[j].which != ALL_REDUCE) continue;
      const uint64_t* results = board->results[batch->results + j];
      if (!CHECK(results[rank] == results[place->members[0]] && "ranks have the same bits")) tell(machine, batch, i, j, number);
    }
  }
}

/* Communicators of all ranks; all in reverse; all but the last; the first and the last; and the two halves made by a split, if
 * they are equal. */
static void make_places(struct machine* machine) {
  struct rank* self = machine->self;
  int ranks = self->ranks;
  machine->place_count = ranks <= 2 ? 2 : ranks % 2 ? 4 : 5;
  for (int i = 0; i < machine->place_count && i < 4; i++) {
    struct place* place = &machine->places[i];
    *place = (struct place){.ranks = i < 2 ? ranks : i == 2 ? ranks - 1 : 2, .own = -1};
    for (int rank = 0; rank < place->ranks; rank++) {
      int member = i == 1 ? ranks - 1 - rank : i == 3 ? rank * (ranks - 1) : rank;
      place->members[rank] = member;
      if (member == self->rank) place->own = rank;
    }
    ncclUniqueId id = share_id(self, i, place->members[0]);
    if (place->own >= 0) NCCL(ncclCommInitRank(&place->communicator, place->ranks, id, place->own));
  }
  if (machine->place_count < 5) return;
  struct place* half = &machine->places[4];
  *half = (struct place){.ranks = ranks / 2, .own = self->rank / 2};
  for (int rank = 0; rank < half->ranks; rank++) half->members[rank] = 2 * rank + self->rank % 2;
  NCCL(ncclCommSplit(machine->places[0].communicator, self->rank % 2, self->rank, &half->communicator, NULL));
}

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Draws which graphs of former batches are launched in this one, and sometimes replaces one. */
static void draw_again(struct machine* machine, const struct batch* batch, struct random* random, int number) {
  for (int k = 0; k < KEPT; k++) {
    struct kept* kept = &machine->kept[k];
    bool wanted = random_below(random, 2);
    kept->after = (int)random_below(random, (uint64_t)batch->item_count);
    /* Without the GPUs' order only in a batch whose calls are captured: see draw_batch. */
    kept->is_launched = wanted && kept->batch.call_count > 0 && (on_gpus() || batch->captures);
  }
  if (!machine->captures || number % KEPT_EVERY) return;
  int k = number / KEPT_EVERY % KEPT;
  struct kept* kept = &machine->kept[k];
  if (kept->executable) CUDA(cuGraphExecDestroy(kept->executable));
  draw_kept(kept, k, random, machine);
  if (machine->places[kept->batch.items[0].place].own >= 0 && kept->batch.call_count) {
    capture(machine, &kept->batch, &kept->batch.items[0], &kept->executable);
  }
}

/* Runs batches until `operations` are done or the time is over; returns how many were done. */
static int run(struct machine* machine, const struct options* options) {
  struct rank* self = machine->self;
  struct random random = random_from(options->seed);
  struct batch* batch = malloc(sizeof *batch);
  int done = 0, number = 0;
  double began = now_s(), told = began;
  for (; done < options->operations && !board->over; number++) {
    CUgraphExec executables[ITEMS_MAX] = {NULL};
    draw_batch(batch, &random, machine);
    draw_again(machine, batch, &random, number);
    prepare(machine, batch);
    for (int k = 0; k < KEPT; k++) {
      if (machine->kept[k].is_launched) prepare(machine, &machine->kept[k].batch);
    }
    meet(self);
    launch(machine, batch, &random, executables);
    for (int i = 0; i < STREAMS; i++) wait_for(machine->streams[i]);
    bool right = check(machine, batch, number);
    done += batch->call_count;
    for (int k = 0; k < KEPT; k++) {
      const struct kept* kept = &machine->kept[k];
      if (!kept->is_launched) continue;
      right &= check(machine, &kept->batch, number);
      done += kept->batch.call_count;
    }
    double now = now_s();
    if (!right || (self->rank == 0 && options->seconds > 0 && now - began > options->seconds)) board->over = true;
    meet(self);
    compare(machine, batch, number);
    for (int k = 0; k < KEPT; k++) {
      if (machine->kept[k].is_launched) compare(machine, &machine->kept[k].batch, number);
    }
    for (int i = 0; i < ITEMS_MAX; i++) {
      if (executables[i]) CUDA(cuGraphExecDestroy(executables[i]));
    }
    if (self->rank == 0 && now - told > 10) {
      fprintf(stderr, "%d operations in %.0f s\n", done, now - began);
      told = now;
    }
  }
  if (self->rank == 0) {
    fprintf(stderr, "%d operations in %d batches, %.1f GB, %.1f s, seed %llu\n", done, number, (double)machine->bytes * 1e-9,
            now_s() - began, (unsigned long long)options->seed);
  }
  for (int k = 0; k < KEPT; k++) {
    if (machine->kept[k].executable) CUDA(cuGraphExecDestroy(machine->kept[k].executable));
  }
  free(batch);
  return done;
}

static void all(struct rank* self) {
  const struct options* options = self->argument;
  size_t bytes = received_bytes() + KEPT * kept_bytes();
  struct machine machine = {.self = self, .captures = options->captures, .known = collectives_known()};
  make_places(&machine);
  for (int i = 0; i < STREAMS; i++) machine.streams[i] = new_stream();
  machine.values = device_alloc(values_all_bytes());
  machine.received = device_alloc(bytes);
  machine.seen = malloc(bytes > values_all_bytes() ? bytes : values_all_bytes());
  if (self->rank == 0) board->over = false;
  values_fill(self->rank, options->seed);
  upload(machine.values, values_all(self->rank), values_all_bytes());
  meet(self);
  CHECK(run(&machine, options) > 0);
  download(machine.seen, machine.values, values_all_bytes());
  CHECK(memcmp(machine.seen, values_all(self->rank), values_all_bytes()) == 0 && "inputs are as they were");
  together(self);
  free(machine.seen);
  device_free(machine.values);
  device_free(machine.received);
  for (int i = 0; i < STREAMS; i++) CUDA(cuStreamDestroy_v2(machine.streams[i]));
  for (int i = machine.place_count - 1; i >= 0; i--) {
    if (machine.places[i].communicator) NCCL(ncclCommDestroy(machine.places[i].communicator));
  }
}

int main(int count, char** arguments) {
  begin("random_collectives", 280);
  choose(count, arguments);
  const char *operations = getenv("CTESTS_OPERATIONS"), *seconds = getenv("CTESTS_SECONDS");
  struct options options = {program_seed(20266), operations ? atoi(operations) : 400, seconds ? atof(seconds) : 0, true};
  int ranks = rank_count(4);
  board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(board != MAP_FAILED);
  values_share(pool_bytes());
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, all, &options);
  /* Instantiating a graph may wait for kernels of one rank that wait for another rank's. */
  options.captures = false;
  options.operations = options.operations / 4 + 1;
  options.seed++;
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, all, &options);
  return finish();
}
