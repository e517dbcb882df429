/* Tells: what ncclMemAlloc and ncclMemFree of 2, 64 and 1,024 MiB take, the first time and in the steady state. Holds: a thousand of
 * them take no memory and no addresses away: neither the device's memory in use nor the process's mappings grow.
 *
 * One rank's device a process, as `rank_count` has it; on stand-ins sizes are smaller. Times go to standard error. */
#include "../support/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MIB = 1 << 20, CYCLES = 1000, TIMED = 50 };

static double ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* Lines of /proc/self/maps, and the bytes of addresses in all of them. */
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

static int compare(const void* left, const void* right) {
  double difference = *(const double*)left - *(const double*)right;
  return difference < 0 ? -1 : difference > 0;
}

static void times(struct rank* self, size_t bytes) {
  double taken[TIMED];
  for (int i = 0; i < TIMED; i++) {
    double began = ns();
    cycle(bytes);
    taken[i] = ns() - began;
  }
  double first = taken[0];
  qsort(taken + 1, TIMED - 1, sizeof taken[0], compare);
  fprintf(stderr, "rank %d: %zu MiB: first %.0f ns, median %.0f ns, worst %.0f ns\n", self->rank, bytes / MIB, first,
          taken[TIMED / 2], taken[TIMED - 1]);
}

static void grows(struct rank* self, size_t bytes) {
  enum { SLACK = 4 * MIB, LINES = 16 /* what drivers do beside */ };
  int cycles = on_gpus() ? CYCLES : 200;
  cycle(bytes);
  size_t used = memory_used();
  struct maps before = maps_now();
  for (int i = 0; i < cycles; i++) cycle(bytes);
  struct maps after = maps_now();
  fprintf(stderr, "rank %d: %d times %zu MiB: memory %zu to %zu bytes, maps %zu to %zu lines, %zu to %zu bytes\n", self->rank, cycles,
          bytes / MIB, used, memory_used(), before.lines, after.lines, before.bytes, after.bytes);
  CHECK(memory_used() <= used + SLACK);
  CHECK(after.lines <= before.lines + LINES);
  CHECK(after.bytes <= before.bytes + bytes + SLACK);
}

static void all(struct rank* self) {
  size_t sizes[] = {2 * (size_t)MIB, (on_gpus() ? 64 : 8) * (size_t)MIB, (on_gpus() ? 1024 : 32) * (size_t)MIB};
  /* While there is one, what is freed is kept. */
  ncclComm_t communicator = world(self, 0);
  for (int i = 0; i < 3; i++) {
    times(self, sizes[i]);
    meet(self);
  }
  for (int i = 0; i < 3; i++) grows(self, sizes[i]);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("pool_times", 200);
  run_ranks("times", PROCESSES, rank_count(on_gpus() ? 4 : 2), all, NULL);
  return finish();
}
