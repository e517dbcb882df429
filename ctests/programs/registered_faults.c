/* Holds that large all-gathers stay right where one rank meets an error that no other rank sees, often made by the simulator on
 * request, and that what NCCL may still use is not freed. Sections run alone by their names: `failed`, `lost`, `kept`, `grown`,
 * `disabled`, `few`; without a name all but the last two. Ranks are processes. */
#include "../support/gathers.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MIB = 1 << 20, RANKS = 4, CALLS = 6 /* enough to be registered by the last ones */ };

/* Slots of share_id. */
enum { FIRST, LOWER, UPPER };

/* The rank with the errors. Its variables are set before its first call of NCCL, as the simulator reads them once. */
enum { LOSER = 1 };
static void ask_simulator(const struct rank* self, const char* name, const char* value) {
  if (self->rank == LOSER) setenv(name, value, 1);
}

static size_t room(const struct rank* self) { return gather_room(self, gather_count(self, 0)); }

static struct gather gather_in(const struct rank* self, const struct memory* memory, uint64_t key) {
  return gather_into(self, NULL, memory, 0, gather_count(self, 0), key);
}

static void gathers_in(struct rank* self, ncclComm_t communicator, const struct memory* memory, uint64_t key) {
  for (uint64_t call = 0; call < CALLS; call++) {
    struct gather gather = gather_in(self, memory, key + call);
    gather_run(self, communicator, &gather);
    meet(self);
  }
}

/* NCCL returns an error for a call, alone and then in a group, yet the call runs once an abort comes. */
static void failed(struct rank* self) {
  /* The call after those of `gathers_in`, on each communicator. */
  ask_simulator(self, "WINDLASS_SIM_FAILED_LAUNCHES", "7,14");
  struct memory memory = memory_alloc(self, NCCLS, room(self));
  for (int in_group = 0; in_group < 2; in_group++) {
    ncclComm_t communicator = world(self, FIRST);
    gathers_in(self, communicator, &memory, 100);
    if (self->rank == LOSER) {
      struct gather gather = gather_in(self, &memory, 110);
      if (in_group) NCCL(ncclGroupStart());
      CODE(ncclAllGather(gather.send, gather.receive, gather.count, gather.type, communicator, as_cuda(self->stream)),
           in_group ? ncclSuccess : ncclSystemError);
      if (in_group) CODE(ncclGroupEnd(), ncclSystemError);
      NCCL(ncclCommAbort(communicator));
      wait_for(self->stream);
    }
    meet(self);
    if (self->rank != LOSER) NCCL(ncclCommAbort(communicator));
    meet(self);
  }
  memory_free(self, &memory);
}

/* NCCL runs a group and then cannot build the lazy communicator of another call in it. The gather must count as done. */
static void lost(struct rank* self) {
  setenv("WINDLASS_SIM_LOST_INITS", "2", 1);
  ncclComm_t all = world(self, FIRST), pair = NULL;
  ncclUniqueId ids[] = {share_id(self, LOWER, 0), share_id(self, UPPER, 2)};
  NCCL(ncclCommInitRank(&pair, 2, ids[self->rank / 2], self->rank % 2));
  struct memory good = memory_alloc(self, NCCLS, room(self)), plain = memory_alloc(self, PLAIN, room(self));
  void* buffer = device_alloc(4096);
  gathers_in(self, all, &good, 200);
  struct gather gather = gather_in(self, self->rank == LOSER ? &plain : &good, 210);
  gather_prepare(&gather);
  meet(self);
  NCCL(ncclGroupStart());
  gather_launch(&gather, all, self->stream);
  NCCL(ncclAllReduce(buffer, buffer, 100, ncclFloat, ncclSum, pair, as_cuda(self->stream)));
  CHECK(ncclGroupEnd() != ncclSuccess);
  count_calls("ncclGroupEnd", 1);
  wait_for(self->stream);
  meet(self);
  gather_verify(&gather, self);
  gathers_in(self, all, &good, 220);
  NCCL(ncclCommDestroy(pair));
  NCCL(ncclCommDestroy(all));
  memory_free(self, &good);
  memory_free(self, &plain);
  device_free(buffer);
}

/* NCCL refuses to deregister a buffer when larger calls need another registration. Its memory must then not be freed. */
static void kept(struct rank* self) {
  ask_simulator(self, "WINDLASS_SIM_KEPT_REGISTRATIONS", "1");
  ncclComm_t communicator = world(self, FIRST);
  size_t twice = gather_count(self, 0) * 2;
  struct memory memory = memory_alloc(self, NCCLS, gather_room(self, twice));
  gathers_in(self, communicator, &memory, 300);
  for (uint64_t call = 0; call < CALLS; call++) {
    struct gather gather = gather_into(self, NULL, &memory, 0, twice, 310 + call);
    gather_run(self, communicator, &gather);
    meet(self);
  }
  NCCL(ncclCommDestroy(communicator));
  memory_free(self, &memory);
}

/* Staging buffers for a group of calls are freed when later calls do not need them. */
static void grown(struct rank* self) {
  enum { GROUP = 6 };
  ncclComm_t communicator = world(self, FIRST);
  struct memory good = memory_alloc(self, NCCLS, GROUP * room(self)), plain = memory_alloc(self, PLAIN, GROUP * room(self));
  bool is_bad = self->rank == LOSER;
  struct gather gathers[GROUP];
  gathers_in(self, communicator, &good, 400);
  for (uint64_t i = 0; i < GROUP; i++) {
    const struct memory* memory = is_bad ? &plain : &good;
    gathers[i] = gather_into(self, NULL, memory, i * room(self), gather_count(self, 0), 410 + i);
    gather_prepare(&gathers[i]);
  }
  /* The other ranks have launched their calls before this rank calls. */
  NCCL(ncclGroupStart());
  if (is_bad) meet(self);
  for (int i = 0; i < GROUP; i++) gather_launch(&gathers[i], communicator, self->stream);
  if (!is_bad) meet(self);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  meet(self);
  for (int i = 0; i < GROUP; i++) gather_verify(&gathers[i], self);
  size_t used = memory_used();
  meet(self);
  gathers_in(self, communicator, &good, 420);
  if (is_bad) CHECK(memory_used() + (size_t)(GROUP - 2) * GATHER_BYTES <= used);
  NCCL(ncclCommDestroy(communicator));
  memory_free(self, &good);
  memory_free(self, &plain);
}

/* Windlass is disabled: not while a group is open, and later calls are right. Calls after that are not counted, and Windlass's
 * part of communicators stays. */
static void disabled(struct rank* self) {
  ncclResult_t (*disable)(void) = NULL;
  *(void**)&disable = dlsym(RTLD_DEFAULT, "windlassDisable");
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, MAPPED, room(self));
  if (!CHECK(disable)) return;
  gathers_in(self, communicator, &memory, 500);
  struct gather gather = gather_in(self, &memory, 510);
  gather_prepare(&gather);
  meet(self);
  NCCL(ncclGroupStart());
  gather_launch(&gather, communicator, self->stream);
  EQUAL(disable(), ncclInvalidUsage);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  meet(self);
  gather_verify(&gather, self);
  EQUAL(disable(), ncclSuccess);
  meet(self);
  gather.key = 511;
  gather_prepare(&gather);
  meet(self);
  EQUAL(ncclAllGather(gather.send, gather.receive, gather.count, gather.type, communicator, as_cuda(self->stream)), ncclSuccess);
  wait_for(self->stream);
  meet(self);
  gather_verify(&gather, self);
  EQUAL(ncclCommDestroy(communicator), ncclSuccess);
  memory_free(self, &memory);
}

/* Lets the process open only `more` further descriptors; returns the limit of before. */
static struct rlimit limit_descriptors(rlim_t more) {
  struct rlimit before, now;
  int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  CHECK(next >= 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
  close(next);
  now = before;
  now.rlim_cur = (rlim_t)next + more;
  CHECK(setrlimit(RLIMIT_NOFILE, &now) == 0);
  return before;
}

/* NCCL needs descriptors to register, and does not tell other ranks when it has none: then nothing is registered. */
static void few(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, room(self));
  struct rlimit before;
  if (self->rank == LOSER) before = limit_descriptors(3);
  gathers_in(self, communicator, &memory, 600);
  gathers_in(self, communicator, &memory, 610);
  if (self->rank == LOSER) CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  NCCL(ncclCommDestroy(communicator));
  memory_free(self, &memory);
}

int main(int count, char** words) {
  begin("registered_faults", 110);
  if (rank_count(RANKS) < RANKS) skip("four devices are needed");
  if (is_wanted(count, words, "failed")) run_ranks("failed", PROCESSES, RANKS, failed, NULL);
  if (is_wanted(count, words, "lost")) run_ranks("lost", PROCESSES, RANKS, lost, NULL);
  if (is_wanted(count, words, "kept")) run_ranks("kept", PROCESSES, RANKS, kept, NULL);
  if (is_wanted(count, words, "grown")) run_ranks("grown", PROCESSES, RANKS, grown, NULL);
  if (count > 1 && is_wanted(count, words, "disabled")) run_ranks("disabled", PROCESSES, RANKS, disabled, NULL);
  if (count > 1 && is_wanted(count, words, "few")) run_ranks("few", PROCESSES, RANKS, few, NULL);
  return finish();
}
