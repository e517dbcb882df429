/* Holds that no call in a group is lost: groups nest, hold calls on several communicators and streams, mix collectives with
 * sends and receives, may be empty, and may be closed and reopened. */
#include "../support/collective.h"

#include <string.h>

static struct transfer transfer_of(const struct rank* self, enum collective which, size_t count, uint64_t key) {
  struct transfer transfer = {.which = which, .type = ncclInt32, .op = ncclSum, .count = count,
                              .rank = self->rank, .ranks = self->ranks, .key = key};
  transfer_prepare(&transfer);
  return transfer;
}

static void settle(struct rank* self, struct transfer* transfers, int count) {
  together(self);
  for (int i = 0; i < count; i++) {
    transfer_verify(&transfers[i], self);
    transfer_release(&transfers[i]);
  }
}

static void empty(void) {
  NCCL(ncclGroupStart());
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupStart());
  NCCL(ncclGroupStart());
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupEnd());
}

/* The calls start only when the outermost group ends. */
static void nested(struct rank* self, ncclComm_t communicator) {
  struct transfer transfers[3] = {transfer_of(self, ALL_REDUCE, 1000, 10), transfer_of(self, ALL_GATHER, 333, 11),
                                  transfer_of(self, BROADCAST, 77, 12)};
  together(self);
  NCCL(ncclGroupStart());
  transfer_launch(&transfers[0], communicator, self->stream);
  NCCL(ncclGroupStart());
  transfer_launch(&transfers[1], communicator, self->stream);
  NCCL(ncclGroupStart());
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupEnd());
  transfer_launch(&transfers[2], communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  settle(self, transfers, 3);
}

/* Two communicators, two streams, one group; the second communicator is called first on every rank. */
static void two_communicators(struct rank* self, ncclComm_t first, ncclComm_t second) {
  CUstream other = new_stream();
  struct transfer transfers[4] = {transfer_of(self, REDUCE_SCATTER, 501, 20), transfer_of(self, ALL_REDUCE, 4097, 21),
                                  transfer_of(self, ALL_REDUCE, 5, 22), transfer_of(self, BCAST, 64, 23)};
  together(self);
  NCCL(ncclGroupStart());
  transfer_launch(&transfers[0], second, other);
  transfer_launch(&transfers[1], first, self->stream);
  transfer_launch(&transfers[2], second, other);
  transfer_launch(&transfers[3], first, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  wait_for(other);
  settle(self, transfers, 4);
  CUDA(cuStreamDestroy_v2(other));
}

/* A ring of sends and receives and two collectives in one group. */
static void mixed(struct rank* self, ncclComm_t communicator) {
  enum { COUNT = 999 };
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  int32_t give[COUNT], get[COUNT], wanted[COUNT];
  input_fill(give, 30, self->rank, 0, COUNT, ncclInt32, ncclSum);
  input_fill(wanted, 30, before, 0, COUNT, ncclInt32, ncclSum);
  void* from = device_alloc(sizeof give);
  void* to = device_alloc(sizeof get);
  upload(from, give, sizeof give);
  struct transfer transfers[2] = {transfer_of(self, ALL_REDUCE, 300, 31), transfer_of(self, REDUCE, 41, 32)};
  together(self);
  NCCL(ncclGroupStart());
  NCCL(ncclSend(from, COUNT, ncclInt32, next, communicator, as_cuda(self->stream)));
  transfer_launch(&transfers[0], communicator, self->stream);
  NCCL(ncclRecv(to, COUNT, ncclInt32, before, communicator, as_cuda(self->stream)));
  transfer_launch(&transfers[1], communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  download(get, to, sizeof get);
  CHECK(memcmp(get, wanted, sizeof get) == 0);
  record(self, get, sizeof get);
  settle(self, transfers, 2);
  device_free(from);
  device_free(to);
}

/* As PyTorch does, all open groups are closed to make a communicator, and then as many opened again. Where ranks are processes
 * the first call is still in flight meanwhile. */
static void closed_and_reopened(struct rank* self, ncclComm_t communicator) {
  ncclComm_t made = NULL;
  struct transfer transfers[2] = {transfer_of(self, ALL_REDUCE, 12, 40), transfer_of(self, ALL_REDUCE, 13, 41)};
  together(self);
  NCCL(ncclGroupStart());
  NCCL(ncclGroupStart());
  transfer_launch(&transfers[0], communicator, self->stream);
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupEnd());
  if (self->kind == THREADS) wait_for(self->stream);
  together(self);
  made = world(self, 2);
  together(self);
  NCCL(ncclGroupStart());
  NCCL(ncclGroupStart());
  transfer_launch(&transfers[1], made, self->stream);
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  settle(self, transfers, 2);
  NCCL(ncclCommDestroy(made));
}

/* An ncclGroupEnd without a start is a usage error and harms nothing. */
static void one_end_too_many(struct rank* self, ncclComm_t communicator) {
  CODE(ncclGroupEnd(), ncclInvalidUsage);
  nested(self, communicator);
}

/* A group opened by ncclGroupStart may be closed by pncclGroupEnd, and the other way round. */
static void by_the_other_names(struct rank* self, ncclComm_t communicator) {
  struct transfer transfers[2] = {transfer_of(self, ALL_REDUCE, 71, 50), transfer_of(self, ALL_GATHER, 72, 51)};
  cudaStream_t stream = as_cuda(self->stream);
  together(self);
  NCCL(pncclGroupStart());
  NCCL(pncclAllReduce(transfers[0].send, transfers[0].receive, 71, ncclInt32, ncclSum, communicator, stream));
  NCCL(pncclAllGather(transfers[1].send, transfers[1].receive, 72, ncclInt32, communicator, stream));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  settle(self, transfers, 2);
}

static void all(struct rank* self) {
  ncclComm_t first = world(self, 0), second = world(self, 1);
  empty();
  nested(self, first);
  two_communicators(self, first, second);
  mixed(self, first);
  closed_and_reopened(self, first);
  one_end_too_many(self, second);
  by_the_other_names(self, first);
  NCCL(ncclCommDestroy(second));
  NCCL(ncclCommDestroy(first));
}

int main(void) {
  begin("groups", 60);
  int ranks = rank_count(4);
  run_ranks("processes", PROCESSES, ranks, all, NULL);
  run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}
