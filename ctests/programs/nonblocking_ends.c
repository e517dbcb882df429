/* Holds what a program sees of communicators with `blocking = 0` while something goes on behind its calls. Calls are refused until then, and a
 * finalize does not wait for kernels. An abort ends everything at once: of an init, of a group, of a finalize. One thread may have several
 * ranks. Ranks may differ in whether they wait. The children of such a communicator carry collectives, too. */
#include "../support/collective.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static ncclComm_t begin_init(ncclUniqueId id, int ranks, int rank, int blocking) {
  ncclComm_t communicator = NULL;
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = blocking;
  count_calls("ncclCommInitRankConfig", 1);
  ncclResult_t answer = ncclCommInitRankConfig(&communicator, ranks, id, rank, &configuration);
  CHECK(answer == ncclSuccess || answer == ncclInProgress);
  return communicator;
}

static void settle(ncclComm_t communicator) { EQUAL(settled(communicator, ncclInProgress), ncclSuccess); }

/* Verified sums of a few calls, each of which may be in progress after it. */
static void sums(struct rank* self, ncclComm_t communicator, int rank, int ranks, uint64_t key) {
  for (size_t count = 3; count < 400000; count *= 40) {
    struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclSum, .count = count, .rank = rank, .ranks = ranks, .key = key};
    transfer_prepare(&transfer);
    together(self);
    count_calls("ncclAllReduce", 1);
    ncclResult_t answer =
      ncclAllReduce(transfer.send, transfer.receive, count, ncclInt64, ncclSum, communicator, as_cuda(self->stream));
    EQUAL(settled(communicator, answer), ncclSuccess);
    wait_for(self->stream);
    together(self);
    transfer_verify(&transfer, self);
    transfer_release(&transfer);
  }
}

/* A group of an average, which NCCL runs, and a ring of messages. Gives the answer of its end. */
static ncclResult_t mixed(ncclComm_t communicator, int rank, int ranks, int64_t* buffer, size_t count, CUstream stream) {
  NCCL(ncclGroupStart());
  NCCL(ncclSend(buffer, 1, ncclInt64, (rank + 1) % ranks, communicator, as_cuda(stream)));
  NCCL(ncclAllReduce(buffer + 1, buffer + 1, count, ncclInt64, ncclAvg, communicator, as_cuda(stream)));
  NCCL(ncclRecv(buffer + count + 1, 1, ncclInt64, (rank + ranks - 1) % ranks, communicator, as_cuda(stream)));
  count_calls("ncclGroupEnd", 1);
  return ncclGroupEnd();
}

enum { COUNT = 1000 };

static int64_t* buffer_of(int rank) {
  int64_t host[COUNT + 2], *buffer = device_alloc(sizeof host);
  for (int i = 0; i < COUNT + 2; i++) host[i] = 12 * (rank + 1);
  upload(buffer, host, sizeof host);
  return buffer;
}

static void verify(int64_t* buffer, int rank, int ranks) {
  int64_t host[COUNT + 2];
  download(host, buffer, sizeof host);
  EQUAL(host[1], 6 * (ranks + 1));
  EQUAL(host[COUNT], host[1]);
  EQUAL(host[COUNT + 1], 12 * ((rank + ranks - 1) % ranks + 1));
}

/* Calls before the group is over are refused, as NCCL refuses them; then everything is as it was. */
static void in_use(struct rank* self) {
  ncclComm_t communicator = begin_init(share_id(self, 0, 0), self->ranks, self->rank, 0);
  settle(communicator);
  int64_t* buffer = buffer_of(self->rank);
  ncclResult_t ended = mixed(communicator, self->rank, self->ranks, buffer, COUNT, self->stream);
  if (!on_gpus()) {
    EQUAL(ended, ncclInProgress);
    CODE(ncclSend(buffer, 1, ncclInt64, self->rank, communicator, as_cuda(self->stream)), ncclInvalidArgument);
    CODE(ncclAllReduce(buffer, buffer, 1, ncclInt64, ncclSum, communicator, as_cuda(self->stream)), ncclInvalidArgument);
    CODE(ncclCommFinalize(communicator), ncclInvalidArgument);
  }
  EQUAL(settled(communicator, ended), ncclSuccess);
  wait_for(self->stream);
  verify(buffer, self->rank, self->ranks);
  sums(self, communicator, self->rank, self->ranks, 3);
  device_free(buffer);
  destroy_each(&communicator, 1);
}

static void hold(void* is_free) {
  while (!atomic_load((atomic_bool*)is_free)) usleep(100);
}

/* Work is on a held stream: the finalize answers, and is over only after the work. On GPUs nothing is held: while a host function waits, the
 * driver runs no other one, and NCCL 2.28.9 alone did not launch the group for 100 s (2 x H200). */
static void finalize(struct rank* self) {
  ncclComm_t communicator = begin_init(share_id(self, 0, 0), self->ranks, self->rank, 0);
  settle(communicator);
  int64_t* buffer = buffer_of(self->rank);
  ncclResult_t state = ncclSuccess;
  atomic_bool is_free = false;
  meet(self);
  if (!on_gpus()) CUDA(cuLaunchHostFunc(self->stream, hold, &is_free));
  EQUAL(settled(communicator, mixed(communicator, self->rank, self->ranks, buffer, COUNT, self->stream)), ncclSuccess);
  count_calls("ncclCommFinalize", 1);
  ncclResult_t answer = ncclCommFinalize(communicator);
  if (!on_gpus()) {
    EQUAL(answer, ncclInProgress);
    usleep(20000);
    NCCL(ncclCommGetAsyncError(communicator, &state));
    EQUAL(state, ncclInProgress);
  }
  atomic_store(&is_free, true);
  settle(communicator);
  /* Without a wait for the stream, which may still count as busy when its last kernel has ended. */
  verify(buffer, self->rank, self->ranks);
  device_free(buffer);
  NCCL(ncclCommDestroy(communicator));
}

/* Aborts at random times after an init, a group, and a finalize that cannot end. */
static void aborts(struct rank* self) {
  struct random random = random_from(program_seed(7) + (uint64_t)self->rank);
  for (int round = 0; round < 24; round++) {
    ncclComm_t communicator = begin_init(share_id(self, round, 0), self->ranks, self->rank, 0);
    int64_t* buffer = buffer_of(self->rank);
    if (round % 3 > 0) {
      settle(communicator);
      mixed(communicator, self->rank, self->ranks, buffer, COUNT, self->stream);
    }
    if (round % 3 > 1) {
      settle(communicator);
      count_calls("ncclCommFinalize", 1);
      ncclCommFinalize(communicator);
    }
    usleep((useconds_t)random_below(&random, 3000));
    NCCL(ncclCommAbort(communicator));
    wait_for(self->stream);
    meet(self);
    device_free(buffer);
  }
}

/* Rank 0 destroys as soon as it may: until its init is over it is refused, and the other ranks notice nothing. */
static void early_destroys(struct rank* self) {
  for (int round = 0; round < 24; round++) {
    ncclComm_t communicator = begin_init(share_id(self, round, 0), self->ranks, self->rank, 0);
    ncclResult_t answer = ncclInvalidArgument;
    if (self->rank > 0) settle(communicator);
    if (self->rank > 0) meet(self);
    while (answer == ncclInvalidArgument) count_calls("ncclCommDestroy", 1), answer = ncclCommDestroy(communicator);
    EQUAL(answer, ncclSuccess);
    if (self->rank == 0) meet(self);
  }
}

/* One thread has two ranks, whose inits and groups it begins before it polls any. */
static void one_thread(struct rank* self) {
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  ncclComm_t communicators[2];
  int64_t* buffers[2];
  ncclResult_t answers[2];
  CUcontext contexts[2];
  CUstream streams[2];
  for (int rank = 0; rank < 2; rank++) {
    contexts[rank] = use_device(rank), streams[rank] = new_stream(), buffers[rank] = buffer_of(rank);
    communicators[rank] = begin_init(id, 2, rank, 0);
  }
  settle(communicators[0]), settle(communicators[1]);
  for (int rank = 0; rank < 2; rank++) {
    CUDA(cuCtxSetCurrent(contexts[rank]));
    answers[rank] = mixed(communicators[rank], rank, 2, buffers[rank], COUNT, streams[rank]);
  }
  EQUAL(settled(communicators[0], answers[0]), ncclSuccess);
  CUDA(cuCtxSetCurrent(contexts[0]));
  wait_for(streams[0]);
  EQUAL(settled(communicators[1], answers[1]), ncclSuccess);
  for (int rank = 0; rank < 2; rank++) {
    CUDA(cuCtxSetCurrent(contexts[rank]));
    wait_for(streams[rank]);
    verify(buffers[rank], rank, 2);
    device_free(buffers[rank]);
    CUDA(cuStreamDestroy_v2(streams[rank]));
  }
  for (int rank = 0; rank < 2; rank++) NCCL(ncclCommDestroy(communicators[rank]));
  (void)self;
}

/* Rank 1 waits for its calls. */
static void unlike(struct rank* self) {
  for (int slot = 0; slot < 2; slot++) {
    ncclUniqueId id = slot ? share_foreign_id(self, slot, 0) : share_id(self, slot, 0);
    ncclComm_t child = NULL, communicator = begin_init(id, self->ranks, self->rank, self->rank == 1);
    settle(communicator);
    int64_t* buffer = buffer_of(self->rank);
    EQUAL(settled(communicator, mixed(communicator, self->rank, self->ranks, buffer, COUNT, self->stream)), ncclSuccess);
    wait_for(self->stream);
    verify(buffer, self->rank, self->ranks);
    sums(self, communicator, self->rank, self->ranks, 5);
    device_free(buffer);
    /* NCCL 2.28.9 alone fails to split a parent whose ranks wait unlike (2 x H200: an internal error of rank 0). */
    if (on_gpus()) {
      destroy_each(&communicator, 1);
      continue;
    }
    ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
    configuration.blocking = 1;
    count_calls("ncclCommSplit", 1);
    EQUAL(settled(communicator, ncclCommSplit(communicator, 0, self->rank, &child, &configuration)), ncclSuccess);
    settle(child);
    sums(self, child, self->rank, self->ranks, 6);
    destroy_each((ncclComm_t[]){child, communicator}, 2);
  }
}

int main(int count, char** words) {
  choose(count, words);
  begin("nonblocking_ends", 100);
  int ranks = rank_count(4);
  if (is_section_chosen("processes")) run_ranks("in use", PROCESSES, ranks, in_use, NULL);
  if (is_section_chosen("processes")) run_ranks("finalize", PROCESSES, ranks, finalize, NULL);
  if (is_section_chosen("one_thread")) run_ranks("one thread", PROCESSES, 1, one_thread, NULL);
  if (is_section_chosen("in_turn")) run_ranks("unlike", PROCESSES, ranks, unlike, NULL);
  if (is_section_chosen("faults")) run_ranks("aborts", PROCESSES, ranks, aborts, NULL);
  /* On GPUs NCCL 2.28.9 alone refuses an init after an early destroy of another rank (2 x H200). */
  if (is_section_chosen("early") && !on_gpus()) run_ranks("early destroys", PROCESSES, ranks, early_destroys, NULL);
  if (is_section_chosen("threads")) run_ranks("in use by threads", THREADS, ranks, in_use, NULL);
  return finish();
}
