/* Holds that random sends and receives move every byte and write nothing else. Cases: of every pattern, size, type and
 * alignment, over several communicators and streams, alone, in groups, in groups over two communicators and in graphs. All ranks
 * derive the same plan from the seed. CTESTS_OPERATIONS: the number of messages, 600. */
#include "../support/messages.h"

#include <stdlib.h>
#include <string.h>

enum { PLACES_MAX = 4, STREAMS = 3, ITEMS_MAX = 6, PARCELS_MAX = 400, CLEARED = 0xee };

/* A communicator: which ranks of the section it has, in its own order. */
struct place { int ranks, members[RANKS_MAX]; ncclComm_t communicator; int own; /* -1: not a member */ };

struct sending { int from, to; size_t bytes, send_at, receive_at; ncclDataType_t type; uint64_t key; };

/* Messages of one communicator on one stream that are launched together. */
struct item {
  int place, stream, first, count;
  bool grouped, with_next, captured;
  int replays;
};

struct batch {
  struct item items[ITEMS_MAX];
  struct sending sendings[PARCELS_MAX];
  int item_count, sending_count;
  size_t send_used, receive_used;
};

struct machine {
  struct rank* self;
  struct place places[PLACES_MAX];
  int place_count;
  CUstream streams[STREAMS];
  char *to_send, *to_receive; /* device */
  unsigned char *seen, *wanted;
  ncclDataType_t types[TYPES_MAX];
  int type_count;
  bool captures;
};

struct options { uint64_t seed; int operations; bool captures; };

static size_t pool_bytes(void) { return (size_t)(on_gpus() ? 384 : 24) << 20; }

static size_t draw_bytes(struct random* random) {
  uint64_t kind = random_below(random, 100);
  if (kind < 5) return 0;
  if (kind < 30) return 1 + random_below(random, 256);
  if (kind < 65) return 1 + random_below(random, 64 << 10);
  if (on_gpus()) {
    if (kind < 97) return 1 + random_below(random, 4 << 20);
    return ((size_t)20 << 20) + random_below(random, 44 << 20);
  }
  return kind < 97 ? 1 + random_below(random, 512 << 10) : 1 + random_below(random, 4 << 20);
}

/* Half of all buffers begin at a multiple of 256, the rest anywhere. */
static size_t draw_offset(struct random* random, size_t used) {
  size_t aligned = (used + 511) / 256 * 256;
  return random_below(random, 2) ? aligned : aligned + random_below(random, 256);
}

/* Adds a message; false if the batch is full. */
static bool add(struct batch* batch, struct random* random, const struct machine* machine, int from, int to,
                size_t bytes) {
  ncclDataType_t type = machine->types[random_below(random, (uint64_t)machine->type_count)];
  size_t send_at = draw_offset(random, batch->send_used), receive_at = draw_offset(random, batch->receive_used);
  uint64_t key = random_next(random);
  bytes -= bytes % element_bytes(type);
  if (batch->sending_count == PARCELS_MAX || send_at + bytes + 512 > pool_bytes() ||
      receive_at + bytes + 512 > pool_bytes()) {
    return false;
  }
  batch->sendings[batch->sending_count++] =
      (struct sending){from, to, bytes, send_at, receive_at, type, key};
  batch->send_used = send_at + bytes;
  batch->receive_used = receive_at + bytes;
  return true;
}

static void draw_messages(struct batch* batch, struct random* random, const struct machine* machine,
                          struct item* item) {
  int ranks = machine->places[item->place].ranks;
  int one = (int)random_below(random, (uint64_t)ranks), other = (int)random_below(random, (uint64_t)ranks);
  if (!item->grouped) {
    /* Outside a group: one message, or one each way. A message to oneself needs a group. */
    if (one == other) other = (one + 1) % ranks;
    add(batch, random, machine, one, other, draw_bytes(random));
    if (random_below(random, 2)) add(batch, random, machine, other, one, draw_bytes(random));
    return;
  }
  size_t bytes = draw_bytes(random);
  int times = 1 + (int)random_below(random, 12);
  switch (random_below(random, 7)) {
    case 0: /* a shift of one size */
      for (int rank = 0; rank < ranks; rank++) add(batch, random, machine, rank, (rank + times) % ranks, bytes);
      break;
    case 1: /* all to all */
      for (int from = 0; from < ranks; from++) {
        for (int to = 0; to < ranks; to++) add(batch, random, machine, from, to, bytes / (size_t)ranks);
      }
      break;
    case 2: /* all to all, each of its own size */
      for (int from = 0; from < ranks; from++) {
        for (int to = 0; to < ranks; to++) add(batch, random, machine, from, to, draw_bytes(random) / 2);
      }
      break;
    case 3: /* gather */
      for (int rank = 0; rank < ranks; rank++) add(batch, random, machine, rank, one, draw_bytes(random));
      break;
    case 4: /* scatter */
      for (int rank = 0; rank < ranks; rank++) add(batch, random, machine, one, rank, draw_bytes(random));
      break;
    case 5: /* many between two */
      for (int i = 0; i < times; i++) add(batch, random, machine, one, other, draw_bytes(random) / 4);
      break;
    default: /* any */
      for (int i = 0; i < 2 * times; i++) {
        int from = (int)random_below(random, (uint64_t)ranks), to = (int)random_below(random, (uint64_t)ranks);
        add(batch, random, machine, from, to, draw_bytes(random) / 2);
      }
  }
}

static void draw_batch(struct batch* batch, struct random* random, const struct machine* machine) {
  memset(batch, 0, sizeof *batch);
  batch->item_count = 1 + (int)random_below(random, ITEMS_MAX);
  bool captures = machine->captures && random_below(random, 3) == 0;
  for (int i = 0; i < batch->item_count; i++) {
    struct item* item = &batch->items[i];
    item->place = (int)random_below(random, (uint64_t)machine->place_count);
    item->stream = (int)random_below(random, STREAMS);
    item->grouped = random_below(random, 4) != 0;
    item->captured = captures && random_below(random, 2);
    item->replays = 1 + (int)random_below(random, 3);
    /* NCCL's simulator does not order graphs among eager operations of other streams. */
    if (captures) item->stream = item->place % STREAMS;
    item->first = batch->sending_count;
    draw_messages(batch, random, machine, item);
    item->count = batch->sending_count - item->first;
  }
  /* One group over two communicators. */
  for (int i = 0; i + 1 < batch->item_count; i++) {
    struct item *item = &batch->items[i], *next = item + 1;
    bool fit = item->grouped && next->grouped && !item->captured && !next->captured && item->place != next->place;
    item->with_next = random_below(random, 3) == 0 && fit && !(i && batch->items[i - 1].with_next);
  }
}

/* Makes one rank's calls of an item. In a group sends and receives may come in any order that keeps that of each pair. */
static void issue(const struct machine* machine, const struct batch* batch, const struct item* item) {
  const struct place* place = &machine->places[item->place];
  cudaStream_t stream = as_cuda(machine->streams[item->stream]);
  int turns = item->grouped ? (item->first + place->own) % 3 : 0;
  for (int turn = 0; turn < (turns ? 2 : 1); turn++) {
    for (int i = item->first; i < item->first + item->count; i++) {
      const struct sending* sending = &batch->sendings[i];
      size_t count = sending->bytes / element_bytes(sending->type);
      bool sends = turns == 0 || (turns == 1) == (turn == 0), receives = turns == 0 || !sends;
      if (sends && sending->from == place->own) {
        NCCL(ncclSend(machine->to_send + sending->send_at, count, sending->type, sending->to, place->communicator, stream));
      }
      if (receives && sending->to == place->own) {
        NCCL(ncclRecv(machine->to_receive + sending->receive_at, count, sending->type, sending->from,
                      place->communicator, stream));
      }
    }
  }
}

static void fill(unsigned char* to, const struct sending* sending) {
  struct random random = random_from(sending->key);
  for (size_t done = 0; done < sending->bytes; done += 8) {
    uint64_t word = random_next(&random);
    memcpy(to + done, &word, sending->bytes - done < 8 ? sending->bytes - done : 8);
  }
}

/* Uploads what this rank sends, clears where it receives, and computes the expected bytes. */
static void prepare(const struct machine* machine, const struct batch* batch) {
  size_t extent = batch->receive_used + 512;
  memset(machine->wanted, CLEARED, extent);
  device_fill(machine->to_receive, CLEARED, extent);
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    int own = machine->places[item->place].own;
    for (int j = item->first; j < item->first + item->count; j++) {
      const struct sending* sending = &batch->sendings[j];
      if (sending->to == own) fill(machine->wanted + sending->receive_at, sending);
      if (sending->from == own) {
        fill(machine->seen, sending);
        upload(machine->to_send + sending->send_at, machine->seen, sending->bytes);
      }
    }
  }
  CUDA(cuCtxSynchronize());
}

static void launch(const struct machine* machine, const struct batch* batch, CUgraphExec* executables) {
  bool open = false;
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    if (machine->places[item->place].own < 0) {
      if (open) NCCL(ncclGroupEnd());
      open = false;
      /* Opens the group for the next item, if this item should have opened it. */
      if (item->with_next && machine->places[item[1].place].own >= 0) {
        NCCL(ncclGroupStart());
        open = true;
      }
      continue;
    }
    CUstream stream = machine->streams[item->stream];
    if (item->captured) CUDA(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    if (item->grouped && !open) NCCL(ncclGroupStart());
    issue(machine, batch, item);
    open = item->with_next;
    if (item->grouped && !open) NCCL(ncclGroupEnd());
    if (!item->captured) continue;
    CUgraph graph = NULL;
    CUDA(cuStreamEndCapture(stream, &graph));
    CUDA(cuGraphInstantiateWithFlags(&executables[i], graph, 0));
    CUDA(cuGraphDestroy(graph));
    for (int replay = 0; replay < item->replays; replay++) CUDA(cuGraphLaunch(executables[i], stream));
  }
}

static void tell(const struct machine* machine, const struct batch* batch, size_t at, int number) {
  fprintf(stderr, "  rank %d, batch %d: byte %zu is %02x, not %02x\n", machine->self->rank, number, at,
          machine->seen[at], machine->wanted[at]);
  for (int i = 0; i < batch->item_count; i++) {
    const struct item* item = &batch->items[i];
    for (int j = item->first; j < item->first + item->count; j++) {
      const struct sending* sending = &batch->sendings[j];
      if (sending->to != machine->places[item->place].own || at < sending->receive_at ||
          at >= sending->receive_at + sending->bytes) {
        continue;
      }
      fprintf(stderr, "  in message %d from %d to %d of communicator %d: %zu bytes, sent at %zu, received at %zu; item %d%s%s\n",
              j, sending->from, sending->to, item->place, sending->bytes, sending->send_at, sending->receive_at, i,
              item->grouped ? ", grouped" : "", item->captured ? ", captured" : "");
    }
  }
}

static void check(const struct machine* machine, const struct batch* batch, int number) {
  size_t extent = batch->receive_used + 512;
  download(machine->seen, machine->to_receive, extent);
  if (!CHECK(memcmp(machine->seen, machine->wanted, extent) == 0)) {
    size_t at = 0;
    while (machine->seen[at] == machine->wanted[at]) at++;
    tell(machine, batch, at, number);
  }
  uint64_t sum = extent;
  for (size_t at = 0; at < extent; at++) sum = (sum ^ machine->seen[at]) * 0x100000001b3u;
  record(machine->self, &sum, sizeof sum);
}

/* Communicators of all ranks; all in reverse; all but the last; the first and the last. */
static void make_places(struct machine* machine) {
  struct rank* self = machine->self;
  int ranks = self->ranks;
  machine->place_count = ranks > 2 ? 4 : 2;
  for (int i = 0; i < machine->place_count; i++) {
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
}

static void all(struct rank* self) {
  const struct options* options = self->argument;
  struct machine machine = {.self = self, .captures = options->captures};
  struct random random = random_from(options->seed);
  make_places(&machine);
  machine.type_count = known_types(machine.types);
  for (int i = 0; i < STREAMS; i++) machine.streams[i] = new_stream();
  machine.to_send = device_alloc(pool_bytes());
  machine.to_receive = device_alloc(pool_bytes());
  machine.seen = malloc(pool_bytes());
  machine.wanted = malloc(pool_bytes());
  struct batch* batch = malloc(sizeof *batch);
  int done = 0;
  for (int number = 0; done < options->operations; number++) {
    CUgraphExec executables[ITEMS_MAX] = {NULL};
    draw_batch(batch, &random, &machine);
    prepare(&machine, batch);
    meet(self);
    launch(&machine, batch, executables);
    for (int i = 0; i < STREAMS; i++) wait_for(machine.streams[i]);
    check(&machine, batch, number);
    meet(self);
    for (int i = 0; i < ITEMS_MAX; i++) {
      if (executables[i]) CUDA(cuGraphExecDestroy(executables[i]));
    }
    done += batch->sending_count;
  }
  free(batch);
  free(machine.seen);
  free(machine.wanted);
  device_free(machine.to_send);
  device_free(machine.to_receive);
  for (int i = 0; i < STREAMS; i++) CUDA(cuStreamDestroy_v2(machine.streams[i]));
  for (int i = machine.place_count - 1; i >= 0; i--) {
    if (machine.places[i].communicator) NCCL(ncclCommDestroy(machine.places[i].communicator));
  }
}

int main(void) {
  begin("random_p2p", 280);
  const char* wanted = getenv("CTESTS_OPERATIONS");
  struct options options = {program_seed(20261), wanted ? atoi(wanted) : 600, true};
  int ranks = rank_count(4);
  run_ranks("processes", PROCESSES, ranks, all, &options);
  /* Instantiating a graph may wait for kernels of one rank that wait for another rank's. */
  options.captures = false;
  options.operations = options.operations / 4 + 1;
  options.seed++;
  run_ranks("threads", THREADS, ranks, all, &options);
  return finish();
}
