#include "windows.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t window_room(const struct rank* self) {
  size_t count = gather_count(self, 4096);
  return (gather_room(self, count) + count + 4095) / 4096 * 4096;
}

ncclWindow_t window_over(ncclComm_t communicator, char* at, size_t bytes) {
  ncclWindow_t window = NULL;
  NCCL(ncclCommWindowRegister(communicator, at, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
  return window;
}

void window_end(ncclComm_t communicator, ncclWindow_t window) {
  if (window) NCCL(ncclCommWindowDeregister(communicator, window));
}

void window_gather(struct rank* self, ncclComm_t communicator, const struct memory* memory, size_t offset, uint64_t key) {
  size_t count = gather_count(self, 4096);
  const char* send = memory->at + offset + gather_room(self, count);
  struct gather gather = gather_into(self, send, memory, offset, count, key);
  gather_run(self, communicator, &gather);
}

struct memory used_block(struct rank* self, ncclComm_t communicator, uint64_t key) {
  struct memory memory = memory_alloc(self, NCCLS, window_room(self));
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  window_gather(self, communicator, &memory, 0, key);
  meet(self);
  window_end(communicator, window);
  return memory;
}

/* Calls a function of the simulator of NCCL, which Windlass has loaded by its path. -1 on GPUs or without the function. */
static long long ask(const char* question, ncclComm_t communicator) {
  const char* path = getenv("WINDLASS_NCCL");
  if (on_gpus()) return -1;
  void* library = dlopen(path ? path : getenv("CTESTS_NCCL"), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return -1;
  unsigned long long (*asked)(ncclComm_t) = NULL;
  *(void**)&asked = dlsym(library, question);
  long long answer = asked ? (long long)asked(communicator) : -1;
  dlclose(library);
  return answer;
}

long long windows_made(ncclComm_t communicator) { return ask("simWindowsMade", communicator); }
long long windows_live(ncclComm_t communicator) { return ask("simWindows", communicator); }

bool windows_kept(void) {
  return getenv("WINDLASS_POOL") != NULL;
}

struct parts { void (*all)(struct rank*); };

static void since_windows(struct rank* self) {
  const struct parts* parts = self->argument;
  int version = 0;
  NCCL(ncclGetVersion(&version));
  if (version >= 22803) parts->all(self);
}

void windows_sections(int ranks, void (*all)(struct rank*)) {
  struct parts parts = {all};
  if (is_section_chosen("processes")) run_ranks("processes", PROCESSES, ranks, since_windows, &parts);
  if (is_section_chosen("threads")) run_ranks("threads", THREADS, ranks, since_windows, &parts);
}

bool log_says(const char* first, const char* second) {
  const char* path = getenv("WINDLASS_LOG_FILE");
  FILE* file = path ? fopen(path, "r") : NULL;
  if (!file) return false;
  char line[4096];
  bool says = false;
  while (!says && fgets(line, sizeof line, file)) says = strstr(line, first) && strstr(line, second);
  fclose(file);
  return says;
}
