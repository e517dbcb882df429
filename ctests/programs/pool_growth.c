/* Holds that a thousand cycles of ncclMemAlloc and ncclMemFree of 2, 64 and 1,024 MiB leak neither device memory nor mappings of
 * the process. `scripts/measure/windows.py` measures what they cost.
 *
 * Ranks are processes, one for each device that `rank_count` takes; on simulators sizes are smaller. */
#include "../support/memory.h"

#include <stdio.h>

enum { MIB = 1 << 20, CYCLES = 1000 };

/* The number of lines of /proc/self/maps, and the bytes of all their address ranges. */
struct maps { size_t lines, bytes; };

static struct maps maps_now(void) {
  struct maps maps = {0, 0};
  char line[512];
  FILE* file = fopen("/proc/self/maps", "r");
  if (!CHECK(file != NULL)) return maps;
  while (fgets(line, sizeof line, file)) {
    unsigned long long from = 0, to = 0;
    if (sscanf(line, "%llx-%llx", &from, &to) == 2) maps.lines++, maps.bytes += (size_t)(to - from);
  }
  fclose(file);
  return maps;
}

static void cycle(size_t bytes) {
  void* memory = NULL;
  NCCL(ncclMemAlloc(&memory, bytes));
  NCCL(ncclMemFree(memory));
}

static void again_and_again(size_t bytes) {
  /* Room for what drivers do, and for what the C library reserves for a thread that allocates first: 64 MiB, for two. */
  enum { SLACK = 4 * MIB, LINES = 16, THREADS = 128 * MIB };
  int cycles = on_gpus() ? CYCLES : 200;
  cycle(bytes);
  size_t used = memory_used();
  struct maps before = maps_now();
  for (int i = 0; i < cycles; i++) cycle(bytes);
  struct maps after = maps_now();
  CHECK(memory_used() <= used + SLACK);
  CHECK(after.lines <= before.lines + LINES);
  CHECK(after.bytes <= before.bytes + bytes + SLACK + THREADS);
}

static void all(struct rank* self) {
  size_t sizes[] = {2 * (size_t)MIB, (on_gpus() ? 64 : 8) * (size_t)MIB, (on_gpus() ? 1024 : 32) * (size_t)MIB};
  /* Freed memory is kept while there is a communicator. */
  ncclComm_t communicator = world(self, 0);
  for (int i = 0; i < 3; i++) {
    again_and_again(sizes[i]);
    meet(self);
  }
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("pool_growth", 200);
  run_ranks("growth", PROCESSES, rank_count(on_gpus() ? 4 : 2), all, NULL);
  return finish();
}
