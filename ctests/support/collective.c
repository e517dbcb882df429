/* One collective call: see collective.h. */
#include "collective.h"

#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 64, GUARD = 0xa5 };

int collectives_known(void) {
  int version = 0;
  NCCL(ncclGetVersion(&version));
  return version >= 22803 ? COLLECTIVES : COLLECTIVES_OF_2_18;
}

const char* collective_name(enum collective which) {
  static const char* const names[] = {"all-reduce", "reduce", "broadcast", "bcast", "all-gather", "reduce-scatter",
                                      "all-to-all", "gather", "scatter"};
  return names[which];
}

bool collective_reduces(enum collective which) {
  return which == ALL_REDUCE || which == REDUCE || which == REDUCE_SCATTER;
}

bool collective_can_be_in_place(enum collective which) { return which != ALL_TO_ALL; }

bool average_is_exact(ncclDataType_t type, int ranks) {
  bool floating = type == ncclFloat16 || type == ncclFloat32 || type == ncclFloat64 || type == ncclBfloat16;
  return !floating || (ranks & (ranks - 1)) == 0;
}

static bool at_root(const struct transfer* transfer) { return transfer->rank == transfer->root; }

/* Elements of this rank's input. */
static size_t given(const struct transfer* t) {
  switch (t->which) {
    case REDUCE_SCATTER: case ALL_TO_ALL: return t->count * (size_t)t->ranks;
    case BROADCAST: case BCAST: return at_root(t) ? t->count : 0;
    case SCATTER: return at_root(t) ? t->count * (size_t)t->ranks : 0;
    default: return t->count;
  }
}

/* Elements of this rank's output. */
static size_t gotten(const struct transfer* t) {
  switch (t->which) {
    case ALL_GATHER: case ALL_TO_ALL: return t->count * (size_t)t->ranks;
    case REDUCE: return at_root(t) ? t->count : 0;
    case GATHER: return at_root(t) ? t->count * (size_t)t->ranks : 0;
    default: return t->count;
  }
}

static void expect(const struct transfer* t, unsigned char* to) {
  size_t block = t->count * type_bytes(t->type), mine = t->count * (size_t)t->rank;
  switch (t->which) {
    case REDUCE: if (!at_root(t)) return; /* fall through */
    case ALL_REDUCE: reduced_fill(to, t->key, t->ranks, 0, t->count, t->type, t->op, 1); return;
    case REDUCE_SCATTER: reduced_fill(to, t->key, t->ranks, mine, t->count, t->type, t->op, 1); return;
    case BROADCAST: case BCAST: input_fill(to, t->key, t->root, 0, t->count, t->type, t->op); return;
    case SCATTER: input_fill(to, t->key, t->root, mine, t->count, t->type, t->op); return;
    case GATHER: if (!at_root(t)) return; /* fall through */
    case ALL_GATHER:
      for (int rank = 0; rank < t->ranks; rank++) {
        input_fill(to + block * (size_t)rank, t->key, rank, 0, t->count, t->type, t->op);
      }
      return;
    default:
      for (int rank = 0; rank < t->ranks; rank++) {
        input_fill(to + block * (size_t)rank, t->key, rank, mine, t->count, t->type, t->op);
      }
  }
}

/* Whether this rank has one buffer for both. In a rooted collective with blocks only the root has an input and an output. */
static bool shares_buffer(const struct transfer* t) {
  bool rooted_blocks = t->which == GATHER || t->which == SCATTER;
  return t->which == BCAST || (t->in_place && collective_can_be_in_place(t->which) && (!rooted_blocks || at_root(t)));
}

void transfer_prepare(struct transfer* t) {
  size_t element = type_bytes(t->type), block = t->count * element;
  t->send_bytes = given(t) * element;
  t->receive_bytes = gotten(t) * element;
  bool shared = shares_buffer(t);
  size_t larger = t->send_bytes > t->receive_bytes ? t->send_bytes : t->receive_bytes;
  size_t output_bytes = shared ? larger : t->receive_bytes;
  unsigned char* input = malloc(t->send_bytes + 1);
  input_fill(input, t->key, t->rank, 0, given(t), t->type, t->op);

  t->output = device_alloc(output_bytes + GUARD_BYTES);
  device_fill(t->output, GUARD, output_bytes + GUARD_BYTES);
  t->input = shared ? NULL : device_alloc(t->send_bytes + GUARD_BYTES);
  t->send = shared ? t->output : t->input;
  t->receive = t->output;
  if (shared && (t->which == ALL_GATHER || t->which == GATHER)) t->send = (char*)t->output + block * (size_t)t->rank;
  if (shared && (t->which == REDUCE_SCATTER || t->which == SCATTER)) {
    t->receive = (char*)t->output + block * (size_t)t->rank;
  }
  upload((void*)t->send, input, t->send_bytes);
  free(input);
}

void transfer_launch(const struct transfer* t, ncclComm_t communicator, CUstream on) {
  cudaStream_t stream = as_cuda(on);
  switch (t->which) {
    case ALL_REDUCE: NCCL(ncclAllReduce(t->send, t->receive, t->count, t->type, t->op, communicator, stream)); break;
    case REDUCE: NCCL(ncclReduce(t->send, t->receive, t->count, t->type, t->op, t->root, communicator, stream)); break;
    case BROADCAST: NCCL(ncclBroadcast(t->send, t->receive, t->count, t->type, t->root, communicator, stream)); break;
    case BCAST: NCCL(ncclBcast(t->receive, t->count, t->type, t->root, communicator, stream)); break;
    case ALL_GATHER: NCCL(ncclAllGather(t->send, t->receive, t->count, t->type, communicator, stream)); break;
    case REDUCE_SCATTER:
      NCCL(ncclReduceScatter(t->send, t->receive, t->count, t->type, t->op, communicator, stream));
      break;
    case ALL_TO_ALL: NCCL(ncclAlltoAll(t->send, t->receive, t->count, t->type, communicator, stream)); break;
    case GATHER: NCCL(ncclGather(t->send, t->receive, t->count, t->type, t->root, communicator, stream)); break;
    default: NCCL(ncclScatter(t->send, t->receive, t->count, t->type, t->root, communicator, stream));
  }
}

void transfer_verify(const struct transfer* t, struct rank* self) {
  unsigned char* seen = malloc(t->receive_bytes + GUARD_BYTES);
  unsigned char* wanted = malloc(t->receive_bytes + 1);
  bool shared = shares_buffer(t);
  /* In place the buffer may end elsewhere than the output does, so no guard is checked. */
  size_t guard = shared ? 0 : GUARD_BYTES;
  download(seen, t->receive, t->receive_bytes + guard);
  expect(t, wanted);
  bool equal = memcmp(seen, wanted, t->receive_bytes) == 0;
  bool guarded = true;
  for (size_t i = 0; i < guard; i++) guarded = guarded && seen[t->receive_bytes + i] == GUARD;
  if (!CHECK(equal && "the output is the reference") || !CHECK(guarded && "nothing lies behind the output")) {
    fprintf(stderr, "  rank %d of %d: %s %s %s, count %zu, root %d, %s, key %llu\n", t->rank, t->ranks,
            collective_name(t->which), type_name(t->type), op_name(t->op), t->count, t->root,
            shared ? "in place" : "out of place", (unsigned long long)t->key);
    for (size_t i = 0, shown = 0; i < t->receive_bytes && shown < 4; i++) {
      if (seen[i] == wanted[i]) continue;
      fprintf(stderr, "  byte %zu is %02x, not %02x\n", i, seen[i], wanted[i]);
      shown++;
    }
  }
  if (!shared && t->send_bytes) {
    unsigned char* input = malloc(t->send_bytes);
    unsigned char* before = malloc(t->send_bytes);
    download(input, t->send, t->send_bytes);
    input_fill(before, t->key, t->rank, 0, given(t), t->type, t->op);
    CHECK(memcmp(input, before, t->send_bytes) == 0 && "the input is as it was");
    free(input);
    free(before);
  }
  record(self, seen, t->receive_bytes);
  free(seen);
  free(wanted);
}

void transfer_clear(const struct transfer* t) {
  if (!shares_buffer(t)) device_fill(t->receive, GUARD, t->receive_bytes);
}

void transfer_release(struct transfer* t) {
  device_free(t->output);
  if (t->input) device_free(t->input);
}

void transfer_run(struct transfer* transfer, ncclComm_t communicator, struct rank* self) {
  transfer_prepare(transfer);
  transfer_launch(transfer, communicator, self->stream);
  wait_for(self->stream);
  transfer_verify(transfer, self);
  transfer_release(transfer);
}
