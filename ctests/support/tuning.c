/* See tuning.h. */
#include "tuning.h"

#include <stdlib.h>

FILE* tuning_begin(const struct rank* self) {
  char path[512];
  const char* folder = getenv("CTESTS_CALLS"); /* set by the runner */
  snprintf(path, sizeof path, "%s.table-%d", folder ? folder : "tuned", self->rank);
  FILE* file = fopen(path, "w");
  if (!CHECK(file != NULL)) return NULL;
  setenv("WINDLASS_TUNING", path, 1);
  fprintf(file, "windlass-tuning 1\n# of rank %d\n", self->rank);
  return file;
}

void tuning_row(FILE* file, const struct rank* self, const char* collective, const char* key, const char* value) {
  int major = 0, minor = 0, multiprocessors = 0;
  CUDA(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self->device));
  CUDA(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self->device));
  CUDA(cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self->device));
  for (int multicast = 0; multicast < 2; multicast++)
    fprintf(file, "%s ranks %d gpu %d.%d/%d multicast %s %s %s\n", collective, self->ranks, major, minor, multiprocessors,
            multicast ? "yes" : "no", key, value);
}

void tuning_end(FILE* file) {
  CHECK(fclose(file) == 0);
}
