/* Holds that lazy communicators, of two ranks and of all, behave as those that NCCL builds at init. Cases: queries, messages
 * only, the first collective at any point (alone, after messages, in groups of several in different orders, on several threads,
 * captured or beside captures), operators, registrations and windows made before and after NCCL builds, configurations, and
 * every end. NCCL never builds one without a call that all ranks make. */
#include "../support/team.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static int version;

static int size_of_teams(struct rank* self) { return *(int*)self->argument; }

static struct team made(struct rank* self, enum build build) { return team_made(self, size_of_teams(self), build); }

static size_t large(void) { return (size_t)(on_gpus() ? 24 : 5) << 20; }

static void never_used(struct rank* self) {
  struct team team = made(self, UNBUILT);
  team_knows_itself(self, &team);
  NCCL(ncclCommDestroy(team.communicator));
}

static void messages_only(struct rank* self) {
  struct team team = made(self, UNBUILT);
  team_passes(self, &team, 1, 1);
  team_passes(self, &team, 70001, 2);
  team_passes(self, &team, 0, 3);
  team_passes(self, &team, large(), 4);
  team_knows_itself(self, &team);
  NCCL(ncclCommDestroy(team.communicator));
}

/* All-to-all, gather and scatter are served by the p2p transport, so they build nothing. */
static void made_of_messages(struct rank* self) {
  if (collectives_known() < COLLECTIVES) return;
  struct team team = made(self, UNBUILT);
  for (enum collective which = ALL_TO_ALL; which <= SCATTER; which++) {
    for (int root = 0; root < team.ranks; root++) {
      team_runs(self, &team, (struct transfer){.which = which, .type = ncclFloat, .op = ncclSum, .count = 1500, .root = root,
                                               .key = 10 + (uint64_t)which});
    }
  }
  NCCL(ncclCommDestroy(team.communicator));
}

/* Messages in one direction only, one rank after the other, outside of groups. */
static void one_way(struct rank* self) {
  struct team team = made(self, UNBUILT);
  struct message from = message_to_send(20, 9001, 1), to = message_to_receive(20, 9001, 2);
  together(self);
  for (int receiver = 1; receiver < team.ranks; receiver++) {
    if (team.rank == 0) message_send(&from, receiver, team.communicator, self->stream);
    if (team.rank == receiver) message_receive(&to, 0, team.communicator, self->stream);
  }
  wait_for(self->stream);
  together(self);
  if (team.rank) message_verify(&to, self);
  message_release(&from);
  message_release(&to);
  NCCL(ncclCommDestroy(team.communicator));
}

/* A collective of no elements and a window over nothing concern no other rank: one rank alone may call them. */
static void nothing_at_all(struct rank* self) {
  struct team team = made(self, UNBUILT);
  void* buffer = device_alloc(64);
  cudaStream_t stream = as_cuda(self->stream);
  if (team.rank == 0) {
    NCCL(ncclAllReduce(buffer, buffer, 0, ncclFloat, ncclSum, team.communicator, stream));
    NCCL(ncclGroupStart());
    NCCL(ncclAllGather(buffer, buffer, 0, ncclFloat, team.communicator, stream));
    NCCL(ncclBroadcast(buffer, buffer, 0, ncclFloat, 1, team.communicator, stream));
    NCCL(ncclReduceScatter(buffer, buffer, 0, ncclFloat, ncclSum, team.communicator, stream));
    NCCL(ncclReduce(buffer, buffer, 0, ncclFloat, ncclSum, 1, team.communicator, stream));
    NCCL(ncclGroupEnd());
    ncclWindow_t window = NULL;
    if (version >= 22703) {
      NCCL(ncclCommWindowRegister(team.communicator, NULL, 4096, &window, NCCL_WIN_COLL_SYMMETRIC));
      NCCL(ncclCommWindowRegister(team.communicator, buffer, 0, &window, NCCL_WIN_COLL_SYMMETRIC));
      NCCL(ncclCommWindowDeregister(team.communicator, NULL));
      CHECK(window == NULL);
    }
  }
  wait_for(self->stream);
  team_passes(self, &team, 333, 25);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

static void to_oneself(struct rank* self) {
  struct team team = made(self, UNBUILT);
  struct message from = message_to_send(30, 4097, 0), to = message_to_receive(30, 4097, 1);
  together(self);
  NCCL(ncclGroupStart());
  message_receive(&to, team.rank, team.communicator, self->stream);
  message_send(&from, team.rank, team.communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  message_verify(&to, self);
  message_release(&from);
  message_release(&to);
  NCCL(ncclCommDestroy(team.communicator));
}

/* A collective of each kind is the very first call. */
static void each_collective_first(struct rank* self) {
  for (enum collective which = ALL_REDUCE; which < COLLECTIVES_OF_2_18; which++) {
    if (on_gpus() && which != REDUCE && which != ALL_GATHER) continue;
    struct team team = made(self, BUILT);
    for (uint64_t round = 0; round < 2; round++) {
      team_runs(self, &team, (struct transfer){.which = which, .type = ncclInt64, .op = ncclMax, .count = 777, .root = 1,
                                               .in_place = round == 1, .key = 40 + (uint64_t)which * 2 + round});
    }
    team_knows_itself(self, &team);
    NCCL(ncclCommDestroy(team.communicator));
  }
}

static void interleaved(struct rank* self) {
  struct team team = made(self, BUILT);
  for (uint64_t round = 0; round < 4; round++) {
    team_passes(self, &team, 5000 * (round + 1), 60 + round);
    team_reduces(self, &team, 60 + round);
  }
  team_passes(self, &team, large(), 65);
  NCCL(ncclCommDestroy(team.communicator));
}

/* Messages are still in flight when the first collective comes; more follow at once. */
static void in_flight(struct rank* self) {
  enum { MESSAGES = 6 };
  struct team team = made(self, BUILT);
  struct message from[MESSAGES], to[MESSAGES];
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 5001, .rank = team.rank,
                              .ranks = team.ranks, .key = 70};
  for (uint64_t i = 0; i < MESSAGES; i++) {
    from[i] = message_to_send(70 + i * 8 + (uint64_t)team.rank, 30011, 0);
    to[i] = message_to_receive(70 + i * 8 + (uint64_t)team_before(&team), 30011, 0);
  }
  transfer_prepare(&transfer);
  together(self);
  for (int i = 0; i < MESSAGES; i++) {
    if (i == MESSAGES / 2) transfer_launch(&transfer, team.communicator, self->stream);
    NCCL(ncclGroupStart());
    message_send(&from[i], team_next(&team), team.communicator, self->stream);
    message_receive(&to[i], team_before(&team), team.communicator, self->stream);
    NCCL(ncclGroupEnd());
  }
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  for (int i = 0; i < MESSAGES; i++) {
    message_verify(&to[i], self);
    message_release(&from[i]);
    message_release(&to[i]);
  }
  NCCL(ncclCommDestroy(team.communicator));
}

/* The last rank comes 200 ms after the others. */
static void late(struct rank* self) {
  struct team team = made(self, BUILT);
  if (team.rank == team.ranks - 1) usleep(200000);
  team_reduces(self, &team, 75);
  NCCL(ncclCommDestroy(team.communicator));
}

/* Several first collectives of one communicator are in one group, with messages between them. */
static void first_in_a_group(struct rank* self) {
  struct team team = made(self, BUILT);
  struct transfer first = {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 300, .rank = team.rank,
                           .ranks = team.ranks, .key = 80};
  struct transfer second = first;
  second.which = ALL_GATHER;
  second.key = 81;
  struct message from = message_to_send(82 + (uint64_t)team.rank, 12345, 0);
  struct message to = message_to_receive(82 + (uint64_t)team_before(&team), 12345, 0);
  transfer_prepare(&first);
  transfer_prepare(&second);
  together(self);
  NCCL(ncclGroupStart());
  message_send(&from, team_next(&team), team.communicator, self->stream);
  NCCL(ncclGroupStart());
  transfer_launch(&first, team.communicator, self->stream);
  NCCL(ncclGroupEnd());
  message_receive(&to, team_before(&team), team.communicator, self->stream);
  team_knows_itself(self, &team);
  transfer_launch(&second, team.communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  message_verify(&to, self);
  transfer_verify(&first, self);
  transfer_verify(&second, self);
  transfer_release(&first);
  transfer_release(&second);
  message_release(&from);
  message_release(&to);
  team_reduces(self, &team, 85);
  NCCL(ncclCommDestroy(team.communicator));
}

enum { SEVERAL = 3 };

struct several {
  struct team teams[SEVERAL];
  struct transfer transfers[SEVERAL];
  CUstream streams[SEVERAL];
};

static struct several several_made(struct rank* self, uint64_t key) {
  struct several several;
  for (int i = 0; i < SEVERAL; i++) {
    several.teams[i] = made(self, BUILT);
    several.streams[i] = new_stream();
    several.transfers[i] = (struct transfer){.which = i == 1 ? ALL_GATHER : ALL_REDUCE, .type = ncclInt32, .op = ncclSum,
                                             .count = 1000 + (size_t)i, .rank = several.teams[i].rank,
                                             .ranks = several.teams[i].ranks, .key = key + (uint64_t)i};
    transfer_prepare(&several.transfers[i]);
  }
  together(self);
  return several;
}

static void several_end(struct rank* self, struct several* several) {
  for (int i = 0; i < SEVERAL; i++) wait_for(several->streams[i]);
  together(self);
  for (int i = 0; i < SEVERAL; i++) {
    transfer_verify(&several->transfers[i], self);
    transfer_release(&several->transfers[i]);
    CUDA(cuStreamDestroy_v2(several->streams[i]));
  }
  ncclComm_t communicators[SEVERAL];
  for (int i = 0; i < SEVERAL; i++) {
    int which = self->rank % 2 ? SEVERAL - 1 - i : i;
    communicators[i] = several->teams[which].communicator;
  }
  destroy_each(communicators, SEVERAL);
}

/* The first collectives of several communicators are in one group; odd ranks call them in the opposite order. */
static void opposite_orders(struct rank* self) {
  struct several several = several_made(self, 90);
  NCCL(ncclGroupStart());
  for (int i = 0; i < SEVERAL; i++) {
    int which = self->rank % 2 ? SEVERAL - 1 - i : i;
    transfer_launch(&several.transfers[which], several.teams[which].communicator, several.streams[which]);
  }
  NCCL(ncclGroupEnd());
  several_end(self, &several);
}

struct launch { CUcontext context; const struct transfer* transfer; ncclComm_t communicator; CUstream stream; };

static void* launches(void* argument) {
  struct launch* launch = argument;
  CUDA(cuCtxSetCurrent(launch->context));
  NCCL(ncclGroupStart());
  transfer_launch(launch->transfer, launch->communicator, launch->stream);
  NCCL(ncclGroupEnd());
  return NULL;
}

/* Several communicators have their first collectives, each on its own thread. */
static void on_many_threads(struct rank* self) {
  struct several several = several_made(self, 100);
  struct launch each[SEVERAL];
  pthread_t threads[SEVERAL];
  for (int i = 0; i < SEVERAL; i++) {
    int which = self->rank % 2 ? SEVERAL - 1 - i : i;
    each[i] = (struct launch){self->context, &several.transfers[which], several.teams[which].communicator,
                              several.streams[which]};
    if (pthread_create(&threads[i], NULL, launches, &each[i])) return;
  }
  for (int i = 0; i < SEVERAL; i++) pthread_join(threads[i], NULL);
  several_end(self, &several);
}

struct watch { ncclComm_t communicator; atomic_bool ends, failed; };

static void* watches(void* argument) {
  struct watch* watch = argument;
  while (!atomic_load(&watch->ends)) {
    ncclResult_t state = ncclInternalError;
    ncclResult_t result = ncclCommGetAsyncError(watch->communicator, &state);
    count_calls("ncclCommGetAsyncError", 1);
    if (result != ncclSuccess || state != ncclSuccess) atomic_store(&watch->failed, true);
    usleep(1000);
  }
  return NULL;
}

/* Another thread queries the state all the time, as PyTorch's watchdog does; one rank comes late. */
static void watched(struct rank* self) {
  struct team team = made(self, BUILT);
  struct watch watch = {.communicator = team.communicator};
  pthread_t thread;
  if (pthread_create(&thread, NULL, watches, &watch)) return;
  team_passes(self, &team, 4000, 105);
  if (team.rank == 0) usleep(50000);
  team_reduces(self, &team, 106);
  team_passes(self, &team, 4000, 107);
  atomic_store(&watch.ends, true);
  pthread_join(thread, NULL);
  CHECK(!atomic_load(&watch.failed));
  NCCL(ncclCommDestroy(team.communicator));
}

/* One group holds the first collective of one communicator and the init of another. */
static void beside_a_init(struct rank* self) {
  struct team team = made(self, BUILT), later = {NULL, team.rank, team.ranks};
  struct transfer transfer = {.which = ALL_GATHER, .type = ncclFloat, .op = ncclSum, .count = 64, .rank = team.rank,
                              .ranks = team.ranks, .key = 108};
  ncclUniqueId id = team_id(self, team.ranks);
  transfer_prepare(&transfer);
  together(self);
  NCCL(ncclGroupStart());
  transfer_launch(&transfer, team.communicator, self->stream);
  NCCL(ncclCommInitRank(&later.communicator, later.ranks, id, later.rank));
  NCCL(ncclGroupEnd());
  expect_lazy(later.ranks, BUILT);
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  team_passes(self, &later, 600, 109);
  team_reduces(self, &later, 109);
  destroy_each((ncclComm_t[]){later.communicator, team.communicator}, 2);
}

/* Rank 0 waits on one stream for a message that rank 1 sends only after a first collective of both. */
static void first_beside_a_wait(struct rank* self) {
  struct team quiet = made(self, UNBUILT), loud = made(self, BUILT);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 777, .rank = loud.rank,
                              .ranks = loud.ranks, .key = 119};
  transfer_prepare(&transfer);
  struct message from = message_to_send(119, 9001, 1), to = message_to_receive(119, 9001, 2);
  CUstream other = new_stream();
  together(self);
  if (quiet.rank == 0) message_receive(&to, 1, quiet.communicator, other);
  transfer_launch(&transfer, loud.communicator, self->stream);
  wait_for(self->stream);
  if (quiet.rank == 1) message_send(&from, 0, quiet.communicator, other);
  wait_for(other);
  together(self);
  if (quiet.rank == 0) message_verify(&to, self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  message_release(&from);
  message_release(&to);
  CUDA(cuStreamDestroy_v2(other));
  NCCL(ncclCommDestroy(quiet.communicator));
  NCCL(ncclCommDestroy(loud.communicator));
}

/* One group holds messages of one communicator and the first collective of another. The former is not built. */
static void beside_messages(struct rank* self) {
  struct team quiet = made(self, UNBUILT), loud = made(self, BUILT);
  struct transfer transfer = {.which = REDUCE_SCATTER, .type = ncclFloat, .op = ncclSum, .count = 511, .rank = loud.rank,
                              .ranks = loud.ranks, .key = 110};
  struct message from = message_to_send(111 + (uint64_t)quiet.rank, 8000, 0);
  struct message to = message_to_receive(111 + (uint64_t)team_before(&quiet), 8000, 0);
  transfer_prepare(&transfer);
  together(self);
  NCCL(ncclGroupStart());
  message_send(&from, team_next(&quiet), quiet.communicator, self->stream);
  transfer_launch(&transfer, loud.communicator, self->stream);
  message_receive(&to, team_before(&quiet), quiet.communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  message_verify(&to, self);
  transfer_release(&transfer);
  message_release(&from);
  message_release(&to);
  destroy_each((ncclComm_t[]){loud.communicator, quiet.communicator}, 2);
}

enum { FACTOR = 3, ELEMENTS = 1025 };

static ncclRedOp_t times_factor(const struct team* team) {
  float scalar = FACTOR;
  ncclRedOp_t operator = ncclSum;
  NCCL(ncclRedOpCreatePreMulSum(&operator, &scalar, ncclFloat, ncclScalarHostImmediate, team->communicator));
  CHECK(operator >= ncclNumOps);
  return operator;
}

/* An all-reduce with this operator. With `within` the operator is destroyed right after the call, inside the group, as PyTorch
 * does. */
static void multiplies(struct rank* self, const struct team* team, ncclRedOp_t operator, bool within, uint64_t key) {
  float host[ELEMENTS], wanted[ELEMENTS];
  void *input = device_alloc(sizeof host), *output = device_alloc(sizeof host);
  input_fill(host, key, team->rank, 0, ELEMENTS, ncclFloat, ncclSum);
  upload(input, host, sizeof host);
  together(self);
  if (within) NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(input, output, ELEMENTS, ncclFloat, operator, team->communicator, as_cuda(self->stream)));
  if (within) {
    NCCL(ncclRedOpDestroy(operator, team->communicator));
    NCCL(ncclGroupEnd());
  }
  wait_for(self->stream);
  together(self);
  download(host, output, sizeof host);
  reduced_fill(wanted, key, team->ranks, 0, ELEMENTS, ncclFloat, ncclSum, FACTOR);
  CHECK(memcmp(host, wanted, sizeof host) == 0);
  record(self, host, sizeof host);
  device_free(input);
  device_free(output);
}

static void operators(struct rank* self) {
  struct team team = made(self, BUILT);
  ncclRedOp_t spare = times_factor(&team), early = times_factor(&team), other = times_factor(&team);
  CHECK(spare != early && early != other && other != spare);
  NCCL(ncclRedOpDestroy(spare, team.communicator));
  multiplies(self, &team, early, true, 120);
  ncclRedOp_t later = times_factor(&team);
  CHECK(later != other);
  multiplies(self, &team, other, false, 121);
  multiplies(self, &team, later, true, 122);
  multiplies(self, &team, other, true, 123);
  CODE(ncclRedOpDestroy(other, team.communicator), ncclInvalidArgument);
  CODE(ncclRedOpDestroy(early, team.communicator), ncclInvalidArgument);
  /* An operator destroyed before its first use stays invalid. */
  ncclRedOp_t last = times_factor(&team);
  NCCL(ncclRedOpDestroy(last, team.communicator));
  team_reduces(self, &team, 124);
  NCCL(ncclCommDestroy(team.communicator));
}

/* In one group: a first collective whose operator is destroyed at once, and one with the next operator, which may get the same
 * number. */
static void operators_in_a_group(struct rank* self) {
  struct team team = made(self, BUILT);
  float host[ELEMENTS], wanted[ELEMENTS];
  void *input = device_alloc(sizeof host), *outputs[2] = {device_alloc(sizeof host), device_alloc(sizeof host)};
  input_fill(host, 126, team.rank, 0, ELEMENTS, ncclFloat, ncclSum);
  upload(input, host, sizeof host);
  together(self);
  NCCL(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    float scalar = FACTOR + (float)i;
    ncclRedOp_t operator = ncclSum;
    NCCL(ncclRedOpCreatePreMulSum(&operator, &scalar, ncclFloat, ncclScalarHostImmediate, team.communicator));
    NCCL(ncclAllReduce(input, outputs[i], ELEMENTS, ncclFloat, operator, team.communicator, as_cuda(self->stream)));
    NCCL(ncclRedOpDestroy(operator, team.communicator));
  }
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  for (int i = 0; i < 2; i++) {
    download(host, outputs[i], sizeof host);
    reduced_fill(wanted, 126, team.ranks, 0, ELEMENTS, ncclFloat, ncclSum, FACTOR + i);
    CHECK(memcmp(host, wanted, sizeof host) == 0);
    record(self, host, sizeof host);
    device_free(outputs[i]);
  }
  device_free(input);
  NCCL(ncclCommDestroy(team.communicator));
}

/* Operators are made and destroyed without any collective. */
static void idle_operators(struct rank* self) {
  struct team team = made(self, UNBUILT);
  for (int i = 0; i < 20; i++) NCCL(ncclRedOpDestroy(times_factor(&team), team.communicator));
  team_passes(self, &team, 100, 125);
  NCCL(ncclCommDestroy(team.communicator));
}

enum { REGISTERED_BYTES = 4 << 20 };

/* An all-reduce from the first half of this memory into the second. */
static void reduces_within(struct rank* self, const struct team* team, char* memory, uint64_t key) {
  enum { COUNT = 2049 };
  int32_t host[COUNT], wanted[COUNT];
  char* output = memory + REGISTERED_BYTES / 2;
  input_fill(host, key, team->rank, 0, COUNT, ncclInt32, ncclSum);
  upload(memory, host, sizeof host);
  together(self);
  NCCL(ncclAllReduce(memory, output, COUNT, ncclInt32, ncclSum, team->communicator, as_cuda(self->stream)));
  wait_for(self->stream);
  meet(self); /* a peer may still read this buffer when this rank's stream is done */
  download(host, output, sizeof host);
  reduced_fill(wanted, key, team->ranks, 0, COUNT, ncclInt32, ncclSum, 1);
  CHECK(memcmp(host, wanted, sizeof host) == 0);
  record(self, host, sizeof host);
}

/* Buffers are registered before NCCL builds and after, and deregistered before and after. */
static void registrations(struct rank* self) {
  struct team team = made(self, BUILT);
  void *memory = NULL, *other = NULL, *early = NULL, *kept = NULL, *inside = NULL, *late = NULL;
  NCCL(ncclMemAlloc(&memory, REGISTERED_BYTES));
  NCCL(ncclMemAlloc(&other, REGISTERED_BYTES));
  NCCL(ncclCommRegister(team.communicator, memory, REGISTERED_BYTES, &early));
  NCCL(ncclCommDeregister(team.communicator, early));
  NCCL(ncclCommRegister(team.communicator, memory, REGISTERED_BYTES, &kept));
  NCCL(ncclCommRegister(team.communicator, memory, REGISTERED_BYTES / 4, &inside));
  team_passes(self, &team, 2000, 130);
  NCCL(ncclCommDeregister(team.communicator, inside));
  reduces_within(self, &team, memory, 131);
  NCCL(ncclCommRegister(team.communicator, other, REGISTERED_BYTES, &late));
  reduces_within(self, &team, other, 132);
  NCCL(ncclCommDeregister(team.communicator, kept));
  reduces_within(self, &team, memory, 133);
  NCCL(ncclCommDeregister(team.communicator, late));
  NCCL(ncclCommDeregister(team.communicator, NULL));
  NCCL(ncclMemFree(other));
  NCCL(ncclMemFree(memory));
  NCCL(ncclCommDestroy(team.communicator));
}

/* A buffer is registered, used for messages and deregistered: NCCL never hears of it. */
static void idle_registrations(struct rank* self) {
  struct team team = made(self, UNBUILT);
  void *memory = NULL, *handle = NULL;
  NCCL(ncclMemAlloc(&memory, REGISTERED_BYTES));
  for (int round = 0; round < 3; round++) {
    NCCL(ncclCommRegister(team.communicator, memory, REGISTERED_BYTES, &handle));
    together(self);
    NCCL(ncclGroupStart());
    NCCL(ncclSend(memory, 900, ncclInt32, team_next(&team), team.communicator, as_cuda(self->stream)));
    NCCL(ncclRecv((char*)memory + 8192, 900, ncclInt32, team_before(&team), team.communicator, as_cuda(self->stream)));
    NCCL(ncclGroupEnd());
    wait_for(self->stream);
    meet(self);
    NCCL(ncclCommDeregister(team.communicator, handle));
  }
  NCCL(ncclMemFree(memory));
  NCCL(ncclCommDestroy(team.communicator));
}

/* A window needs NCCL, so its registration has NCCL build the communicator. */
static void windows(struct rank* self) {
  if (version < 22703) return;
  struct team team = made(self, BUILT);
  void* memory = NULL;
  ncclWindow_t window = NULL;
  NCCL(ncclMemAlloc(&memory, REGISTERED_BYTES));
  NCCL(ncclCommWindowRegister(team.communicator, memory, REGISTERED_BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
  team_passes(self, &team, 3000, 140);
  reduces_within(self, &team, memory, 141);
  /* Where the machine supports no windows the library returns success and no window. */
  if (window) NCCL(ncclCommWindowDeregister(team.communicator, window));
  reduces_within(self, &team, memory, 142);
  NCCL(ncclMemFree(memory));
  NCCL(ncclCommDestroy(team.communicator));
}

/* Two window registrations and a first collective are in one group. */
static void windows_in_a_group(struct rank* self) {
  if (version < 22703) return;
  struct team team = made(self, BUILT);
  void* memory[2] = {NULL, NULL};
  ncclWindow_t made[2] = {NULL, NULL};
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 200, .rank = team.rank,
                              .ranks = team.ranks, .key = 145};
  for (int i = 0; i < 2; i++) NCCL(ncclMemAlloc(&memory[i], REGISTERED_BYTES));
  transfer_prepare(&transfer);
  together(self);
  NCCL(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    NCCL(ncclCommWindowRegister(team.communicator, memory[i], REGISTERED_BYTES, &made[i], NCCL_WIN_COLL_SYMMETRIC));
  }
  transfer_launch(&transfer, team.communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  CHECK(made[0] != made[1] || (!made[0] && !made[1]));
  reduces_within(self, &team, memory[1], 146);
  for (int i = 0; i < 2; i++) {
    if (made[i]) NCCL(ncclCommWindowDeregister(team.communicator, made[i]));
    NCCL(ncclMemFree(memory[i]));
  }
  NCCL(ncclCommDestroy(team.communicator));
}

/* Messages captured while the communicator is lazy are replayed before and after the first collective, which is not captured. */
static void captured_messages(struct rank* self) {
  struct team team = made(self, BUILT);
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  struct message from = message_to_send(0, 20011, 0), to = message_to_receive(0, 20011, 0);
  together(self);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  NCCL(ncclGroupStart());
  message_send(&from, team_next(&team), team.communicator, self->stream);
  message_receive(&to, team_before(&team), team.communicator, self->stream);
  NCCL(ncclGroupEnd());
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (uint64_t replay = 0; replay < 6; replay++) {
    message_refill(&from, 150 + replay * 8 + (uint64_t)team.rank);
    message_clear(&to, 150 + replay * 8 + (uint64_t)team_before(&team));
    together(self);
    CUDA(cuGraphLaunch(executable, self->stream));
    wait_for(self->stream);
    together(self);
    message_verify(&to, self);
    team_passes(self, &team, 3000, 200 + replay);
    if (replay >= 2) team_reduces(self, &team, 210 + replay);
  }
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  message_release(&from);
  message_release(&to);
  NCCL(ncclCommDestroy(team.communicator));
}

/* The very first collective is captured. */
static void captured_collective(struct rank* self) {
  struct team team = made(self, BUILT);
  CUgraph graph = NULL;
  CUgraphExec executable = NULL;
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt32, .op = ncclSum, .count = 4000, .rank = team.rank,
                              .ranks = team.ranks, .key = 220};
  transfer_prepare(&transfer);
  together(self);
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  transfer_launch(&transfer, team.communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (int replay = 0; replay < 3; replay++) {
    together(self);
    CUDA(cuGraphLaunch(executable, self->stream));
    wait_for(self->stream);
    together(self);
    transfer_verify(&transfer, self);
  }
  team_reduces(self, &team, 221);
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  transfer_release(&transfer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* A communicator with a configuration, which the program has overwritten by the time NCCL is asked. */
static void configured(struct rank* self) {
  int ranks = size_of_teams(self);
  struct team team = {NULL, self->rank % ranks, ranks};
  ncclUniqueId id = team_id(self, ranks);
  char name[] = "pair";
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 1;
  configuration.minCTAs = 1;
  configuration.maxCTAs = 4;
  configuration.cgaClusterSize = 2;
  configuration.commName = name;
  NCCL(ncclCommInitRankConfig(&team.communicator, ranks, id, team.rank, &configuration));
  expect_lazy(ranks, BUILT);
  memset(&configuration, 0xff, sizeof configuration);
  memset(name, '?', sizeof name - 1);
  team_knows_itself(self, &team);
  team_passes(self, &team, 6000, 230);
  team_reduces(self, &team, 231);
  NCCL(ncclCommDestroy(team.communicator));
}

/* Configurations as TensorRT-LLM and SGLang give them. */
static void configured_by_frameworks(struct rank* self) {
  int ranks = size_of_teams(self);
  for (int mode = 0; mode < 3; mode++) {
    struct team team = {NULL, self->rank % ranks, ranks};
    ncclUniqueId id = team_id(self, ranks);
    ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
    configuration.graphUsageMode = mode;
    configuration.numRmaCtx = mode + 1;
    configuration.maxP2pPeers = mode + 1;
    NCCL(ncclCommInitRankConfig(&team.communicator, ranks, id, team.rank, &configuration));
    expect_lazy(ranks, UNBUILT);
    team_knows_itself(self, &team);
    team_passes(self, &team, 6000, 232);
    NCCL(ncclCommDestroy(team.communicator));
  }
}

/* Every order of finalize and destroy, of used and of unused communicators. */
static void ends(struct rank* self) {
  for (int used = 0; used < 3; used++) {
    if (on_gpus() && used == 1) continue;
    struct team team = made(self, used == 2 ? BUILT : UNBUILT);
    if (used) team_passes(self, &team, 7000, 240);
    if (used == 2) team_reduces(self, &team, 241);
    NCCL(ncclCommFinalize(team.communicator));
    CODE(ncclCommFinalize(team.communicator), ncclInvalidArgument);
    ncclResult_t state = ncclInternalError;
    NCCL(ncclCommGetAsyncError(team.communicator, &state));
    EQUAL(state, ncclSuccess);
    NCCL(ncclCommDestroy(team.communicator));
  }
}

/* A used and an unused communicator end in one group. */
static void ends_in_a_group(struct rank* self) {
  struct team quiet = made(self, UNBUILT), loud = made(self, BUILT);
  team_passes(self, &quiet, 400, 250);
  team_reduces(self, &loud, 251);
  NCCL(ncclGroupStart());
  NCCL(ncclCommDestroy(quiet.communicator));
  NCCL(ncclCommDestroy(loud.communicator));
  NCCL(ncclGroupEnd());
}

/* Communicators end with messages in flight: destroy waits for them. */
static void ends_in_flight(struct rank* self) {
  struct team team = made(self, UNBUILT);
  struct message from = message_to_send(260 + (uint64_t)team.rank, large(), 0);
  struct message to = message_to_receive(260 + (uint64_t)team_before(&team), large(), 0);
  together(self);
  NCCL(ncclGroupStart());
  message_send(&from, team_next(&team), team.communicator, self->stream);
  message_receive(&to, team_before(&team), team.communicator, self->stream);
  NCCL(ncclGroupEnd());
  together(self);
  NCCL(ncclCommFinalize(team.communicator));
  wait_for(self->stream);
  together(self);
  message_verify(&to, self);
  NCCL(ncclCommDestroy(team.communicator));
  message_release(&from);
  message_release(&to);
}

static void aborted(struct rank* self) {
  struct team team = made(self, UNBUILT), other = made(self, UNBUILT);
  team_passes(self, &other, 900, 270);
  meet(self);
  NCCL(ncclCommAbort(team.communicator));
  NCCL(ncclCommAbort(other.communicator));
}

/* Within a group an abort acts at once; the group's calls on another communicator still run. */
static void aborted_within_a_group(struct rank* self) {
  struct team idle = made(self, UNBUILT), team = made(self, BUILT);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclMin, .count = 65, .rank = team.rank,
                              .ranks = team.ranks, .key = 275};
  transfer_prepare(&transfer);
  together(self);
  NCCL(ncclGroupStart());
  transfer_launch(&transfer, team.communicator, self->stream);
  NCCL(ncclCommAbort(idle.communicator));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  transfer_verify(&transfer, self);
  transfer_release(&transfer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* A group that ends with ncclGroupSimulateEnd runs nothing. */
static void rehearsed(struct rank* self) {
  if (version < 22200) return;
  struct team team = made(self, EITHER);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclInt64, .op = ncclMin, .count = 65, .rank = team.rank,
                              .ranks = team.ranks, .key = 276};
  ncclSimInfo_t information = NCCL_SIM_INFO_INITIALIZER;
  transfer_prepare(&transfer);
  together(self);
  NCCL(ncclGroupStart());
  transfer_launch(&transfer, team.communicator, self->stream);
  NCCL(ncclGroupSimulateEnd(&information));
  wait_for(self->stream);
  together(self);
  unsigned char seen = 0;
  download(&seen, transfer.receive, 1);
  EQUAL(seen, 0xa5);
  transfer_release(&transfer);
  team_passes(self, &team, 6000, 277);
  NCCL(ncclCommDestroy(team.communicator));
}

static void revoked(struct rank* self) {
  if (version < 22807) return;
  struct team team = made(self, UNBUILT);
  void* buffer = device_alloc(64);
  cudaStream_t stream = as_cuda(self->stream);
  team_passes(self, &team, 1000, 280);
  meet(self);
  CODE(ncclCommRevoke(team.communicator, 1), ncclInvalidArgument);
  NCCL(ncclCommRevoke(team.communicator, NCCL_REVOKE_DEFAULT));
  CODE(ncclCommRevoke(team.communicator, NCCL_REVOKE_DEFAULT), ncclInvalidArgument);
  CODE(ncclAllReduce(buffer, buffer, 4, ncclFloat, ncclSum, team.communicator, stream), ncclInvalidUsage);
  CODE(ncclSend(buffer, 4, ncclFloat, team_next(&team), team.communicator, stream), ncclInvalidUsage);
  NCCL(ncclGroupStart());
  CODE(ncclRecv(buffer, 4, ncclFloat, team_next(&team), team.communicator, stream), ncclInvalidUsage);
  CODE(ncclGroupEnd(), ncclInvalidUsage);
  CODE(ncclCommFinalize(team.communicator), ncclInvalidArgument);
  int ranks = 0;
  NCCL(ncclCommCount(team.communicator, &ranks));
  EQUAL(ranks, team.ranks);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* The same ranks make, use and end communicators again and again; half of these run a collective. */
static void again_and_again(struct rank* self) {
  /* Reports keep some 250 communicators of a process. With more, what is stated could not be checked. */
  uint64_t rounds = on_gpus() ? 4 : 8;
  for (uint64_t round = 0; round < rounds; round++) {
    struct team team = made(self, round % 2 ? BUILT : UNBUILT);
    team_passes(self, &team, 1000 + round, 290 + round);
    if (round % 2) team_reduces(self, &team, 290 + round);
    NCCL(ncclCommDestroy(team.communicator));
  }
}

static void all(struct rank* self) {
  NCCL(ncclGetVersion(&version));
  RUN_PART(never_used, self);
  RUN_PART(messages_only, self);
  RUN_PART(made_of_messages, self);
  RUN_PART(one_way, self);
  RUN_PART(nothing_at_all, self);
  RUN_PART(to_oneself, self);
  RUN_PART(each_collective_first, self);
  RUN_PART(interleaved, self);
  RUN_PART(in_flight, self);
  RUN_PART(late, self);
  RUN_PART(first_in_a_group, self);
  RUN_PART(opposite_orders, self);
  RUN_PART(on_many_threads, self);
  RUN_PART(watched, self);
  RUN_PART(beside_a_init, self);
  RUN_PART(first_beside_a_wait, self);
  RUN_PART(beside_messages, self);
  RUN_PART(operators, self);
  RUN_PART(operators_in_a_group, self);
  RUN_PART(idle_operators, self);
  RUN_PART(registrations, self);
  RUN_PART(idle_registrations, self);
  RUN_PART(windows, self);
  RUN_PART(windows_in_a_group, self);
  RUN_PART(captured_messages, self);
  RUN_PART(captured_collective, self);
  RUN_PART(configured, self);
  RUN_PART(configured_by_frameworks, self);
  RUN_PART(ends, self);
  RUN_PART(ends_in_a_group, self);
  RUN_PART(ends_in_flight, self);
  RUN_PART(aborted, self);
  RUN_PART(aborted_within_a_group, self);
  RUN_PART(rehearsed, self);
  RUN_PART(revoked, self);
  RUN_PART(again_and_again, self);
}

int main(int count, char** words) {
  begin("lazy communicators", 280);
  choose(count, words);
  int ranks = rank_count(4), two = 2, three = 3;
  if (is_section_chosen("processes")) {
    run_ranks("pairs", PROCESSES, ranks, all, &two);
    if (ranks > 3) run_ranks("three", PROCESSES, 3, all, &three);
    if (ranks > 3) run_ranks("all", PROCESSES, ranks, all, &ranks);
  }
  if (is_section_chosen("threads")) run_ranks("pairs by threads", THREADS, ranks, all, &two);
  return finish();
}
