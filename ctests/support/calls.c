/* A call drawn from a seed: see calls.h. */
#include "calls.h"

#include <string.h>

size_t blocks_given(const struct call* call, int ranks) {
  int which = call->which;
  return which == REDUCE_SCATTER || which == ALL_TO_ALL || which == SCATTER ? (size_t)ranks : 1;
}

size_t blocks_gotten(const struct call* call, int ranks) {
  int which = call->which;
  return which == ALL_GATHER || which == ALL_TO_ALL || which == GATHER ? (size_t)ranks : 1;
}

size_t block_bytes(const struct call* call) { return call->count * type_bytes(call->type); }

size_t larger_bytes(const struct call* call, int ranks) {
  size_t given = blocks_given(call, ranks), gotten = blocks_gotten(call, ranks);
  return block_bytes(call) * (given > gotten ? given : gotten);
}

bool call_reduces(const struct call* call) {
  return call->which < COLLECTIVES && collective_reduces((enum collective)call->which);
}

/* A number that depends on the call and on a rank of the section. */
static uint64_t mixed(const struct call* call, int rank, uint64_t salt) {
  struct random random = random_from(call->key + (uint64_t)rank * 0x9e3779b1u + salt * 0x10001u);
  return random_next(&random);
}

struct source source_of(const struct call* call, int rank, int ranks) {
  size_t bytes = block_bytes(call) * blocks_given(call, ranks);
  uint64_t drawn = mixed(call, rank, 1);
  size_t step = drawn % 2 ? LINE : type_bytes(call->type);
  return (struct source){call->type, call->real, drawn / 2 % ((values_bytes() - bytes) / step) * step};
}

size_t output_of(const struct call* call, int rank) {
  uint64_t drawn = mixed(call, rank, 2);
  return call->area + LINE + (drawn % 2 ? 0 : drawn / 2 % (LINE / 8) * type_bytes(call->type));
}

bool call_writes(const struct call* call, int own) {
  bool rooted = call->which == REDUCE || call->which == GATHER;
  return own >= 0 && (!rooted || own == call->root);
}

bool shares_buffer(const struct call* call, int own) {
  if (call->which == BCAST) return true;
  if (call->which == REDUCE) return call->in_place && own == call->root;
  return call->in_place;
}

void call_issue(const struct call* call, const struct place* place, int rank, char* values, char* received, CUstream on) {
  int root = call->root, ranks = place->ranks;
  bool shared = shares_buffer(call, place->own);
  char* receive = received + output_of(call, rank);
  char* send = shared ? receive : values + values_offset(source_of(call, rank, ranks));
  size_t count = call->count, own_block = block_bytes(call) * (size_t)place->own;
  ncclDataType_t type = call->type;
  ncclComm_t communicator = place->communicator;
  cudaStream_t stream = as_cuda(on);
  if (shared && call->which == ALL_GATHER) send = receive + own_block;
  if (shared && call->which == REDUCE_SCATTER) receive = send + own_block;
  switch (call->which) {
    case ALL_REDUCE: NCCL(ncclAllReduce(send, receive, count, type, call->op, communicator, stream)); break;
    case REDUCE: NCCL(ncclReduce(send, receive, count, type, call->op, root, communicator, stream)); break;
    case BROADCAST: NCCL(ncclBroadcast(send, receive, count, type, root, communicator, stream)); break;
    case BCAST: NCCL(ncclBcast(receive, count, type, root, communicator, stream)); break;
    case ALL_GATHER: NCCL(ncclAllGather(send, receive, count, type, communicator, stream)); break;
    case REDUCE_SCATTER: NCCL(ncclReduceScatter(send, receive, count, type, call->op, communicator, stream)); break;
    case ALL_TO_ALL: NCCL(ncclAlltoAll(send, receive, count, type, communicator, stream)); break;
    case GATHER: NCCL(ncclGather(send, receive, count, type, root, communicator, stream)); break;
    case SCATTER: NCCL(ncclScatter(send, receive, count, type, root, communicator, stream)); break;
    default:
      NCCL(ncclSend(send, count, type, (place->own + root) % ranks, communicator, stream));
      NCCL(ncclRecv(receive, count, type, (place->own + ranks - root) % ranks, communicator, stream));
  }
}

size_t call_differs(const struct call* call, const struct place* place, const unsigned char* seen, size_t bytes) {
  size_t block = block_bytes(call), own_block = block * (size_t)place->own;
  const char* inputs[RANKS_MAX];
  for (int rank = 0; rank < place->ranks; rank++) {
    int member = place->members[rank];
    inputs[rank] = values_of(member, source_of(call, member, place->ranks));
  }
  if (call_reduces(call)) {
    struct reduction reduction = {call->type, call->op, call->real, place->ranks, call->count, {NULL}};
    for (int rank = 0; rank < place->ranks; rank++) {
      reduction.inputs[rank] = inputs[rank] + (call->which == REDUCE_SCATTER ? own_block : 0);
    }
    return reduction_differs(&reduction, seen) * type_bytes(call->type);
  }
  size_t gotten = blocks_gotten(call, place->ranks);
  for (size_t i = 0; i < gotten; i++) {
    int from = call->which == SHIFT ? (place->own + place->ranks - call->root) % place->ranks
             : gotten > 1 ? (int)i : call->root;
    const char* wanted = inputs[from] + (call->which == ALL_TO_ALL || call->which == SCATTER ? own_block : 0);
    if (memcmp(seen + i * block, wanted, block) == 0) continue;
    size_t at = 0;
    while (seen[i * block + at] == (unsigned char)wanted[at]) at++;
    return i * block + at;
  }
  return bytes;
}

void call_tell(const struct call* call, const struct place* place) {
  fprintf(stderr, "%s %s %s%s, count %zu, root %d, %s, of %d ranks", call->which == SHIFT ? "shift" : collective_name((enum collective)call->which),
          type_name(call->type), call_reduces(call) ? op_name(call->op) : "", call->real ? " real" : "", call->count, call->root,
          shares_buffer(call, place->own) ? "in place" : "out of place", place->ranks);
}
