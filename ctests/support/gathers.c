/* Large all-gathers: see gathers.h. */
#include "gathers.h"

#include <stdlib.h>
#include <string.h>

#include "messages.h"

enum { UNTOUCHED = 0xa5 };

static size_t block_bytes(const struct gather* g) { return g->count * element_bytes(g->type); }

static size_t guard_bytes(const struct gather* g) { return g->guarded ? GUARD_BYTES : 0; }

/* Eight bytes a step, as these inputs are long. */
static void pattern(void* to, size_t bytes, uint64_t key, int rank) {
  struct random random = random_from(key * 0x100000001b3u + (uint64_t)rank * 0x10001u);
  uint64_t word = random_next(&random), step = random_next(&random) | 1;
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8, word += step) memcpy((char*)to + at, &word, 8);
  memcpy((char*)to + at, &word, bytes - at);
}

size_t gather_count(const struct rank* self, size_t more) {
  return (GATHER_BYTES + (size_t)self->ranks - 1) / (size_t)self->ranks + more;
}

size_t gather_room(const struct rank* self, size_t count) { return count * (size_t)self->ranks + 2 * GUARD_BYTES; }

struct gather gather_into(const struct rank* self, const char* send, const struct memory* memory, size_t offset, size_t count,
                          uint64_t key) {
  struct gather gather = {.send = send, .receive = memory->at + offset + GUARD_BYTES, .count = count, .type = ncclUint8,
                          .key = key, .rank = self->rank, .ranks = self->ranks, .guarded = true};
  CHECK(offset + gather_room(self, count) <= memory->bytes);
  if (!send) gather.send = gather.receive + count * (size_t)self->rank;
  return gather;
}

void gather_prepare(const struct gather* g) {
  device_fill(g->receive - guard_bytes(g), UNTOUCHED, block_bytes(g) * (size_t)g->ranks + 2 * guard_bytes(g));
  void* input = malloc(block_bytes(g));
  pattern(input, block_bytes(g), g->key, (g->rank + g->from) % g->ranks);
  upload((void*)g->send, input, block_bytes(g));
  free(input);
}

void gather_launch(const struct gather* g, ncclComm_t communicator, CUstream stream) {
  NCCL(ncclAllGather(g->send, g->receive, g->count, g->type, communicator, as_cuda(stream)));
}

static bool all_untouched(const unsigned char* bytes, size_t count) {
  return !count || (bytes[0] == UNTOUCHED && memcmp(bytes, bytes + 1, count - 1) == 0);
}

static void say(const struct gather* g, const unsigned char* seen, const unsigned char* wanted, int from) {
  size_t bytes = block_bytes(g), first = 0, wrong = 0;
  for (size_t i = 0; i < bytes; i++) {
    if (seen[i] != wanted[i] && !wrong++) first = i;
  }
  fprintf(stderr, "  rank %d of %d, key %llu: of rank %d's %zu bytes %zu are wrong, the first at %zu: %02x, not %02x\n", g->rank,
          g->ranks, (unsigned long long)g->key, from, bytes, wrong, first, seen[first], wanted[first]);
}

/* FNV-1a over every eighth word only, as each byte was compared before. */
static void record_some(struct rank* self, const void* bytes, size_t count) {
  uint64_t digest = 0xcbf29ce484222325u, word;
  for (size_t at = 0; at + 8 <= count; at += 64) {
    memcpy(&word, (const char*)bytes + at, 8);
    digest = (digest ^ word) * 0x100000001b3u;
  }
  record(self, &digest, sizeof digest);
}

void gather_verify(const struct gather* g, struct rank* self) {
  size_t bytes = block_bytes(g), all = bytes * (size_t)g->ranks, guard = guard_bytes(g);
  unsigned char* seen = malloc(all + 2 * guard);
  unsigned char* wanted = malloc(bytes);
  download(seen, g->receive - guard, all + 2 * guard);
  for (int rank = 0; rank < g->ranks; rank++) {
    const unsigned char* block = seen + guard + bytes * (size_t)rank;
    int from = (rank + g->from) % g->ranks;
    pattern(wanted, bytes, g->key, from);
    if (!CHECK(memcmp(block, wanted, bytes) == 0 && "the output is the input of that rank")) say(g, block, wanted, from);
  }
  CHECK(all_untouched(seen, guard) && all_untouched(seen + guard + all, guard) && "nothing lies beside the output");
  record_some(self, seen + guard, all);
  if (g->send < g->receive || g->send >= g->receive + all) {
    download(seen, g->send, bytes);
    pattern(wanted, bytes, g->key, (g->rank + g->from) % g->ranks);
    CHECK(memcmp(seen, wanted, bytes) == 0 && "the input is as it was");
  }
  free(seen);
  free(wanted);
}

void gather_untouched(const struct gather* g) {
  size_t bytes = block_bytes(g), all = bytes * (size_t)g->ranks;
  size_t own = g->send >= g->receive && g->send < g->receive + all ? (size_t)(g->send - g->receive) : all;
  unsigned char* seen = malloc(all);
  download(seen, g->receive, all);
  CHECK(all_untouched(seen, own));
  if (own < all) CHECK(all_untouched(seen + own + bytes, all - own - bytes));
  free(seen);
}

void gather_run(struct rank* self, ncclComm_t communicator, const struct gather* gather) {
  gather_prepare(gather);
  together(self);
  gather_launch(gather, communicator, self->stream);
  wait_for(self->stream);
  together(self);
  gather_verify(gather, self);
}
