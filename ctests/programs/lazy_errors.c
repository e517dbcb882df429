/* Holds that wrong calls on a lazy communicator return NCCL's codes at once, on one rank alone, outside and inside groups. A
 * group that failed has run nothing, and later calls are right. An abort from another thread ends a first collective to which no
 * other rank comes. With the argument `faults`, and where ranks meet at init: the same after the peer has died; and an abort
 * ends a destroy or finalize that waits for the device. */
#include "../support/team.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int version;

static struct team made(struct rank* self, enum build build) { return team_made(self, *(int*)self->argument, build); }

#define REFUSED(call, code) CODE(call, code), refused(self, #call, code)

static void refused(struct rank* self, const char* call, int code) {
  record(self, call, strlen(call));
  record(self, &code, sizeof code);
}

static void wrong_calls(struct rank* self, const struct team* team, void* buffer) {
  ncclComm_t communicator = team->communicator, made = NULL;
  cudaStream_t stream = as_cuda(self->stream);
  const ncclDataType_t no_type = (ncclDataType_t)99;
  const ncclRedOp_t no_op = (ncclRedOp_t)99;
  int ranks = team->ranks;
  REFUSED(ncclAllReduce(buffer, buffer, 4, no_type, ncclSum, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclAllReduce(buffer, buffer, 4, ncclFloat, no_op, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclAllReduce(buffer, buffer, 4, ncclFloat, (ncclRedOp_t)-1, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclAllReduce(buffer, buffer, 4, ncclFloat, ncclNumOps, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclAllReduce(buffer, buffer, 4, ncclFloat, ncclSum, NULL, stream), ncclInvalidArgument);
  REFUSED(ncclReduce(buffer, buffer, 4, ncclFloat, ncclSum, ranks, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclReduce(buffer, buffer, 4, ncclFloat, ncclSum, -1, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclReduce(buffer, buffer, 4, no_type, ncclSum, 0, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclReduceScatter(buffer, buffer, 4, no_type, ncclSum, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclReduceScatter(buffer, buffer, 4, ncclFloat, no_op, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclBroadcast(buffer, buffer, 4, ncclFloat, ranks, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclBroadcast(buffer, buffer, 4, (ncclDataType_t)-1, 0, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclBcast(buffer, 4, ncclFloat, -1, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclAllGather(buffer, buffer, 4, no_type, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclSend(buffer, 4, ncclFloat, ranks, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclSend(buffer, 4, no_type, 0, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclRecv(buffer, 4, ncclFloat, -1, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclSend(buffer, 4, ncclFloat, 0, NULL, stream), ncclInvalidArgument);
  /* Wrong arguments are errors even with no elements. */
  REFUSED(ncclAllReduce(buffer, buffer, 0, no_type, ncclSum, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclBroadcast(buffer, buffer, 0, ncclFloat, ranks, communicator, stream), ncclInvalidArgument);
  REFUSED(ncclRedOpDestroy(ncclSum, communicator), ncclInvalidArgument);
  REFUSED(ncclRedOpDestroy((ncclRedOp_t)-3, communicator), ncclInvalidArgument);
  REFUSED(ncclRedOpDestroy((ncclRedOp_t)(ncclNumOps + 3), communicator), ncclInvalidArgument);
  REFUSED(ncclRedOpDestroy((ncclRedOp_t)(ncclNumOps + 3), NULL), ncclInvalidArgument);
  REFUSED(ncclCommDeregister(communicator, buffer), ncclInvalidUsage);
  REFUSED(ncclCommCount(communicator, NULL), ncclInvalidArgument);
  REFUSED(ncclCommUserRank(communicator, NULL), ncclInvalidArgument);
  REFUSED(ncclCommCuDevice(communicator, NULL), ncclInvalidArgument);
  REFUSED(ncclCommGetAsyncError(communicator, NULL), ncclInvalidArgument);
  REFUSED(ncclCommSplit(communicator, 0, 0, NULL, NULL), ncclInvalidArgument);
  ncclConfig_t configuration;
  memset(&configuration, 0, sizeof configuration);
  configuration.size = sizeof configuration;
  REFUSED(ncclCommSplit(communicator, 0, 0, &made, &configuration), ncclInvalidArgument);
  CHECK(made == NULL);
}

static void wrong_shrinks(const struct team* team) {
  ncclComm_t made = NULL;
  int own = team->rank, other = team_next(team);
  if (version < 22703) return;
  CODE(ncclCommShrink(team->communicator, &own, 1, &made, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
  CODE(ncclCommShrink(team->communicator, &other, 0, &made, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
  CODE(ncclCommShrink(team->communicator, NULL, 1, &made, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
  CODE(ncclCommShrink(team->communicator, &other, 1, NULL, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
  CHECK(made == NULL);
}

/* The first and the last rank of a team take turns at wrong calls, and no other rank notices. */
static void wrong_arguments(struct rank* self) {
  struct team team = made(self, BUILT);
  void* buffer = device_alloc(4096);
  for (int turn = 0; turn < 2; turn++) {
    if (team.rank == (turn ? team.ranks - 1 : 0)) {
      wrong_calls(self, &team, buffer);
      wrong_shrinks(&team);
    }
    team_knows_itself(self, &team);
    team_passes(self, &team, 4321, 10 + (uint64_t)turn);
  }
  team_reduces(self, &team, 12);
  /* The same on a communicator that NCCL has built. */
  wrong_calls(self, &team, buffer);
  team_reduces(self, &team, 13);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* Wrong calls never have NCCL build the communicator. */
static void wrong_arguments_only(struct rank* self) {
  struct team team = made(self, UNBUILT);
  void* buffer = device_alloc(4096);
  wrong_calls(self, &team, buffer);
  wrong_shrinks(&team);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* ncclGetLastError gives the text of the error, for which PyTorch asks. */
static void says_why(struct rank* self) {
  struct team team = made(self, UNBUILT);
  void* buffer = device_alloc(4096);
  CODE(ncclSend(buffer, 4, ncclFloat, 9, team.communicator, as_cuda(self->stream)), ncclInvalidArgument);
  const char* text = ncclGetLastError(team.communicator);
  CHECK(text && *text);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

static struct transfer prepared(const struct team* team, uint64_t key) {
  struct transfer transfer = {.which = ALL_GATHER, .type = ncclInt32, .op = ncclSum, .count = 100, .rank = team->rank,
                              .ranks = team->ranks, .key = key};
  transfer_prepare(&transfer);
  return transfer;
}

/* Holds that this collective has written nothing. */
static void never_ran(const struct transfer* transfer) {
  unsigned char* seen = malloc(transfer->receive_bytes);
  download(seen, transfer->receive, transfer->receive_bytes);
  for (size_t i = 0; i < transfer->receive_bytes; i++) {
    if (!CHECK(seen[i] == 0xa5)) break;
  }
  free(seen);
}

/* One rank alone makes a group with a first collective and an error. No other rank need call, before the group and after. */
static void a_group_fails_alone(struct rank* self) {
  struct team team = made(self, UNBUILT), other = made(self, UNBUILT);
  void* buffer = device_alloc(4096);
  cudaStream_t stream = as_cuda(self->stream);
  for (int order = 0; order < 3; order++) {
    if (team.rank != order % team.ranks) continue;
    struct transfer transfer = prepared(&team, 20);
    NCCL(ncclGroupStart());
    if (order) transfer_launch(&transfer, team.communicator, self->stream);
    NCCL(ncclGroupStart());
    REFUSED(ncclBroadcast(buffer, buffer, 4, ncclFloat, 77, order == 2 ? other.communicator : team.communicator, stream),
            ncclInvalidArgument);
    NCCL(ncclGroupEnd());
    if (!order) transfer_launch(&transfer, team.communicator, self->stream);
    CODE(ncclGroupEnd(), ncclInvalidArgument);
    wait_for(self->stream);
    never_ran(&transfer);
    transfer_release(&transfer);
    /* The error belongs to that group alone. */
    NCCL(ncclGroupStart());
    NCCL(ncclGroupEnd());
  }
  team_knows_itself(self, &team);
  team_passes(self, &team, 555, 21);
  team_passes(self, &other, 556, 22);
  device_free(buffer);
  destroy_each((ncclComm_t[]){team.communicator, other.communicator}, 2);
}

/* The group fails on all ranks, and its messages are never sent. The same calls without the error then give right results. */
static void a_group_fails(struct rank* self) {
  struct team team = made(self, BUILT);
  struct message from = message_to_send(30 + (uint64_t)team.rank, 2000, 0);
  struct message to = message_to_receive(30 + (uint64_t)team_before(&team), 2000, 0);
  struct transfer transfer = prepared(&team, 31);
  together(self);
  for (int fails = 1; fails >= 0; fails--) {
    NCCL(ncclGroupStart());
    message_send(&from, team_next(&team), team.communicator, self->stream);
    transfer_launch(&transfer, team.communicator, self->stream);
    message_receive(&to, team_before(&team), team.communicator, self->stream);
    if (fails) CODE(ncclSend(from.at, 1, ncclUint8, 9, team.communicator, as_cuda(self->stream)), ncclInvalidArgument);
    CODE(ncclGroupEnd(), fails ? ncclInvalidArgument : ncclSuccess);
    wait_for(self->stream);
    together(self);
    if (fails) {
      message_untouched(&to);
      never_ran(&transfer);
    } else {
      message_verify(&to, self);
      transfer_verify(&transfer, self);
    }
    meet(self);
  }
  message_release(&from);
  message_release(&to);
  transfer_release(&transfer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* A message to oneself without a receive, and a receive without a send. */
static void unmatched(struct rank* self) {
  struct team team = made(self, UNBUILT);
  void* buffer = device_alloc(4096);
  cudaStream_t stream = as_cuda(self->stream);
  REFUSED(ncclSend(buffer, 4, ncclFloat, team.rank, team.communicator, stream), ncclInvalidUsage);
  NCCL(ncclGroupStart());
  NCCL(ncclRecv(buffer, 4, ncclFloat, team.rank, team.communicator, stream));
  CODE(ncclGroupEnd(), ncclInvalidUsage);
  team_passes(self, &team, 777, 40);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* The same beside collectives, a small and a large one: nothing of the group runs on any rank, and the communicator still works
 * and ends. */
static void unmatched_beside_collectives(struct rank* self) {
  struct team team = made(self, BUILT);
  void* buffer = device_alloc(4096);
  cudaStream_t stream = as_cuda(self->stream);
  struct transfer transfers[2] = {prepared(&team, 41), {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 30011,
                                  .rank = team.rank, .ranks = team.ranks, .key = 42}};
  transfer_prepare(&transfers[1]);
  together(self);
  for (int round = 0; round < 4; round++) {
    NCCL(ncclGroupStart());
    if (round % 2) NCCL(ncclRecv(buffer, 4, ncclFloat, team.rank, team.communicator, stream));
    for (int i = 0; i <= round / 2; i++) transfer_launch(&transfers[i], team.communicator, self->stream);
    if (round % 2 == 0) NCCL(ncclSend(buffer, 4, ncclFloat, team.rank, team.communicator, stream));
    CODE(ncclGroupEnd(), ncclInvalidUsage);
    wait_for(self->stream);
    together(self);
    for (int i = 0; i < 2; i++) never_ran(&transfers[i]);
  }
  for (int i = 0; i < 2; i++) {
    transfer_launch(&transfers[i], team.communicator, self->stream);
    wait_for(self->stream);
    together(self);
    transfer_verify(&transfers[i], self);
    transfer_release(&transfers[i]);
  }
  team_passes(self, &team, 778, 43);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

static ncclRedOp_t times_two(const struct team* team) {
  float two = 2;
  ncclRedOp_t operator = ncclSum;
  NCCL(ncclRedOpCreatePreMulSum(&operator, &two, ncclFloat, ncclScalarHostImmediate, team->communicator));
  return operator;
}

/* An operator for another type, and a destroyed one: on a lazy communicator, and once NCCL has built it. */
static void wrong_operators(struct rank* self) {
  struct team team = made(self, BUILT);
  void* buffer = device_alloc(4096);
  cudaStream_t stream = as_cuda(self->stream);
  ncclRedOp_t early = times_two(&team), gone = times_two(&team);
  NCCL(ncclRedOpDestroy(gone, team.communicator));
  for (int built = 0; built < 2; built++) {
    if (built) team_reduces(self, &team, 50);
    REFUSED(ncclAllReduce(buffer, buffer, 4, ncclInt32, early, team.communicator, stream), ncclInvalidArgument);
    REFUSED(ncclAllReduce(buffer, buffer, 4, ncclFloat, gone, team.communicator, stream), ncclInvalidArgument);
    REFUSED(ncclRedOpDestroy(gone, team.communicator), ncclInvalidArgument);
    NCCL(ncclGroupStart());
    REFUSED(ncclReduceScatter(buffer, buffer, 4, ncclFloat, gone, team.communicator, stream), ncclInvalidArgument);
    CODE(ncclGroupEnd(), ncclInvalidArgument);
    /* The group that failed ran nothing, so one rank alone may have had it. The next group has no error. */
    NCCL(ncclGroupStart());
    NCCL(ncclGroupEnd());
  }
  NCCL(ncclRedOpDestroy(early, team.communicator));
  REFUSED(ncclAllReduce(buffer, buffer, 4, ncclFloat, early, team.communicator, stream), ncclInvalidArgument);
  team_reduces(self, &team, 51);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct aborting { struct rank* self; ncclComm_t communicator; useconds_t after; };

static void* aborts(void* argument) {
  struct aborting* aborting = argument;
  CUDA(cuCtxSetCurrent(aborting->self->context));
  usleep(aborting->after);
  NCCL(ncclCommAbort(aborting->communicator));
  return NULL;
}

/* Makes a first collective that another thread aborts after `after` microseconds. Its result is not guaranteed, only that it
 * returns and that the stream becomes free. */
static void calls_and_is_aborted(struct rank* self, ncclComm_t communicator, useconds_t after) {
  struct aborting aborting = {self, communicator, after};
  pthread_t thread;
  void* buffer = device_alloc(4096);
  double began = seconds();
  if (pthread_create(&thread, NULL, aborts, &aborting)) return;
  ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, communicator, as_cuda(self->stream));
  count_calls("ncclAllReduce", 1);
  pthread_join(thread, NULL);
  cuStreamSynchronize(self->stream);
  CHECK(seconds() - began < 20);
  device_free(buffer);
}

static void aborted_while_nobody_comes(struct rank* self) {
  struct team team = made(self, EITHER), beside = made(self, UNBUILT);
  team_passes(self, &team, 888, 60);
  meet(self);
  if (team.rank == 0) calls_and_is_aborted(self, team.communicator, 200000);
  meet(self);
  if (team.rank) NCCL(ncclCommAbort(team.communicator));
  team_passes(self, &beside, 889, 61);
  NCCL(ncclCommDestroy(beside.communicator));
}

/* The peers call at about the time at which rank 0 gives up. */
static void aborted_while_the_others_come(struct rank* self) {
  uint64_t rounds = on_gpus() ? 2 : 8;
  for (uint64_t round = 0; round < rounds; round++) {
    struct team team = made(self, EITHER);
    meet(self);
    if (team.rank) usleep((useconds_t)(15000 + 1500 * round));
    calls_and_is_aborted(self, team.communicator, team.rank ? 150000 : 20000);
    meet(self);
  }
}

/* In a group: the wait is in ncclGroupEnd. */
static void aborted_in_a_group(struct rank* self) {
  struct team team = made(self, EITHER), other = made(self, EITHER);
  struct aborting both[2] = {{self, team.communicator, 150000}, {self, other.communicator, 200000}};
  pthread_t threads[2];
  meet(self);
  if (team.rank == 0) {
    void* buffer = device_alloc(4096);
    double began = seconds();
    for (int i = 0; i < 2; i++) {
      if (pthread_create(&threads[i], NULL, aborts, &both[i])) return;
    }
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
    NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, other.communicator, as_cuda(self->stream)));
    ncclGroupEnd();
    count_calls("ncclGroupEnd", 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    cuStreamSynchronize(self->stream);
    CHECK(seconds() - began < 20);
    device_free(buffer);
  }
  meet(self);
  if (team.rank) {
    NCCL(ncclCommAbort(team.communicator));
    NCCL(ncclCommAbort(other.communicator));
  }
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  RUN_PART(wrong_arguments, self);
  RUN_PART(wrong_arguments_only, self);
  RUN_PART(says_why, self);
  RUN_PART(a_group_fails_alone, self);
  RUN_PART(a_group_fails, self);
  RUN_PART(unmatched, self);
  RUN_PART(unmatched_beside_collectives, self);
  RUN_PART(wrong_operators, self);
  RUN_PART(aborted_while_nobody_comes, self);
  RUN_PART(aborted_while_the_others_come, self);
  RUN_PART(aborted_in_a_group, self);
}

/* The last rank dies before any rank needs NCCL. It leaves no report, so its calls are not counted. */
static void peer_dies(struct rank* self) {
  int ranks = *(int*)self->argument;
  ncclUniqueId id = share_id(self, 0, 0);
  ncclComm_t communicator = NULL;
  if (self->rank == ranks - 1) {
    ncclCommInitRank(&communicator, ranks, id, self->rank);
    usleep(100000);
    _exit(0);
  }
  NCCL(ncclCommInitRank(&communicator, ranks, id, self->rank));
  expect_lazy(ranks, EITHER);
  usleep(400000);
  calls_and_is_aborted(self, communicator, 500000);
}

struct ending { struct rank* self; ncclComm_t communicator; bool finalizes; };

static void* waits_for_the_device(void* argument) {
  struct ending* ending = argument;
  CUDA(cuCtxSetCurrent(ending->self->context));
  if (ending->finalizes) ncclCommFinalize(ending->communicator);
  else ncclCommDestroy(ending->communicator);
  return NULL;
}

/* No peer joins rank 0's second collective, so its destroy or finalize waits for the device until another thread aborts. The
 * result of that end is not guaranteed. */
static void ends_and_is_aborted(struct rank* self) {
  for (int finalizes = 0; finalizes < 2; finalizes++) {
    struct team team = team_made(self, 2, BUILT);
    team_reduces(self, &team, 70);
    meet(self);
    if (team.rank == 0) {
      struct ending ending = {self, team.communicator, finalizes};
      pthread_t thread;
      void* buffer = device_alloc(4096);
      double began = seconds();
      NCCL(ncclAllReduce(buffer, buffer, 100, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
      if (pthread_create(&thread, NULL, waits_for_the_device, &ending)) return;
      count_calls(finalizes ? "ncclCommFinalize" : "ncclCommDestroy", 1);
      usleep(300000);
      NCCL(ncclCommAbort(team.communicator));
      pthread_join(thread, NULL);
      cuStreamSynchronize(self->stream);
      CHECK(seconds() - began < 10);
      device_free(buffer);
    }
    meet(self);
    if (team.rank) NCCL(ncclCommAbort(team.communicator));
  }
}

int main(int count, char** words) {
  begin("lazy_errors", 110);
  choose(count, words);
  int ranks = rank_count(4), two = 2;
  if (is_section_chosen("faults")) {
    run_ranks("the peer dies", PROCESSES, 2, peer_dies, &two);
    if (ranks > 2) run_ranks("a peer dies", PROCESSES, ranks, peer_dies, &ranks);
    run_ranks("an end is aborted", PROCESSES, 2, ends_and_is_aborted, NULL);
    return finish();
  }
  if (is_section_chosen("processes")) {
    run_ranks("pairs", PROCESSES, ranks, all, &two);
    if (ranks > 2) run_ranks("all", PROCESSES, ranks, all, &ranks);
  }
  if (is_section_chosen("threads")) run_ranks("pairs by threads", THREADS, ranks, all, &two);
  return finish();
}
