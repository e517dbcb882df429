/* Holds that with WINDLASS_CHECK=1 the log names the rank whose call differs from the others' or is missing, and says nothing
 * where all ranks call alike. Runs through Windlass with kept windows; the simulator is told to accept unequal offsets. */
#include "../support/windows.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST, SECOND };
enum { SMALL = 1024, LARGE = 1 << 20 };

/* Waits up to 20 seconds: another thread compares the calls. */
static bool log_will_say(const char* first, const char* second) {
  for (int look = 0; look < 2000; look++) {
    if (log_says(first, second)) return true;
    usleep(10 * 1000);
  }
  return false;
}

static void reduce(struct rank* self, ncclComm_t communicator, char* at, size_t count) {
  NCCL(ncclAllReduce(at, at, count, ncclFloat32, ncclSum, communicator, as_cuda(self->stream)));
  wait_for(self->stream);
}

static void gather(struct rank* self, ncclComm_t communicator, char* at, size_t count) {
  NCCL(ncclAllGather(at + self->rank * count * 4, at, count, ncclFloat32, communicator, as_cuda(self->stream)));
  wait_for(self->stream);
}

/* Whether the `check` part of this process's counters contains `name`. */
static bool counts(const char* name) {
  char path[4096];
  snprintf(path, sizeof path, "%s.counts-%d", getenv("WINDLASS_LOG_FILE"), (int)getpid());
  ncclResult_t (*dump)(const char*) = NULL;
  *(void**)&dump = dlsym(RTLD_DEFAULT, "windlassDump");
  if (!dump || dump(path) != ncclSuccess) return false;
  FILE* file = fopen(path, "r");
  if (!file) return false;
  static char text[1 << 20];
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  fclose(file);
  char* check = strstr(text, "\"check\":");
  char* end = check ? strchr(check, '}') : NULL;
  if (!end) return false;
  *end = 0;
  return strstr(check, name) != NULL;
}

/* Equal calls at equal places: in a window, outside it and in groups, more calls than Windlass remembers at once. */
static void clean(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, 4 * LARGE * (size_t)self->ranks);
  struct memory plain = memory_alloc(self, PLAIN, 4 * LARGE);
  for (int round = 0; round < 3; round++) {
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    reduce(self, communicator, memory.at + 4096 * round, SMALL);
    reduce(self, communicator, plain.at, SMALL);
    gather(self, communicator, memory.at, LARGE / 2);
    NCCL(ncclGroupStart());
    NCCL(ncclBroadcast(memory.at, memory.at, SMALL, ncclFloat32, 0, communicator, as_cuda(self->stream)));
    NCCL(ncclBroadcast(memory.at + 8192, memory.at + 8192, SMALL, ncclFloat32, 1, communicator, as_cuda(self->stream)));
    NCCL(ncclGroupEnd());
    for (int call = 0; call < 150; call++) {
      NCCL(ncclAllReduce(plain.at, plain.at, SMALL, ncclFloat32, ncclSum, communicator, as_cuda(self->stream)));
    }
    wait_for(self->stream);
    together(self);
    window_end(communicator, window);
  }
  meet(self);
  usleep(200 * 1000);
  CHECK(!log_says("check:", ""));
  if (self->rank == 0) CHECK(counts("\"compared\":") && !counts("\"divergences\":"));
  together(self);
  memory_free(self, &plain);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* One rank has one tensor more than the others in the pool under a window, so its next tensor lies at another offset. */
static void offsets(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, 16 * LARGE);
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  bool is_one = self->rank == 1;
  char* at = memory.at + (is_one ? 65536 : 0);
  reduce(self, communicator, memory.at, SMALL);
  reduce(self, communicator, at, SMALL);
  if (window) {
    CHECK(log_will_say("call 3, ncclAllReduce: rank 1 differs in where the send buffer lies", "rank 1 at 65536 bytes in window 1; rank"));
  }
  reduce(self, communicator, at, LARGE);
  if (window) CHECK(log_will_say("call 4, ncclAllReduce: rank 1 differs", "at 65536 bytes"));
  /* Outside the window on one rank. */
  struct memory other = memory_alloc(self, NCCLS, 4 * LARGE);
  reduce(self, communicator, is_one ? other.at : memory.at, SMALL);
  if (window) CHECK(log_will_say("call 5, ncclAllReduce: rank 1 differs", "rank 1 in no window"));
  meet(self);
  window_end(communicator, window);
  memory_free(self, &other);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* One rank registers a block of another size. NCCL would hang; Windlass refuses it on all ranks, which then go on. */
static void sizes(struct rank* self) {
  enum { KEPT_SINCE = 22803, UNLIKE_SINCE = 23007 };
  int version = 0;
  NCCL(ncclGetVersion(&version));
  if (version < KEPT_SINCE) return;
  ncclComm_t communicator = world(self, FIRST);
  bool is_last = self->rank == self->ranks - 1;
  struct memory memory = memory_alloc(self, NCCLS, (is_last ? 3 : 2) * window_room(self));
  ncclWindow_t window = NULL;
  ncclResult_t code = ncclCommWindowRegister(communicator, memory.at, memory.bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  count_calls("ncclCommWindowRegister", 1);
  CHECK(code == ncclUnhandledCudaError || (code == ncclSuccess && version >= UNLIKE_SINCE));
  char line[256];
  snprintf(line, sizeof line, "rank %d differs in size: rank %d %zu bytes", self->ranks - 1, self->ranks - 1, 3 * window_room(self));
  CHECK(log_will_say("call 1, ncclCommWindowRegister: ", line));
  meet(self);
  window_end(communicator, window);
  reduce(self, communicator, memory.at, SMALL);
  meet(self);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* On one communicator a rank calls for fewer elements, on another a rank calls another collective: both hang. */
static void calls(struct rank* self) {
  void* buffer = device_alloc(4 * SMALL * (size_t)self->ranks);
  ncclComm_t communicator = world(self, FIRST);
  int last = self->ranks - 1;
  size_t count = self->rank == last ? SMALL / 2 : SMALL;
  NCCL(ncclAllReduce(buffer, buffer, count, ncclFloat32, ncclSum, communicator, as_cuda(self->stream)));
  char line[128];
  snprintf(line, sizeof line, "call 1, ncclAllReduce: rank %d differs in size: rank %d 512 float32; rank", last, last);
  CHECK(log_will_say(line, " 1024 float32"));
  meet(self);
  NCCL(ncclCommAbort(communicator));
  wait_for(self->stream);

  communicator = world(self, SECOND);
  if (self->rank == 1) {
    NCCL(ncclBroadcast(buffer, buffer, SMALL, ncclFloat32, 0, communicator, as_cuda(self->stream)));
  } else {
    NCCL(ncclAllReduce(buffer, buffer, SMALL, ncclFloat32, ncclSum, communicator, as_cuda(self->stream)));
  }
  CHECK(log_will_say("rank 1 differs in what is called: rank 1 ncclBroadcast of 1024 float32; rank", "ncclAllReduce of 1024 float32"));
  meet(self);
  NCCL(ncclCommAbort(communicator));
  wait_for(self->stream);
  device_free(buffer);
}

/* Rank 1 makes its call only when the log has named it as missing. */
static void late(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  void* buffer = device_alloc(4 * SMALL);
  if (self->rank == 1) CHECK(log_will_say("call 1: rank 1 has not come for 1", "rank 0 ncclAllReduce of 1024 float32"));
  reduce(self, communicator, buffer, SMALL);
  meet(self);
  device_free(buffer);
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  if (self->ranks < 2) return;
  RUN_PART(clean, self);
  RUN_PART(offsets, self);
  RUN_PART(sizes, self);
  RUN_PART(calls, self);
  RUN_PART(late, self);
}

/* WINDLASS_CHECK is not set on rank 1, so nothing is compared. */
static void without(struct rank* self) {
  if (self->ranks < 2) return;
  if (self->rank == 1) unsetenv("WINDLASS_CHECK");
  ncclComm_t communicator = world(self, FIRST);
  CHECK(log_will_say("are not compared: WINDLASS_CHECK is not on for rank [1]", "check:"));
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

int main(int count, char** words) {
  begin("checked", 280);
  choose(count, words);
  int ranks = rank_count(4);
  windows_sections(ranks, all);
  if (is_section_chosen("in_turn")) run_ranks("in_turn", PROCESSES, ranks, without, NULL);
  return finish();
}
