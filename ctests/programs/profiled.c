/* Holds that profiler plugins are told of every call, whoever runs it: collectives and messages, alone and in groups, of communicators by
 * id, lazy ones, which NCCL builds later or never, and children. Each communicator and rank is begun once, under one id, and ended. After
 * the last one there are new ones. A call that Windlass runs comes with the device's times before its communicator has ended, unless it is
 * captured or aborted. CTESTS_PLUGINS names the plugins' files, separated by commas; what they check themselves is in
 * support/profiler_plugin.c. What they were told is part of the digest, so that it is the same on NCCL alone. */
#define _GNU_SOURCE
#include "../support/profiler_plugin.h"
#include "../support/team.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PLUGINS_MAX = 4 };
static const char* const FUNCTIONS[] = {"AllReduce", "Broadcast", "AllGather", "ReduceScatter", "Reduce", "Send", "Recv"};
enum { NAMES = sizeof FUNCTIONS / sizeof *FUNCTIONS };

static struct plugin {
  int (*begun)(void), (*living)(void), (*faults)(void), (*told)(const char*), (*untimed)(bool);
  uint64_t (*id)(int);
} plugins[PLUGINS_MAX];
static int plugin_count;
/* Calls of this process that were aborted. */
static atomic_int aborted_calls;
/* Ranks are threads, too. */
static pthread_once_t found = PTHREAD_ONCE_INIT;

/* The plugins, once NCCL's first communicator has opened them. */
static void find_plugins(void) {
  char names[4096];
  snprintf(names, sizeof names, "%s", getenv("CTESTS_PLUGINS") ? getenv("CTESTS_PLUGINS") : "");
  plugin_count = 0;
  for (char *rest = names, *name; (name = strsep(&rest, ",")) && *name;) {
    void* library = dlopen(name, RTLD_NOW);
    if (!library) break;
    struct plugin* plugin = &plugins[plugin_count++];
    *(void**)&plugin->begun = dlsym(library, "profiler_begun");
    *(void**)&plugin->living = dlsym(library, "profiler_living");
    *(void**)&plugin->faults = dlsym(library, "profiler_faults");
    *(void**)&plugin->told = dlsym(library, "profiler_told");
    *(void**)&plugin->untimed = dlsym(library, "profiler_untimed");
    *(void**)&plugin->id = dlsym(library, "profiler_id");
  }
  CHECK(plugin_count > 0);
}

/* Adds what the plugins were told to the digest; all were told the same. */
static void record_told(struct rank* self) {
  int first[NAMES + 1], faults = 0, living = 0;
  bool is_same = true, is_timed = true;
  for (int i = 0; i < plugin_count; i++) {
    int numbers[NAMES + 1] = {plugins[i].begun()};
    for (int name = 0; name < NAMES; name++) numbers[name + 1] = plugins[i].told(FUNCTIONS[name]);
    if (!i) memcpy(first, numbers, sizeof first);
    is_same &= !memcmp(numbers, first, sizeof first);
    faults += plugins[i].faults(), living += plugins[i].living();
    is_timed &= plugins[i].untimed(!on_gpus()) <= aborted_calls;
  }
  CHECK(is_same);
  CHECK(is_timed);
  EQUAL(faults, 0);
  EQUAL(living, 0);
  record(self, first, sizeof first);
}

static size_t large(void) { return (size_t)(on_gpus() ? 64 : 5) << 20; }

static void run(struct rank* self, const struct team* team, enum collective which, size_t count, uint64_t key) {
  team_runs(self, team, (struct transfer){.which = which, .type = ncclFloat, .op = ncclSum, .count = count, .root = team->ranks > 1, .key = key});
}

static void each_kind(struct rank* self, const struct team* team, uint64_t key) {
  static const enum collective kinds[] = {ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    run(self, team, kinds[i], 1000, key + i);
    run(self, team, ALL_REDUCE, 100, key + 20 + i);
  }
}

/* What NCCL calls the communicator of an id, from 2.26 on. */
static uint64_t hash(const ncclUniqueId* id) {
  uint64_t low = 1 ^ sizeof *id, high = 1, word;
  for (size_t at = 0; at < sizeof *id; at += sizeof word) {
    low += high, high ^= low, low ^= low >> 31, low *= 0x9de62bbc8cef3ce3, high ^= high >> 32, high *= 0x485cd6311b599e79;
    memcpy(&word, (const char*)id + at, sizeof word);
    low += word;
  }
  low ^= low >> 31, low *= 0xbac3bd562846de6b, low += high, low ^= low >> 32;
  return low * 0x995a187a14e7b445;
}

/* The newest communicator in which this process is `rank` is that of the id. Threads share the plugins: another pair may be newer. */
static void know_id(struct rank* self, int rank, const ncclUniqueId* id) {
  bool is_known = true;
  for (int i = 0; i < plugin_count; i++) is_known &= plugins[i].id(rank) == hash(id);
  CHECK(is_known || self->kind == THREADS);
}

/* A communicator of the whole section, or of pairs, which are lazy unless NCCL is alone: small calls, messages, then one that NCCL runs. */
static void by_id(struct rank* self, int ranks) {
  struct team team = {.rank = self->rank % ranks, .ranks = ranks};
  ncclUniqueId id = team_id(self, ranks);
  NCCL(ncclCommInitRank(&team.communicator, ranks, id, team.rank));
  pthread_once(&found, find_plugins);
  know_id(self, team.rank, &id);
  each_kind(self, &team, 100);
  team_passes(self, &team, 5000, 150);
  run(self, &team, ALL_REDUCE, large() / sizeof(float), 160);
  each_kind(self, &team, 170);
  team_passes(self, &team, 5001, 200);
  know_id(self, team.rank, &id);
  NCCL(ncclCommDestroy(team.communicator));
}

static void pairs(struct rank* self) { by_id(self, 2); }
static void whole(struct rank* self) { by_id(self, self->ranks); }

/* Collectives and messages of one group, and two groups within each other. */
static void grouped(struct rank* self) {
  struct team team = team_made(self, self->ranks, EITHER);
  float* buffer = device_alloc(4096);
  device_fill(buffer, 0, 4096);
  cudaStream_t stream = as_cuda(self->stream);
  together(self);
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(buffer, buffer, 10, ncclFloat, ncclSum, team.communicator, stream));
  NCCL(ncclGroupStart());
  NCCL(ncclSend(buffer + 100, 10, ncclFloat, team_next(&team), team.communicator, stream));
  NCCL(ncclRecv(buffer + 200, 10, ncclFloat, team_before(&team), team.communicator, stream));
  NCCL(ncclGroupEnd());
  NCCL(ncclBroadcast(buffer + 300, buffer + 300, 10, ncclFloat, 0, team.communicator, stream));
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  together(self);
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

static void children(struct rank* self) {
  struct team team = team_made(self, self->ranks, EITHER), child = {.rank = self->rank / 2, .ranks = self->ranks / 2};
  run(self, &team, ALL_REDUCE, 100, 300);
  NCCL(ncclCommSplit(team.communicator, self->rank % 2, self->rank, &child.communicator, NULL));
  each_kind(self, &child, 310);
  run(self, &child, ALL_REDUCE, large() / sizeof(float), 340);
  run(self, &team, ALL_REDUCE, 100, 350);
  NCCL(ncclCommDestroy(child.communicator));
  NCCL(ncclCommDestroy(team.communicator));
}

/* A communicator ends right behind its calls. */
static void ended_at_once(struct rank* self) {
  struct team team = team_made(self, self->ranks, EITHER);
  float* buffer = device_alloc(4096);
  device_fill(buffer, 0, 4096);
  together(self);
  for (int i = 0; i < 50; i++) NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
  NCCL(ncclCommDestroy(team.communicator));
  wait_for(self->stream);
  together(self);
  device_free(buffer);
}

/* A captured call has no times, however often its graph runs, and eager calls around it have theirs. Those come during the capture, which
 * forbids all threads of the process to ask the driver what is done. */
static void captured(struct rank* self) {
  struct team team = team_made(self, self->ranks, EITHER);
  float* buffer = device_alloc(4096);
  device_fill(buffer, 0, 4096);
  together(self);
  CUgraph graph;
  CUgraphExec executable;
  for (int i = 0; i < 20; i++) NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
  usleep(50000);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
  for (int i = 0; i < 3; i++) {
    CUDA(cuGraphLaunch(executable, self->stream));
    NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
  }
  wait_for(self->stream);
  together(self);
  CUDA(cuGraphExecDestroy(executable));
  CUDA(cuGraphDestroy(graph));
  device_free(buffer);
  NCCL(ncclCommDestroy(team.communicator));
}

/* A call for which the other ranks never come, so that its times are never known, and a communicator after that. */
static void aborted(struct rank* self) {
  struct team team = team_made(self, self->ranks, EITHER);
  float* buffer = device_alloc(4096);
  run(self, &team, ALL_REDUCE, 100, 400);
  together(self);
  if (!self->rank) {
    NCCL(ncclAllReduce(buffer, buffer, 1000, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
    aborted_calls++;
  }
  NCCL(ncclCommAbort(team.communicator));
  wait_for(self->stream);
  together(self);
  device_free(buffer);
  pairs(self);
}

/* The context is reset while a slow plugin hears of earlier calls: those that it has not heard of go, and the communicator ends all the same. */
static void reset(struct rank* self) {
  struct team team = team_made(self, self->ranks, EITHER);
  pthread_once(&found, find_plugins);
  float* buffer = device_alloc(4096);
  for (int i = 0; i < 4; i++)
    NCCL(ncclAllReduce(buffer, buffer, 300, ncclFloat, ncclSum, team.communicator, as_cuda(self->stream)));
  wait_for(self->stream);
  CUDA(cuStreamDestroy_v2(self->stream));
  CUDA(cuCtxSetCurrent(NULL));
  meet(self);
  CUDA(cuDevicePrimaryCtxReset_v2(self->device));
  meet(self);
  self->context = use_device(self->device), self->stream = new_stream();
  NCCL(ncclCommAbort(team.communicator));
  /* The worker may be telling the plugin of one more. */
  usleep(500000);
  for (int i = 0; i < plugin_count; i++) EQUAL(plugins[i].living(), 0);
}

static void body(struct rank* self) {
  RUN_PART(whole, self);
  RUN_PART(pairs, self);
  RUN_PART(grouped, self);
  RUN_PART(children, self);
  RUN_PART(pairs, self);
  meet(self);
  record_told(self);
  meet(self);
}

/* What NCCL alone may tell otherwise. */
static void faults(struct rank* self) {
  if (getenv("CTESTS_CHANNEL_MS")) {
    RUN_PART(reset, self);
    return;
  }
  RUN_PART(pairs, self);
  RUN_PART(ended_at_once, self);
  RUN_PART(captured, self);
  RUN_PART(aborted, self);
  meet(self);
  record_told(self);
  meet(self);
}

int main(int count, char** arguments) {
  begin("profiled", 120);
  choose(count, arguments);
  int ranks = rank_count(4);
  if (ranks % 2) skip("the number of ranks is odd");
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, body, NULL);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, body, NULL);
  if (is_section_chosen("faults")) run_ranks("faults", PROCESSES, ranks, faults, NULL);
  return finish();
}
