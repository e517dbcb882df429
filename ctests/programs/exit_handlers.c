/* Holds that exit handlers can still use communicators although they run after NCCL's own handler and after the end of
 * thread-local storage, because they were registered before NCCL's first call. They run collectives and messages, alone and in
 * groups, the first large collective of a lazy communicator, messages that NCCL absorbs, inits, splits and destroys, on the
 * thread that exits. */
#include "../support/collective.h"
#include "../support/messages.h"

#include <stdlib.h>
#include <unistd.h>

static struct rank* self;
static ncclComm_t everybody, pair;
static CUstream stream;

static void reduce(ncclComm_t communicator, int rank, int ranks, size_t count, uint64_t key) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = count, .rank = rank, .ranks = ranks, .key = key};
  transfer_prepare(&transfer);
  NCCL(ncclGroupStart());
  transfer_launch(&transfer, communicator, stream);
  NCCL(ncclGroupEnd());
  wait_for(stream);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
}

/* Both ranks of a pair send and then receive: one call after the other where `absorbed`, else in one group. */
static void exchange(size_t bytes, bool absorbed, unsigned char value) {
  int other = 1 - self->rank % 2;
  unsigned char* host = malloc(bytes);
  void* out = device_alloc(bytes);
  void* in = device_alloc(bytes);
  device_fill(out, (unsigned char)(value + self->rank % 2), bytes);
  device_fill(in, 0, bytes);
  if (!absorbed) NCCL(ncclGroupStart());
  NCCL(ncclSend(out, bytes, ncclInt8, other, pair, as_cuda(stream)));
  NCCL(ncclRecv(in, bytes, ncclInt8, other, pair, as_cuda(stream)));
  if (!absorbed) NCCL(ncclGroupEnd());
  wait_for(stream);
  download(host, in, bytes);
  size_t right = 0;
  while (right < bytes && host[right] == value + other) right++;
  EQUAL(right, bytes);
  device_free(in);
  device_free(out);
  free(host);
}

/* The handler that was registered first, and so runs last. */
static void again(void) {
  if (!self) return;
  exchange(100000, false, 70);
  NCCL(ncclCommDestroy(pair));
  NCCL(ncclCommDestroy(everybody));
  CUDA(cuStreamDestroy_v2(stream));
}

static void use(void) {
  if (!self) return;
  int rank = self->rank, ranks = self->ranks;
  /* For this call NCCL builds the pair's communicator, with an id from the first rank's process, which comes later. */
  if (rank % 2 == 0) usleep(200000);
  reduce(pair, rank % 2, 2, 3000000, 12);
  exchange(5000, false, 10);
  reduce(everybody, rank, ranks, 5003, 11);
  reduce(everybody, rank, ranks, 1000000, 13);
  exchange((size_t)24 << 20, true, 14);
  ncclComm_t late = world(self, 3), half = NULL;
  /* With two ranks there is no split in halves: a communicator of one rank has no peer group. */
  int parts = ranks > 2 ? 2 : 1;
  NCCL(ncclCommSplit(late, rank % parts, rank, &half, NULL));
  reduce(late, rank, ranks, 5003, 15);
  reduce(half, rank / parts, ranks / parts, 5003, 16);
  meet(self);
  NCCL(ncclCommDestroy(half));
  NCCL(ncclCommDestroy(late));
}

static void all(struct rank* of_mine) {
  self = of_mine;
  atexit(again);
  atexit(use);
  stream = new_stream();
  everybody = world(self, 0);
  NCCL(ncclCommSplit(everybody, self->rank / 2, self->rank, &pair, NULL));
  reduce(everybody, self->rank, self->ranks, 100, 1);
  exchange(1000, false, 2);
  meet(self);
}

int main(void) {
  begin("exit_handlers", 60);
  run_ranks("at exit", PROCESSES, rank_count(4), all, NULL);
  return finish();
}
