/* How many kernels of Windlass ran several calls of a group. */
#ifndef WINDLASS_CTESTS_FUSED_H
#define WINDLASS_CTESTS_FUSED_H

#include "harness.h"

/* What has been counted so far in this process; nothing where Windlass is not there. */
struct fused { uint64_t kernels, calls; };
struct fused fused_now(void);

/* Holds that since then so many kernels ran so many calls. Where no kernels of Windlass run collectives, or another rank's are counted,
 * too, it holds nothing, which counts as much. */
void fused_since(const struct rank* self, const struct fused* then, int kernels, int calls);

#endif
