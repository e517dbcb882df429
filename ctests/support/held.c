/* What a process holds: see held.h. */
#include "held.h"

#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

#include "harness.h"

static int entries(const char* path) {
  DIR* directory = opendir(path);
  int count = 0;
  if (!directory) return -1;
  for (struct dirent* entry; (entry = readdir(directory));) count += entry->d_name[0] != '.';
  closedir(directory);
  return count;
}

static int lines(const char* path) {
  FILE* file = fopen(path, "r");
  int count = 0;
  if (!file) return -1;
  for (int character; (character = fgetc(file)) != EOF;) count += character == '\n';
  fclose(file);
  return count;
}

struct held held_now(void) {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total_bytes));
  return (struct held){entries("/proc/self/fd"), entries("/proc/self/task"), lines("/proc/self/maps"),
                       total_bytes - free_bytes};
}

bool held_again(const struct held* before, const struct held* room) {
  struct held now = held_now();
  for (int attempt = 0; attempt < 100; attempt++) {
    if (now.descriptors <= before->descriptors + room->descriptors && now.threads <= before->threads + room->threads &&
        now.mappings <= before->mappings + room->mappings &&
        now.device_bytes <= before->device_bytes + room->device_bytes) {
      return true;
    }
    usleep(100000);
    now = held_now();
  }
  fprintf(stderr, "held before and now: descriptors %d, %d; threads %d, %d; mappings %d, %d; device bytes %zu, %zu\n",
          before->descriptors, now.descriptors, before->threads, now.threads, before->mappings, now.mappings,
          before->device_bytes, now.device_bytes);
  return false;
}
