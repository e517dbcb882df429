/* See fused.h. */
#include "fused.h"

#include <stdlib.h>
#include <string.h>

#include "../../include/windlass.h"
#include "uneven.h"

static bool read_now(struct fused* fused) {
  ncclResult_t (*stats)(windlassStats_t*) = NULL;
  *(void**)&stats = windlass_function("windlassGetStats");
  windlassStats_t seen = {.size = sizeof seen};
  if (!stats || stats(&seen) != ncclSuccess) return false;
  *fused = (struct fused){seen.fusedKernels, seen.fusedCalls};
  return true;
}

struct fused fused_now(void) {
  struct fused fused = {0, 0};
  read_now(&fused);
  return fused;
}

static bool is_served(const struct rank* self) {
  const char *peer_group = getenv("WINDLASS_PEER_GROUPS"), *native = getenv("WINDLASS_COLLECTIVES");
  bool off = native && strcmp(native, "off") == 0;
  return self->kind == PROCESSES && windlass_function("windlassGetStats") && peer_group && strcmp(peer_group, "on") == 0 && !off;
}

void fused_since(const struct rank* self, const struct fused* then, int kernels, int calls) {
  struct fused now = {0, 0};
  bool counted = is_served(self) && read_now(&now);
  EQUAL(counted ? now.kernels - then->kernels : (uint64_t)kernels, kernels);
  EQUAL(counted ? now.calls - then->calls : (uint64_t)calls, calls);
}
