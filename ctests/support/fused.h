/* Counts the kernels of Windlass that ran several calls of a group. */
#ifndef WINDLASS_CTESTS_FUSED_H
#define WINDLASS_CTESTS_FUSED_H

#include "harness.h"

/* The counts of this process; zeros without Windlass. */
struct fused { uint64_t kernels, calls; };
struct fused fused_now(void);

/* Holds that since `then` exactly `kernels` kernels ran `calls` calls. Where Windlass's kernels run no collectives, or the
 * process has other ranks, it compares nothing, but counts as many checks. */
void fused_since(const struct rank* self, const struct fused* then, int kernels, int calls);

#endif
